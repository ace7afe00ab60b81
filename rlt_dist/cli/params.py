"""`rlt-dist params`: how many parameters a configuration has, and where a mesh puts them."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from rlt_dist.mesh.axes import Axes
    from rlt_dist.parallel.plan.counts import Counts


def params(
    file: Annotated[Path, typer.Argument(help="A run's configuration, a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY.SUB=VALUE...", help="Values that replace the file's."),
    ] = None,
    vocabulary: Annotated[
        int | None, typer.Option(min=1, help="Number of ids [default: the corpus's].")
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            metavar="DxPxT", help="Data x pipeline x tensor [default: the configuration's]."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object.")] = False,
) -> None:
    """Count a configuration's parameters; none is allocated.

    By piece, tied ones once; then what each stage's fullest rank holds, and what is shared: held by
    several stages, or whole on each tensor rank.

    Example: `rlt-dist params configs/rlt_48x48.yaml --vocabulary 32000 --mesh 1x8x2`
    """
    from rlt_dist.cli.vocabulary import vocabulary_of
    from rlt_dist.config.load import load_typed
    from rlt_dist.config.run import RunConfig
    from rlt_dist.mesh.axes import least_axes, parse_axes
    from rlt_dist.parallel.plan.counts import count_parameters
    from rlt_dist.parallel.plan.layout import check_vocabulary

    wished = list(overrides or ())
    if mesh is not None:
        wished += parse_axes(mesh).overrides()
    config = load_typed(file, RunConfig, wished)
    axes = least_axes(config.mesh)
    ids = vocabulary_of(config.data) if vocabulary is None else vocabulary
    check_vocabulary(config.model, ids, axes.tensor)
    counts = count_parameters(config.model, ids, axes)
    if as_json:
        _print_json(file, ids, axes, counts)
    else:
        _show(file, ids, axes, counts)


def _print_json(file: Path, vocabulary: int, axes: "Axes", counts: "Counts") -> None:
    from rlt_dist.util.records import to_json

    ranks = [
        {"stage": share.stage, "tensor": share.tensor, "parameters": share.parameters}
        | {"pieces": share.pieces}
        for share in counts.shares
    ]
    record = {"file": str(file), "vocabulary": vocabulary, "parameters": counts.parameters}
    record |= {"pieces": counts.pieces, "mesh": str(axes), "ranks": ranks}
    record |= {"over_stages": counts.over_stages, "over_tensor": counts.over_tensor}
    print(to_json(record))


def _show(file: Path, vocabulary: int, axes: "Axes", counts: "Counts") -> None:
    from rlt_dist.cli.console import console

    screen = console()
    typer.echo(f"{file}, vocabulary {vocabulary:,}")
    screen.print(_whole(counts))
    if axes.size == 1:
        return
    typer.echo(f"on {axes} (data x pipeline x tensor), the fullest tensor rank of each stage")
    screen.print(_by_stage(axes, counts))
    for stages in dict.fromkeys(counts.over_stages.values()):
        names = [name for name, holders in counts.over_stages.items() if holders == stages]
        typer.echo(f"stages {_span(stages)} all hold {_alike(names)}")
    if counts.over_tensor:
        typer.echo(f"several tensor ranks hold the same {_alike(counts.over_tensor)}")


def _whole(counts: "Counts") -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE, show_footer=True)
    table.add_column("piece", footer="all")
    table.add_column("parameters", footer=f"{counts.parameters:,}", justify="right")
    for piece, number in counts.pieces.items():
        table.add_row(piece, f"{number:,}")
    return table


def _by_stage(axes: "Axes", counts: "Counts") -> "Table":
    """A row a stage: what the tensor rank that holds most has of each piece."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE)
    table.add_column("stage", justify="right")
    for name in (*counts.pieces, "fullest rank"):
        table.add_column(name, justify="right")
    for stage in range(axes.pipeline):
        share = counts.largest(stage)
        held = [share.pieces.get(piece) for piece in counts.pieces]
        numbers = ("-" if number is None else f"{number:,}" for number in held)
        table.add_row(str(stage), *numbers, f"{share.parameters:,}")
    return table


def _alike(names: "Sequence[str]") -> str:
    """Names, those that differ in a number alone as one."""
    numbered = r"\b(encoder|decoder|layers|emb_layers|emb_projs|out_projs)\.\d+"
    return ", ".join(dict.fromkeys(re.sub(numbered, r"\1.*", name) for name in names))


def _span(stages: tuple[int, ...]) -> str:
    """`0-7` for stages that follow one another, else `0, 7`."""
    first, last = stages[0], stages[-1]
    if stages == tuple(range(first, last + 1)):
        return f"{first}-{last}"
    return ", ".join(map(str, stages))
