"""One lane's endless stream of tokens, read from webdataset shards from any cursor on.

A lane reads only its own documents. Each span of them is one webdataset pipeline over a window of
the shard's file: the index says at which byte the span begins and ends, so nothing before it is
read, and each shard is opened once while the lane reads forward.
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, BinaryIO

import numpy as np
import webdataset as wds
from webdataset.autodecode import DecodingError
from webdataset.tariterators import group_by_keys, tar_file_expander

from rlt_dist.data.corpus.index import REPAIR, ShardIndex, SplitIndex
from rlt_dist.data.stream.lanes import Cursor, LanePlan, Span
from rlt_dist.util.errors import UserError

_DAMAGE = (tarfile.TarError, DecodingError, OSError, ValueError, EOFError)


@dataclass(frozen=True)
class Segment:
    """T input tokens of one lane, and the token after them.

    Attributes:
        tokens: int64 [T + 1]; the last is the next segment's first input.
        document_start: bool [T]: input i begins a document (or a piece of a long one).
        loss_mask: bool [T]: False where input i ends a document, for its target is then the next
            document's first token.
    """

    tokens: np.ndarray
    document_start: np.ndarray
    loss_mask: np.ndarray


class LaneStream:
    """The tokens of one lane, segment by segment."""

    def __init__(
        self,
        split: SplitIndex,
        end_of_text: int,
        plan: LanePlan,
        lane: int,
        cursor: Cursor | None = None,
        max_document: int | None = None,
    ) -> None:
        """Open the stream at `cursor` (default: the lane's very start).

        Args:
            plan: the plan of all lanes over this split (see `plan_lanes`).
            max_document: a longer document is read as several of this many tokens.

        Raises:
            UserError: the cursor does not exist in this split, or a shard is damaged.
        """
        self._split = split
        self._end_of_text = end_of_text
        self._plan = plan
        self._lane = lane
        self._max_document = max_document
        self._cursor = cursor or Cursor()
        self._check_cursor()
        self._reader = self._read_run()
        self._document = next(self._reader)
        if self._cursor.offset >= len(self._document):
            raise self._stray_cursor()

    @property
    def cursor(self) -> Cursor:
        """The position of the next input token."""
        return self._cursor

    def next_segment(self, length: int) -> Segment:
        """The next `length` input tokens; moves the cursor behind them.

        Raises:
            UserError: a shard is damaged, or does not hold what its index says.
        """
        tokens = np.empty(length + 1, np.int64)
        document_start = np.zeros(length, bool)
        loss_mask = np.ones(length, bool)
        filled = 0
        while filled < length:
            offset = self._cursor.offset
            end = min(offset + length - filled, len(self._document))
            here = slice(filled, filled + end - offset)
            tokens[here] = self._document[offset:end]
            document_start[here] = self._starts(offset, end)
            filled = here.stop
            if end == len(self._document):
                loss_mask[filled - 1] = False
            self._advance(end - offset)
        tokens[length] = self._document[self._cursor.offset]
        return Segment(tokens, document_start, loss_mask)

    def _starts(self, offset: int, end: int) -> np.ndarray:
        places = np.arange(offset, end)
        return places == 0 if self._max_document is None else places % self._max_document == 0

    def _advance(self, count: int) -> None:
        """Move by `count` tokens, to the end of the current document at most."""
        here = self._cursor
        here = replace(here, offset=here.offset + count, tokens=here.tokens + count)
        if here.offset < len(self._document):
            self._cursor = here
            return
        self._cursor = replace(here, document=here.document + 1, offset=0)
        document = next(self._reader, None)
        if document is None:
            self._cursor = replace(here, epoch=here.epoch + 1, document=0, offset=0)
            self._reader = self._read_run()
            document = next(self._reader)
        self._document = document

    def _read_run(self) -> Iterator[np.ndarray]:
        """The documents from the cursor's to the end of the cursor's epoch."""
        run = self._plan.run(self._cursor.epoch, self._lane)
        for span in run.after(self._cursor.document):
            yield from read_span(self._split.shards[span.shard], span, self._end_of_text)

    def _check_cursor(self) -> None:
        run = self._plan.run(self._cursor.epoch, self._lane)
        if self._cursor.document >= run.documents:
            raise self._stray_cursor()

    def _stray_cursor(self) -> UserError:
        return UserError(
            f"split {self._split.name!r}: lane {self._lane} has no place {self._cursor}; "
            f"resume with the corpus, seed and number of lanes the run was started with"
        )


def plan_lanes(split: SplitIndex, lanes: int, seed: int) -> LanePlan:
    """The plan of `lanes` lanes over a split.

    Raises:
        UserError: the split has fewer documents than lanes.
    """
    lengths = [np.asarray(shard.documents["tokens"]) for shard in split.shards]
    return LanePlan(lengths, lanes, seed)


def read_span(shard: ShardIndex, span: Span, end_of_text: int) -> Iterator[np.ndarray]:
    """The tokens of a span's documents, end-of-text included: unsigned [n] each.

    Raises:
        UserError: the shard is damaged, or does not hold what its index says.
    """
    try:
        with shard.tar.open("rb") as handle:
            samples = _samples(shard, span, handle)
            for document in range(span.first, span.last):
                sample = next(samples, {})
                yield _checked(shard, document, sample.get("npy"), end_of_text)
    except _DAMAGE as error:
        raise UserError(f"{shard.tar}: cannot be read ({_first_line(error)}); {REPAIR}") from error


class _Window:
    """The next `size` bytes of an open file, as all that tarfile sees of it."""

    def __init__(self, handle: BinaryIO, size: int) -> None:
        self._handle = handle
        self._left = size

    def read(self, count: int) -> bytes:
        data = self._handle.read(min(count, self._left))
        self._left -= len(data)
        return data


def _samples(shard: ShardIndex, span: Span, handle: BinaryIO) -> Iterator[dict[str, Any]]:
    """webdataset's samples of a span; only the tokens are read and decoded."""
    offsets = shard.documents["offset"]
    begin = int(offsets[span.first])
    end = int(offsets[span.last]) if span.last < len(offsets) else shard.entry.tar_size
    handle.seek(begin)
    window = _Window(handle, end - begin)

    def source() -> Iterator[dict[str, Any]]:
        yield {"url": str(shard.tar), "stream": window}

    def expand(sources: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        return tar_file_expander(sources, select_files=lambda name: name.endswith(".npy"))

    return iter(wds.DataPipeline(source, expand, group_by_keys, wds.decode()))


def _checked(
    shard: ShardIndex, document: int, tokens: np.ndarray | None, end_of_text: int
) -> np.ndarray:
    expected = int(shard.documents["tokens"][document])
    if tokens is None or tokens.dtype.kind != "u" or tokens.shape != (expected,):
        found = "nothing readable" if tokens is None else f"{tokens.dtype} {tokens.shape}"
        raise UserError(
            f"{shard.tar}: document {document} should hold {expected} tokens, there is "
            f"{found}; {REPAIR}"
        )
    if tokens[-1] != end_of_text:
        raise UserError(
            f"{shard.tar}: document {document} does not end with the end-of-text token "
            f"{end_of_text}; the corpus was made with another tokenizer, or the shard is damaged"
        )
    if (largest := int(tokens.max())) >= shard.vocabulary:
        raise UserError(
            f"{shard.tar}: document {document} holds token {largest}, the vocabulary ends at "
            f"{shard.vocabulary - 1}; {REPAIR}"
        )
    return tokens


def _first_line(error: BaseException) -> str:
    """An error's own words; webdataset's wrapper has none, its cause does."""
    cause = error.__cause__ or error
    words = str(cause)
    if " object at 0x" in words:  # webdataset adds the stream it was reading
        words = str(next(iter(cause.args), "")).partition(" @ <")[0]
    return (words or type(cause).__name__).splitlines()[0]
