"""`rlt-dist bench`: variants of one computation side by side, in time and in memory."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from rlt_dist.bench.checkpoint import Costs
    from rlt_dist.bench.compare import Bench, Comparison, Watch

bench_app = typer.Typer(
    help="Time variants of one computation in turn, and measure their memory.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

Variants = Annotated[
    list[str] | None,
    typer.Option("--variant", help="One of the variants; repeatable [default: all that run here]."),
]
Threads = Annotated[int | None, typer.Option(min=1, help="Threads, at most the cores [default].")]
Seconds = Annotated[
    float, typer.Option(min=0.0, help="Time for the rounds of a shape; three are always run.")
]
Segments = Annotated[
    int, typer.Option(min=1, help="Consecutive segments that peak memory is taken over.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One object a line.")]

_DISTURBED = 0.1
"""Cores kept busy by others from which on figures are not to be trusted."""


@dataclass(frozen=True)
class Wish:
    """What the command line asked for."""

    shapes: list[str] | None
    variants: list[str] | None
    threads: int | None
    seconds: float
    segments: int
    as_json: bool


@bench_app.command()
def recurrence(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="d256, d128, d512, d256_b16 or d256_t512; repeatable [default: d256]."),
    ] = None,
    variant: Variants = None,
    threads: Threads = None,
    seconds: Seconds = 20.0,
    segments: Segments = 1,
    as_json: AsJson = False,
) -> None:
    """Time the recurrence's backends on whole steps of training.

    Variants: `reference`, `python` and `native` train RLT-1; `rlt0` is the same model without
    feedback under plain autograd; `core` is native's decoder alone. `floor` is the matrix products
    of native's step and nothing else: the decoder's and the feedback's with the compiled loop's own
    kernels and rows, products with window and memory included, and all batched ones in torch;
    neither norms, softmax and activations nor packing and allocation.

    Peak memory is that above parameters, tokens and carried state, in a process for each variant.

    Example: `rlt-dist bench recurrence --shape d256 --threads 2`
    """
    from rlt_dist.bench.recurrence import BENCH

    _run(BENCH, Wish(shape, variant, threads, seconds, segments, as_json))


@bench_app.command("transformer_xl")
def transformer_xl(
    shape: Annotated[
        list[str] | None, typer.Option(help="base; repeatable [default: base].")
    ] = None,
    variant: Variants = None,
    threads: Threads = None,
    seconds: Seconds = 20.0,
    segments: Segments = 1,
    as_json: AsJson = False,
) -> None:
    """Time a step of training of Transformer-XL against the paper written down plainly.

    Variants: `straightforward`, `ours`, and `floor`, the matrix products alone in torch: attention
    with every key, seen or not; neither shifts, softmax and norms nor allocation.

    Example: `rlt-dist bench transformer_xl --threads 2`
    """
    from rlt_dist.bench.transformer_xl import BENCH

    _run(BENCH, Wish(shape, variant, threads, seconds, segments, as_json))


@bench_app.command()
def evaluation(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="len800, len1800 or len3800; repeatable [default: len800]."),
    ] = None,
    variant: Variants = None,
    threads: Threads = None,
    seconds: Seconds = 20.0,
    segments: Segments = 1,
    as_json: AsJson = False,
) -> None:
    """Time Transformer-XL's evaluation by token: carried memory against a recomputed window.

    Variants: `window` runs all tokens that one attends to through the model for each token;
    `cached` scores segments of 128 behind a full memory. At len3800 a window takes many seconds.

    Example: `rlt-dist bench evaluation --shape len800 --threads 2`
    """
    from rlt_dist.bench.evaluation import BENCH

    _run(BENCH, Wish(shape, variant, threads, seconds, segments, as_json))


@bench_app.command()
def checkpoint(
    threads: Threads = None,
    rounds: Annotated[int, typer.Option(min=2, help="Intervals of each way.")] = 5,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where to write [default: the system's folder for temporary files]."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Time steps of training without saves, beside saves and between saves that it waits for.

    Each way trains RLT-1 of 12 million parameters, whose checkpoint has more than 100 MB; one
    of four steps is saved. `blocked` is what training waits for at a save, as a share of a step
    without saves; `interval` is four steps with their save until it is on disk; `written` is the
    size of all files against that of the tensors.

    Example: `rlt-dist bench checkpoint --threads 1`
    """
    from tempfile import TemporaryDirectory

    from rlt_dist.bench.checkpoint import measure

    count = _threads(threads)
    with TemporaryDirectory(dir=folder) as temporary, _progress("checkpoint") as watch:
        ways, disturbance = measure(Path(temporary), count, rounds, watch)
    rows = _saving_rows(ways)
    if as_json:
        from rlt_dist.util.records import to_json

        common = {"bench": "checkpoint", "threads": count, "rounds": rounds}
        for row in rows:
            print(to_json(common | row | {"disturbance": disturbance}), flush=True)
    else:
        _print_saving(f"checkpoint, threads: {count}, rounds: {rounds}", rows)
    _warn_disturbed(disturbance)


def _saving_rows(ways: "dict[str, Costs]") -> list[dict[str, Any]]:
    """Medians by way, and shares of a step without saves."""
    from rlt_dist.bench.checkpoint import typical

    step = typical(ways["none"].steps)
    interval = typical(ways["none"].intervals)
    assert step is not None
    assert interval is not None
    rows = []
    for way, costs in ways.items():
        blocked, whole = typical(costs.blocked), typical(costs.intervals)
        assert whole is not None
        last = costs.saves[-1] if costs.saves else None
        row: dict[str, Any] = {"variant": way, "seconds": typical(costs.steps)}
        row |= {"quartiles": costs.quartiles, "interval_seconds": whole}
        row |= {"interval_ratio": whole / interval, "blocked_seconds": blocked}
        row |= {"blocked_share": None if blocked is None else blocked / step}
        row |= {"save_seconds": typical([saved.seconds for saved in costs.saves])}
        row |= {"bytes": last and last.bytes, "tensor_bytes": last and last.tensor_bytes}
        rows.append(row)
    return rows


def _print_saving(title: str, rows: list[dict[str, Any]]) -> None:
    import sys

    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("saves")
    for name in ("step", "quartiles", "interval", "blocked", "of a step", "on disk", "written"):
        table.add_column(name, justify="right")
    for row in rows:
        low, high = row["quartiles"]
        saves = ("-",) * 4
        if row["bytes"]:
            written = f"{row['bytes'] / 1e6:.1f} MB, {row['bytes'] / row['tensor_bytes']:.3f}x"
            blocked = f"{row['blocked_seconds'] * 1e3:,.1f} ms", f"{row['blocked_share']:.1%}"
            saves = (*blocked, f"{row['save_seconds'] * 1e3:,.0f} ms", written)
        table.add_row(
            row["variant"],
            f"{row['seconds'] * 1e3:,.1f} ms",
            f"{low * 1e3:,.1f} - {high * 1e3:,.1f}",
            f"{row['interval_ratio']:.3f}x",
            *saves,
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


def _threads(wished: int | None) -> int:
    """Raises UserError for more than there are cores."""
    import os

    from rlt_dist.util.errors import UserError

    cores = len(os.sched_getaffinity(0))
    threads = wished or cores
    if threads > cores:  # they would wait for each other at every product
        raise UserError(f"--threads {threads} is more than this process's cores, {cores}")
    return threads


def _run(bench: "Bench", wish: Wish) -> None:
    import sys

    from rich.console import Console

    from rlt_dist.bench.compare import Choice, compare, pick

    shapes = wish.shapes or [next(iter(bench.shapes))]
    pick("shape", bench.shapes, shapes)
    threads = _threads(wish.threads)
    choice = Choice(threads, wish.seconds, wish.segments, wish.variants or ())
    # Off a terminal rich assumes 80 columns, which would cut numbers.
    console = Console(width=None if sys.stdout.isatty() else 120)
    for shape in shapes:
        with _progress(f"{bench.name} {shape}") as watch:
            found = compare(bench, shape, choice, watch)
        if wish.as_json:
            _print_json(bench.name, shape, threads, found)
        else:
            title = f"{bench.name} {shape}, threads: {threads}, rounds: {found.rounds}"
            console.print(_table(title, found, wish.segments))
        _warn(found)


def _print_json(bench: str, shape: str, threads: int, found: "Comparison") -> None:
    from rlt_dist.util.records import to_json

    for row in found.rows:
        record: dict[str, Any] = {"bench": bench, "variant": row.variant, "shape": shape}
        record |= {"threads": threads, "seconds": row.seconds, "ratio": row.ratio}
        record |= {"peak_bytes": row.peak_bytes, "quartiles": row.quartiles}
        record |= {"over_floor": row.over_floor, "rounds": found.rounds}
        print(to_json(record | {"disturbance": found.disturbance}), flush=True)


def _table(title: str, found: "Comparison", segments: int) -> "Table":
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    table.add_column("variant")
    of_what = "" if segments == 1 else f", {segments} segments"
    for name in ("median", "quartiles", "ratio", "of floor", f"peak MiB{of_what}"):
        table.add_column(name, justify="right")
    for row in found.rows:
        low, high = row.quartiles
        peak = "-" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:,.1f}"
        table.add_row(
            row.variant,
            f"{row.seconds * 1e3:,.2f} ms",
            f"{low * 1e3:,.2f} - {high * 1e3:,.2f}",
            *("-" if x is None else f"{x:.2f}x" for x in (row.ratio, row.over_floor)),
            peak,
        )
    return table


def _warn(found: "Comparison") -> None:
    for reason in dict.fromkeys(found.left_out.values()):
        names = ", ".join(name for name, why in found.left_out.items() if why == reason)
        typer.echo(f"warning: left out: {names}: {reason}", err=True)
    _warn_disturbed(found.disturbance)


def _warn_disturbed(cores: float | None) -> None:
    if cores is not None and cores > _DISTURBED:
        typer.echo(
            f"warning: other processes kept {cores:.1f} cores busy while this was "
            "timed; repeat it on a quiet machine",
            err=True,
        )


@contextmanager
def _progress(name: str) -> Iterator["Watch"]:
    """What is being done, on a terminal; nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(name) as status:
        yield lambda doing: status.update(f"{name}: {doing}")
