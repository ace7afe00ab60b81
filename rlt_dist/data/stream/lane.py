"""One lane's endless stream of tokens, read from webdataset shards from any cursor on.

A lane reads only its own documents. Each span of them is one webdataset pipeline over a window of
the shard's file: the index says at which byte the span begins and ends, so nothing before it is
read, and each shard is opened once while the lane reads forward.
"""

import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from webdataset.autodecode import DecodingError

from rlt_dist.data.corpus.index import SplitIndex
from rlt_dist.data.stream.lanes import Cursor, LanePlan
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
            yield from self._split.shards[span.shard].read(span.first, span.last)

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
