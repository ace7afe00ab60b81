"""`rlt-dist bench`: variants of one computation side by side, in time and in memory."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.table import Table

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

    _run([BENCH], Wish(shape, variant, threads, seconds, segments, as_json))


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

    _run([BENCH], Wish(shape, variant, threads, seconds, segments, as_json))


@bench_app.command()
def evaluation(
    shape: Annotated[
        list[str] | None,
        typer.Option(help="len800, len1800, len2800 or len3800; repeatable [default: len800]."),
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

    _run([BENCH], Wish(shape, variant, threads, seconds, segments, as_json))


@bench_app.command()
def stream(
    shape: Annotated[
        list[str] | None,
        typer.Option(
            help="read_small, read_large, prepare_small, prepare_large or step; repeatable "
            "[default: read_small]."
        ),
    ] = None,
    variant: Variants = None,
    threads: Threads = None,
    seconds: Seconds = 20.0,
    as_json: AsJson = False,
) -> None:
    """Time reading and preparing a corpus against plain webdataset, sentencepiece and training.

    Seconds are those of one million tokens. The ratio is the speed against the variant that a name
    ends with. The text is the source of Python's standard library: whole files, or cut at empty
    lines (`small`, about 280 bytes each); the tokenizer is byte-pair encoding of 8,192 ids.

    `read_*`: `webdataset` iterates over the tars and decodes the arrays; `lanes/webdataset` reads
    32 lanes of 256 tokens here, `workers/webdataset` in one process, whatever the threads.

    `prepare_*`: `sentencepiece` encodes documents that lie in memory, with so many threads;
    `prepare/sentencepiece` makes a corpus on disk of text in files, in shards of 1 MiB, with so
    many workers. All of it counts: survey, start of the workers, hashes, commits.

    `step`: `step` is forward and backward of the model of configs/rlt_stdlib.yaml; `lanes/step`
    reads its 32 lanes of 64.

    Peak memory is that above the inputs, in a process for each variant; what workers of that
    process take is not in it.

    Example: `rlt-dist bench stream --shape prepare_small --threads 2`
    """
    from rlt_dist.bench.stream import BENCHES

    _run(BENCHES, Wish(shape, variant, threads, seconds, segments=1, as_json=as_json))


def usable_threads(wished: int | None) -> int:
    """Raises UserError for more than there are cores."""
    import os

    from rlt_dist.util.errors import UserError

    cores = len(os.sched_getaffinity(0))
    threads = wished or cores
    if threads > cores:  # they would wait for each other at every product
        raise UserError(f"--threads {threads} is more than this process's cores, {cores}")
    return threads


def _run(benches: "Sequence[Bench]", wish: Wish) -> None:
    """Run the shapes asked for, each of the benchmark it belongs to."""
    import sys

    from rich.console import Console

    from rlt_dist.bench.compare import Choice, compare, pick

    owners = {shape: bench for bench in benches for shape in bench.shapes}
    shapes = wish.shapes or [next(iter(owners))]
    pick("shape", owners, shapes)
    threads = usable_threads(wish.threads)
    choice = Choice(threads, wish.seconds, wish.segments, wish.variants or ())
    # Off a terminal rich assumes 80 columns, which would cut numbers.
    console = Console(width=None if sys.stdout.isatty() else 120)
    for shape in shapes:
        bench = owners[shape]
        with progress(f"{bench.name} {shape}") as watch:
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
    warn_disturbed(found.disturbance)


def warn_disturbed(cores: float | None) -> None:
    if cores is not None and cores > _DISTURBED:
        typer.echo(
            f"warning: other processes kept {cores:.1f} cores busy while this was "
            "timed; repeat it on a quiet machine",
            err=True,
        )


@contextmanager
def progress(name: str) -> Iterator["Watch"]:
    """What is being done, on a terminal; nothing elsewhere."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(name) as status:
        yield lambda doing: status.update(f"{name}: {doing}")
