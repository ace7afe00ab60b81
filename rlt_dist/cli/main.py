"""The command line: one typer application, one file a command."""

import sys

import typer

from rlt_dist.util.errors import UserError

app = typer.Typer(
    name="rlt-dist",
    help="Distributed pretraining of models whose state outlives a batch.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)


def main() -> None:
    """Run the command line; a person's mistake is one line and exit status 2."""
    try:
        app()
    except UserError as error:
        for line in str(error).splitlines():
            print(f"rlt-dist: error: {line}", file=sys.stderr)
        sys.exit(2)
