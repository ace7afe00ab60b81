"""`rlt-dist data`: prepare a corpus, show and verify one; the other views are files beside this."""

import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from rlt_dist.cli.data_cat import cat
from rlt_dist.cli.data_stats import CorpusPath, stats
from rlt_dist.util.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress

    from rlt_dist.data.corpus.index import CorpusIndex, SplitIndex
    from rlt_dist.data.prepare.workers import Workers
    from rlt_dist.data.standing import Standing, Watch

data_app = typer.Typer(
    help="Raw text to tokens in shards: prepare a corpus, look into one, verify one.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

_REDRAW_SECONDS = 0.1
_FILE_WIDTH = 120
_MEBIBYTE = 1 << 20


@data_app.command()
def prepare(
    inputs: Annotated[
        list[Path],
        typer.Option("--input", help="A file or folder of text; repeat for more, read in order."),
    ],
    output: Annotated[Path, typer.Option(help="The corpus folder to make.")],
    tokenizer: Annotated[
        Path,
        typer.Option(
            help="A recipe (.yaml), which is trained on the train split first; "
            "or a saved tokenizer (.json), which is used as it is."
        ),
    ],
    pattern: Annotated[
        str, typer.Option(help="Which files of a folder to take, by name; or by path, with a /.")
    ] = "*",
    exclude: Annotated[
        list[str] | None,
        typer.Option(help="Files or folders below a folder to leave out; repeat for more."),
    ] = None,
    layout: Annotated[
        Literal["text", "chat"],
        typer.Option(
            "--format", help="What a JSON line holds: a text, or a conversation for fine-tuning."
        ),
    ] = "text",
    text_field: Annotated[
        str, typer.Option(help="The field or column with the text, in JSON lines and Parquet.")
    ] = "text",
    separator: Annotated[
        str | None,
        typer.Option(help="What stands between documents in a file [default: none, one a file]."),
    ] = None,
    allow_binary: Annotated[
        bool,
        typer.Option("--allow-binary", help="Take files that begin like binary ones, with NULs."),
    ] = False,
    require_utf8: Annotated[
        bool, typer.Option("--require-utf8", help="Refuse text that is not UTF-8.")
    ] = False,
    longest_mib: Annotated[
        float, typer.Option(help="A longer document is stored as several, in MiB.")
    ] = 16.0,
    train: Annotated[float, typer.Option(help="Share of the documents to train on.")] = 0.9,
    validation: Annotated[float, typer.Option(help="Share to validate on; 0 for none.")] = 0.05,
    test: Annotated[float, typer.Option(help="Share to test on; 0 for none.")] = 0.05,
    shard_mib: Annotated[float, typer.Option(help="Raw text in a shard, in MiB.")] = 8.0,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that work at once [default: one a usable CPU]."),
    ] = None,
    mpi: Annotated[
        bool,
        typer.Option("--mpi", help="The other ranks of this MPI world work; see launch/."),
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Start afresh in a folder prepared before.")
    ] = False,
) -> None:
    """Turn raw text into a corpus folder: a tokenizer, shards of whole documents, an index.

    A folder's files are taken in sorted order, each one document; `.gz`, `.xz` and `.zst` are
    unpacked, JSON lines and Parquet give a document a row. Hidden files, links to folders and empty
    documents are left out and counted. The result is the same whatever the number of workers.
    Interrupted at any moment and started again, it goes on.

    With `--format chat` a JSON line is `{"messages": [{"role": "user", "content": "..."}, ...]}`,
    roles being system, user and assistant. All of it is read, and only what the assistant says is
    learned. Give the tokenizer of the model, and start its run with `initial=RUN`.

    Examples:

    `rlt-dist data prepare --input books/ --pattern '*.txt' --output corpora/books
    --tokenizer tokenizer/bpe.yaml`

    `rlt-dist data prepare --input talks.jsonl --format chat --output corpora/talks
    --tokenizer runs/rlt/tokenizer.json`
    """
    from rlt_dist.data.prepare.inputs import InputOptions
    from rlt_dist.data.prepare.prepare import prepare_corpus
    from rlt_dist.data.prepare.workers import local_workers, mpi_workers

    # As Ctrl-C does: whoever is at work puts away what is half-written.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if mpi and workers is not None:
        raise UserError("--workers and --mpi: give one of them; the MPI world has its own number")
    with ExitStack() as stack:
        crew: AbstractContextManager[Workers] = local_workers(
            workers or _usable_cpus(), "with fewer --workers"
        )
        if mpi:
            ranks = stack.enter_context(mpi_workers())
            if ranks is None:  # this rank has done its work for rank 0
                return
            crew = nullcontext(ranks)
        options = InputOptions(
            format=layout,
            pattern=pattern,
            exclude=tuple(exclude or ()),
            text_field=text_field,
            separator=separator,
            allow_binary=allow_binary,
            require_utf8=require_utf8,
            longest=_bytes("--longest-mib", longest_mib),
        )
        prepared = prepare_corpus(
            inputs,
            output,
            tokenizer,
            options=options,
            shares={"train": train, "validation": validation, "test": test},
            shard_bytes=_bytes("--shard-mib", shard_mib),
            overwrite=overwrite,
            workers=crew,
            watch=stack.enter_context(_progress_bar()),
        )
    if prepared.already_finished:
        typer.echo(f"{output}: was finished before, nothing is left to do")
    _print_summary(prepared.corpus)


@data_app.command()
def show(corpus: CorpusPath) -> None:
    """Show what a corpus holds: splits, shards, documents, tokens, tokenizer.

    Example: `rlt-dist data show corpora/books`
    """
    from rlt_dist.data.corpus.index import load_corpus

    index = load_corpus(corpus)
    _print_summary(index)
    tokenizer = index.tokenizer
    typer.echo(f"tokenizer    {tokenizer.kind}, {tokenizer.vocabulary} ids, hash {tokenizer.hash}")
    typer.echo(f"fingerprint  {index.fingerprint}")


@data_app.command()
def verify(corpus: CorpusPath) -> None:
    """Read a whole corpus and hold it to its index: sizes, SHA-256, every document's tokens.

    One line for each damaged shard; exits with 1 where there is one.

    Example: `rlt-dist data verify corpora/books`
    """
    from rlt_dist.data.corpus.index import read_content
    from rlt_dist.data.corpus.location import open_storage
    from rlt_dist.data.corpus.verify import verify_corpus

    storage = open_storage(corpus)
    shards = sum(map(len, read_content(storage).splits.values()))
    with _progress_bar() as watch:
        damaged = list(verify_corpus(storage, watch))
    if damaged:
        typer.echo("\n".join(damaged))
        typer.echo(f"{corpus}: {len(damaged)} of {shards} shards are damaged")
        raise typer.Exit(1)
    typer.echo(f"{corpus}: all {shards} shards are whole")


data_app.command()(stats)
data_app.command()(cat)


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0))


def _bytes(option: str, mebibytes: float) -> int:
    size = round(mebibytes * _MEBIBYTE) if math.isfinite(mebibytes) else 0
    if size < 1:
        raise UserError(f"{option} {mebibytes}: must be a number above 0, such as 8")
    return size


def _print_summary(corpus: "CorpusIndex") -> None:
    """One line a split (its longest document in tokens), and what was left out."""
    from rich.table import Table

    from rlt_dist.cli.console import console

    table = Table(title=str(corpus.location), title_justify="left")
    table.add_column("split")
    for heading in ("shards", "documents", "tokens", "bytes", "bytes/token", "longest"):
        table.add_column(heading, justify="right", overflow="fold")
    for split in corpus.splits.values():
        table.add_row(split.name, *_figures(split))
    console(_FILE_WIDTH).print(table)
    left_out = [f"{count} {name.replace('_', ' ')}" for name, count in corpus.dropped.items()]
    typer.echo(f"left out     {', '.join(left_out)}")


def _figures(split: "SplitIndex") -> list[str]:
    longest = max(int(shard.sidecar()["tokens"].max()) for shard in split.shards)
    return [
        f"{len(split.shards):,}",
        f"{split.documents:,}",
        f"{split.tokens:,}",
        f"{split.bytes:,}",
        f"{split.bytes / split.tokens:.2f}",
        f"{longest:,}",
    ]


@contextmanager
def _progress_bar() -> "Iterator[Watch]":
    """A bar on the terminal's error stream; silent where that is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda _: None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TextColumn("{task.fields[documents]:,} documents"),
        TextColumn("{task.fields[speed]:,.0f} tokens/s"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        bars = _Bars(progress)
        yield bars.watch
        bars.draw()


class _Bars:
    """Draws the standing of a preparation, one bar a stage, a few times a second."""

    def __init__(self, progress: "Progress") -> None:
        self._progress = progress
        self._latest: Standing | None = None
        self._drawn = 0.0

    def watch(self, standing: "Standing") -> None:
        """Take note of a standing, and draw it if the last drawing is old."""
        now = time.monotonic()
        if self._latest is None or standing.stage != self._latest.stage:
            self.draw()
            self._begun = now
            self._task = self._progress.add_task(
                standing.stage, total=standing.bytes_total, documents=0, speed=0.0
            )
        self._latest = standing
        if now - self._drawn >= _REDRAW_SECONDS:
            self._drawn = now
            self.draw()

    def draw(self) -> None:
        """Draw the latest standing, if there is one."""
        if self._latest is None:
            return
        seconds = max(time.monotonic() - self._begun, _REDRAW_SECONDS)
        self._progress.update(
            self._task,
            completed=self._latest.bytes_read,
            documents=self._latest.documents,
            speed=self._latest.tokens / seconds,
        )
