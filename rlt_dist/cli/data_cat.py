"""`rlt-dist data cat`: what documents say, and what a lane reads."""

import sys
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlt_dist.util.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import numpy as np

    from rlt_dist.config.data import DataConfig
    from rlt_dist.data.corpus.index import SplitIndex
    from rlt_dist.data.corpus.sources import Sources
    from rlt_dist.data.stream.lanes import Cursor
    from rlt_dist.data.stream.reading import Reading
    from rlt_dist.data.tokenizers.tokenizer import Tokenizer

_READ_AT_ONCE = 1 << 12


def cat(
    corpus: Annotated[
        str | None, typer.Argument(metavar="[CORPUS]", help="A prepared corpus, or use --run.")
    ] = None,
    split: Annotated[str, typer.Option(help="Which split is read.")] = "train",
    document: Annotated[
        int, typer.Option(min=0, help="The first document shown, counted from the split's start.")
    ] = 0,
    documents: Annotated[int, typer.Option(min=1, help="How many documents.")] = 1,
    lane: Annotated[
        int | None, typer.Option(min=0, help="Show a lane's stream instead of documents.")
    ] = None,
    lanes: Annotated[int | None, typer.Option(min=1, help="Of how many lanes it is one.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="The seed of the lanes' order.")] = 0,
    cursor: Annotated[
        list[str] | None,
        typer.Option(
            metavar="EPOCH,DOCUMENT,OFFSET[,TOKENS]",
            help="Where the lane begins; repeat it for each corpus of a mixture "
            "[default: its start, or the run's newest checkpoint].",
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="How much of the lane.")] = 200,
    run: Annotated[
        Path | None, typer.Option(help="A run folder: its corpora, lanes, seed and cursors.")
    ] = None,
    ids: Annotated[bool, typer.Option("--ids", help="Show token ids instead of text.")] = False,
    where: Annotated[
        bool,
        typer.Option("--where", help="Name each document's source before it, on standard error."),
    ] = False,
) -> None:
    """Show documents, or what a lane reads from any cursor on.

    The text is written as it is, byte for byte; `<|endoftext|>` stands where a document ends.

    Examples:

    `rlt-dist data cat corpora/books --document 17`

    `rlt-dist data cat corpora/books --lanes 8 --lane 3 --cursor 0,12,40 --tokens 500`

    `rlt-dist data cat --run runs/rlt --lane 3`
    """
    from rlt_dist.data.corpus.index import load_corpus
    from rlt_dist.data.corpus.sources import read_sources
    from rlt_dist.data.stream.corpora import open_corpora

    if (corpus is None) == (run is None):
        raise UserError("give a corpus, or a run folder with --run")
    if where and lane is not None:
        raise UserError("--where names documents; leave out --lane")
    if lane is None:
        if run is not None or cursor or lanes is not None:
            raise UserError("give the lane to show with --lane")
        index = load_corpus(corpus or "")
        names = read_sources(index.storage) if where else None
        _write(_documents(index.split(split), document, documents, names), index.tokenizer, ids)
        return
    data, seed = _data_of(corpus, run, lanes, seed)
    if lane >= data.lanes:
        raise UserError(f"there are {data.lanes} lanes; the last is --lane {data.lanes - 1}")
    places = None if run is None or cursor else _cursors_in(run, lane, data.lanes)
    if cursor:
        places = _parse_cursors(cursor, len(data.corpora))
    corpora = open_corpora(data)
    reading = corpora.reading(split, data, seed)
    _write(_stream(reading, lane, places, tokens), corpora.tokenizer, ids)


def _documents(
    split: "SplitIndex", first: int, count: int, names: "Sources | None"
) -> "Iterator[np.ndarray]":
    """Documents `first` to `first + count` of a split, in the shards' order."""
    from rlt_dist.data.corpus.shard import tokens_and_labels

    if first >= split.documents:
        raise UserError(
            f"split {split.name!r} has {split.documents} documents; the last is "
            f"--document {split.documents - 1}"
        )
    for shard in split.shards:
        size = shard.entry.documents
        last = min(first + count, size)
        if first < last:
            told = [] if names is None else map(names.name, shard.ordinals(first, last))
            for found, name in zip_longest(shard.read(first, last), told):
                if name is not None:
                    print(name, file=sys.stderr, flush=True)
                yield tokens_and_labels(found)[0]
            count -= last - first
        first = max(0, first - size)


def _data_of(
    corpus: str | None, run: Path | None, lanes: int | None, seed: int
) -> "tuple[DataConfig, int]":
    """The corpora and lanes that are meant, and their seed."""
    from rlt_dist.checkpoint.run_folder import CONFIG
    from rlt_dist.config.data import DataConfig
    from rlt_dist.config.load import load_typed
    from rlt_dist.config.run import RunConfig

    if run is not None:
        config = load_typed(run / CONFIG, RunConfig)
        return config.data, config.train.seed
    if lanes is None:
        raise UserError("give the number of lanes with --lanes: a lane's order depends on it")
    return DataConfig(path=corpus, lanes=lanes, segment=1), seed


def _cursors_in(run: Path, lane: int, lanes: int) -> "list[Cursor] | None":
    """Where a lane goes on from a run's newest checkpoint; None where there is none.

    That has another number of lanes until a run started with `--reset-state` saves.
    """
    from rlt_dist.checkpoint.explain import after_reset
    from rlt_dist.checkpoint.load import load_whole
    from rlt_dist.checkpoint.manifest import latest
    from rlt_dist.checkpoint.run_folder import CHECKPOINTS
    from rlt_dist.data.stream.lanes import Cursor

    newest = latest(run / CHECKPOINTS)
    if newest is None:
        return None
    cursors = load_whole(newest, ["cursors"])["cursors"]
    if len(cursors) != lanes:
        cursors, note = after_reset(cursors, lanes)
        print(f"note: {note}", file=sys.stderr)
    return [Cursor.from_numbers(row) for row in cursors[lane].tolist()]


def _parse_cursors(texts: "Sequence[str]", corpora: int) -> "list[Cursor]":
    from rlt_dist.data.stream.lanes import Cursor

    if len(texts) != corpora:
        raise UserError(f"--cursor is given {len(texts)} times, and there are {corpora} corpora")
    try:
        numbers = [[int(number) for number in text.split(",")] for text in texts]
        return [Cursor.from_numbers(row + [0] * (len(row) == 3)) for row in numbers]
    except ValueError:
        raise UserError(
            f"--cursor {' '.join(texts)}: three or four numbers of at least 0 are needed, "
            "such as 0,12,40"
        ) from None


def _stream(
    reading: "Reading", lane: int, places: "Sequence[Cursor] | None", tokens: int
) -> "Iterator[np.ndarray]":
    import numpy as np

    from rlt_dist.data.stream.documents import plan_lanes
    from rlt_dist.data.stream.lane import LaneStream

    plans = [plan_lanes(share.split, reading.lanes, reading.seed) for share in reading.mixture]
    stream = LaneStream(
        reading.mixture, plans, lane, cursors=places, max_document=reading.max_document
    )
    for begin in range(0, tokens, _READ_AT_ONCE):
        length = min(_READ_AT_ONCE, tokens - begin)
        part = np.empty(length + 1, np.int64)
        stream.fill(part, np.zeros(length, bool), np.ones(length, bool))
        yield part[:-1]


def _write(parts: "Iterator[np.ndarray]", tokenizer: "Tokenizer", ids: bool) -> None:
    out = sys.stdout.buffer
    for tokens in parts:
        if ids:
            out.write((" ".join(map(str, tokens.tolist())) + "\n").encode())
            continue
        begin = 0
        for end in (tokens == tokenizer.end_of_text).nonzero()[0].tolist():
            out.write(tokenizer.decode(tokens[begin:end]) + b"<|endoftext|>\n")
            begin = end + 1
        out.write(tokenizer.decode(tokens[begin:]))
    out.flush()
