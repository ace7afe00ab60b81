"""`rlt-dist verify`: hold the system to exact answers."""

from pathlib import Path
from typing import Annotated

import typer

verify_app = typer.Typer(
    help="Hold the system to exact answers.", no_args_is_help=True, rich_markup_mode="markdown"
)


@verify_app.callback()
def _group() -> None:
    """A group even while it has one command, so that `verify golden` is its name."""


@verify_app.command()
def golden(
    files: Annotated[list[Path], typer.Argument(help="Golden .safetensors files.")],
    as_json: Annotated[bool, typer.Option("--json", help="One object a line.")] = False,
) -> None:
    """Run golden files in float64: outputs, state or memory, loss and every gradient.

    One row a file with its largest relative error; exits with 1 where one exceeds 1e-9.

    Example: `rlt-dist verify golden tests/golden/*.safetensors`
    """
    from rlt_dist.inference.golden import TOLERANCE, golden_errors
    from rlt_dist.util.records import to_json

    width = max(len(file.name) for file in files)
    passed = True
    for file in files:
        errors = golden_errors(file)
        worst = max(errors, key=lambda name: errors[name])
        ok = errors[worst] <= TOLERANCE
        passed &= ok
        if as_json:
            row = {"file": file.name, "max_relative_error": errors[worst], "ok": ok}
            print(to_json(row))
        else:
            verdict = "ok" if ok else "WRONG"
            print(f"{file.name:{width}}  {errors[worst]:.2e}  {verdict:5}  worst: {worst}")
    if not passed:
        raise typer.Exit(1)
