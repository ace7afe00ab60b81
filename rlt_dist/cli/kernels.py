"""`rlt-dist kernels`: Triton's kernels, without a GPU."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rlt_dist.util.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import ModuleType

    from rlt_dist.ops.triton.build import Built
    from rlt_dist.ops.triton.shapes import Shapes

kernels_app = typer.Typer(help="Triton's kernels.", no_args_is_help=True)

_REFERENCE = Path("configs/rlt_48x48.yaml")
_VOCABULARY = 32000

File = Annotated[Path, typer.Argument(help="A run's configuration, a YAML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY.SUB=VALUE...", help="Values that replace the file's."),
]
Vocabulary = Annotated[
    int | None,
    typer.Option(
        min=1, help=f"Number of ids [default: the corpus's; {_VOCABULARY:,} where there is none]."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="An object a line.")]


@kernels_app.command()
def build(
    file: File = _REFERENCE,
    overrides: Overrides = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help="sm_80, sm_90, sm_100 or gfx942; repeatable [default: sm_90]."),
    ] = None,
    vocabulary: Vocabulary = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes that compile.")] = 1,
    as_json: Json = False,
) -> None:
    """Compile every kernel of a model at a configuration's shapes; no GPU is needed.

    Shown are a thread's registers, the bytes of it that did not fit into them, a block's shared
    memory, and which matrix instruction was used. Exits with 1 where a kernel does not compile,
    spills, exceeds a chip's shared memory, or multiplies matrices without matrix instructions.

    Example: `rlt-dist kernels build configs/rlt_48x48.yaml --target sm_90 --target gfx942`
    """
    from dataclasses import asdict

    from rlt_dist.ops.triton.build import CHIPS, build_all

    targets = list(dict.fromkeys(target or ["sm_90"]))
    for name in targets:
        if name not in CHIPS:
            raise UserError(f"--target {name} is none of {', '.join(CHIPS)}")
    modules, shapes = _kernel_modules(), _shapes(file, overrides, vocabulary)
    built = list(build_all([module.__name__ for module in modules], shapes, targets, workers))
    if as_json:
        _print_json([asdict(one) for one in built])
    else:
        _show_built(shapes, built)
    if any(one.trouble for one in built):
        raise typer.Exit(1)


@kernels_app.command("list")
def list_(
    file: File = _REFERENCE,
    overrides: Overrides = None,
    vocabulary: Vocabulary = None,
    as_json: Json = False,
) -> None:
    """Show what each kernel must move and compute, and the time that none can beat on an H200.

    Example: `rlt-dist kernels list configs/rlt_48x48.yaml`
    """
    _kernel_modules()
    from rlt_dist.bench.kernels import cases

    shapes = _shapes(file, overrides, vocabulary)
    found = {case.name: case.floor for case in cases(shapes)}
    if as_json:
        counted = ("bytes", "operations", "microseconds")
        _print_json(
            [
                {"name": name} | {key: getattr(floor, key) for key in counted}
                for name, floor in found.items()
            ]
        )
        return
    rows = [
        (
            name,
            f"{floor.bytes / 1e6:,.2f}",
            f"{floor.operations / 1e9:,.2f}",
            f"{floor.microseconds:,.1f}",
        )
        for name, floor in found.items()
    ]
    typer.echo(_described(shapes))
    _print_table(("kernel", "MB", "GFLOP", "us on an H200, at least"), rows)


def _kernel_modules() -> "list[ModuleType]":
    from rlt_dist.ops.triton import kernel_files

    try:
        return list(kernel_files())
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != "triton":
            raise
        raise UserError(
            "kernels need triton, which is not installed: pip install 'rlt_dist[triton]'"
        ) from None


def _shapes(file: Path, overrides: "Sequence[str] | None", vocabulary: int | None) -> "Shapes":
    from rlt_dist.cli.vocabulary import vocabulary_of
    from rlt_dist.config.load import load_typed
    from rlt_dist.config.run import RunConfig
    from rlt_dist.ops.triton.shapes import shapes_of

    config = load_typed(file, RunConfig, list(overrides or ()))
    if vocabulary is None:
        try:
            vocabulary = vocabulary_of(config.data)
        except UserError:
            vocabulary = _VOCABULARY
    return shapes_of(config, vocabulary)


def _described(shapes: "Shapes") -> str:
    """The shapes on a line, under the names of their fields; what is 0 is not of this model."""
    from dataclasses import asdict

    given = {name: value for name, value in asdict(shapes).items() if value != 0}
    return ", ".join(f"{name} {value}" for name, value in given.items())


def _print_json(records: "Sequence[dict[str, Any]]") -> None:
    from rlt_dist.util.records import to_json

    for record in records:
        print(to_json(record))


def _show_built(shapes: "Shapes", built: "Sequence[Built]") -> None:
    rows = [
        (
            one.name,
            one.target,
            str(one.registers),
            str(one.spilled),
            f"{one.shared:,}",
            one.instruction or "-",
            f"{one.seconds:.1f}",
            "; ".join(one.trouble) or "fit",
        )
        for one in built
    ]
    head = ("kernel", "target", "registers", "spilled", "shared", "products", "seconds", "")
    typer.echo(_described(shapes))
    _print_table(head, rows)


def _print_table(head: "Sequence[str]", rows: "Sequence[Sequence[str]]") -> None:
    from rich import box
    from rich.table import Table

    from rlt_dist.cli.console import console

    table = Table(*head, box=box.SIMPLE)
    for row in rows:
        table.add_row(*row)
    console().print(table)
