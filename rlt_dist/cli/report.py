"""`rlt-dist report`: one page about a run."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from rlt_dist.study.report import RunReport


def report(
    run: Annotated[Path, typer.Argument(help="A run folder.")],
    output: Annotated[
        Path | None, typer.Option(help="The page to write [default: RUN/report.html].")
    ] = None,
) -> None:
    """Show a run's numbers and write its one-page report.

    The page is one HTML file that needs nothing else: loss, throughput and state norms over the
    steps, evaluations with the state carried against cut, a sample, the configuration.

    Example: `rlt-dist report runs/rlt`
    """
    from rlt_dist.cli.console import console
    from rlt_dist.study.report import gather, page
    from rlt_dist.util.errors import UserError
    from rlt_dist.util.files import write_atomic

    found = gather(run)
    path = output if output is not None else run / "report.html"
    if path.is_dir() or not path.parent.is_dir():
        raise UserError(f"{path}: cannot be written; give --output a file in an existing folder")
    write_atomic(path, page(found))
    screen = console()
    typer.echo(f"{found.title}: {found.shape}")
    screen.print(_numbers(found))
    if found.comparisons:
        screen.print(_evaluations(found))
    for sentence in found.findings:
        typer.echo(sentence)
    typer.echo(str(path))


def _numbers(found: "RunReport") -> "Table":
    from rich import box
    from rich.table import Table

    from rlt_dist.study.report import key_numbers

    table = Table(box=box.SIMPLE, show_header=False)
    table.add_column("name")
    table.add_column("value", justify="right", style="bold")
    table.add_column("note", style="dim")
    for fact in key_numbers(found):
        table.add_row(*fact)
    return table


def _evaluations(found: "RunReport") -> "Table":
    """Carried against cut in bits per byte, or in loss where the tokenizer gives no bytes."""
    from rich import box
    from rich.table import Table

    from rlt_dist.study.report import number

    in_bits = any(row.measured("bits_per_byte") for row in found.comparisons)
    key, unit = ("bits_per_byte", "bits per byte") if in_bits else ("loss", "nats per token")
    table = Table(title=f"State carried against cut, {unit}", box=box.SIMPLE)
    table.add_column("split")
    for name in ("segment", "step", "tokens", "carried", "cut"):
        table.add_column(name, justify="right")
    table.add_column("saved", justify="right", style="bold")
    for row in found.comparisons:
        values = (row.value("carried", key), row.value("cut", key), row.saved(key))
        split = f"{row.split} ({row.choices})" if row.choices else row.split
        amounts = (f"{row.segment:,}", row.either("step"), row.either("tokens"))
        table.add_row(split, *amounts, *map(number, values))
    return table
