"""Which documents each lane reads, and where it stands: pure arithmetic, no files.

For every epoch the shards are put into an order drawn from (seed, epoch); their documents, in
order, form one line. The line is cut at document borders into G runs of nearly equal tokens, one a
lane: run k ends at the border nearest to (k + 1) / G of all tokens. Each document is in exactly one
run of each epoch. Lanes count their own epochs: a lane that has read its run of epoch e goes on
with its run of epoch e + 1, wherever the others are.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np

from rlt_dist.util.errors import UserError

# Lanes drift apart by an epoch or two at most: their runs are nearly equal.
_EPOCHS_KEPT = 4


@dataclass(frozen=True)
class Cursor:
    """Where a lane stands: the position of its next input token.

    Attributes:
        epoch: the lane's own epoch.
        document: ordinal of the document in the lane's run of that epoch.
        offset: the token's place in the document.
        tokens: input tokens this lane has consumed since its start.
    """

    epoch: int = 0
    document: int = 0
    offset: int = 0
    tokens: int = 0

    FIELDS: ClassVar[tuple[str, ...]] = ("epoch", "document", "offset", "tokens")

    def to_tuple(self) -> tuple[int, ...]:
        """Its numbers, in the order of `FIELDS`."""
        return self.epoch, self.document, self.offset, self.tokens

    @classmethod
    def from_numbers(cls, values: Iterable[int]) -> "Cursor":
        """The cursor that `to_tuple` gave; ValueError if it is not four numbers of at least 0."""
        numbers = [int(value) for value in values]
        if len(numbers) != len(cls.FIELDS) or min(numbers) < 0:
            raise ValueError(f"{numbers} is no cursor: {', '.join(cls.FIELDS)} are needed")
        return cls(*numbers)


@dataclass(frozen=True)
class Span:
    """Documents `first` to `last` (exclusive) of one shard."""

    shard: int
    first: int
    last: int


@dataclass(frozen=True)
class Run:
    """What one lane reads in one epoch: spans of documents, in order."""

    spans: tuple[Span, ...]

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(span.last - span.first for span in self.spans)

    def after(self, document: int) -> tuple[Span, ...]:
        """What is left of the run from its document `document` on, that one included."""
        left: list[Span] = []
        for span in self.spans:
            size = span.last - span.first
            if document < size:
                left.append(Span(span.shard, span.first + document, span.last))
            document = max(0, document - size)
        return tuple(left)


class LanePlan:
    """The runs of all lanes in all epochs, from the documents' lengths, the lanes and the seed."""

    def __init__(
        self,
        documents: Sequence[int],
        tokens: Sequence[int],
        lengths: Callable[[int], np.ndarray],
        lanes: int,
        seed: int,
    ) -> None:
        """Plan `lanes` lanes.

        Args:
            documents: of each shard.
            tokens: of each shard.
            lengths: tokens of each document of a shard, int [documents]; asked only of shards in
                which a run ends.

        Raises:
            UserError: there are fewer documents than lanes.
        """
        self.lanes = lanes
        self._seed = seed
        self._documents = np.array(documents, np.int64)
        self._tokens = np.array(tokens, np.int64)
        self._lengths = lengths
        total = int(self._documents.sum())
        if not 1 <= lanes <= total:
            raise UserError(
                f"{lanes} lanes cannot share {total} documents: every lane needs at least one; "
                f"take fewer lanes or more documents"
            )
        self._line = lru_cache(_EPOCHS_KEPT)(self._cut_epoch)

    def run(self, epoch: int, lane: int) -> Run:
        """What `lane` reads in its epoch `epoch`."""
        order, ends, cuts = self._line(epoch)
        first, last = int(cuts[lane]), int(cuts[lane + 1])
        spans: list[Span] = []
        for place in range(int(np.searchsorted(ends, first, side="right")), len(order)):
            shard = int(order[place])
            end = int(ends[place])
            start = end - int(self._documents[shard])
            if start >= last:
                break
            spans.append(Span(shard, max(first, start) - start, min(last, end) - start))
        return Run(tuple(spans))

    def _cut_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The shards' order; the documents up to each one's end; the line's cuts.

        int64 [shards], [shards] and [lanes + 1], the latter counted in documents.
        """
        order = np.array(shard_order(len(self._documents), self._seed, epoch))
        documents = self._documents[order]
        lengths = lambda place: self._lengths(int(order[place]))  # noqa: E731
        cuts = cut_line(documents, self._tokens[order], lengths, self.lanes)
        return order, np.cumsum(documents), cuts


def shard_order(shards: int, seed: int, epoch: int) -> list[int]:
    """The order of `shards` shards in one epoch: sorted by the SHA-256 of "seed/epoch/shard".

    A hash, and no library's generator, because a resumed run must find the same order whatever
    versions are installed by then.
    """

    def rank(shard: int) -> bytes:
        return hashlib.sha256(f"{seed}/{epoch}/{shard}".encode()).digest()

    return sorted(range(shards), key=rank)


def cut_line(
    documents: np.ndarray, tokens: np.ndarray, lengths: Callable[[int], np.ndarray], lanes: int
) -> np.ndarray:
    """Cut a line of documents into `lanes` runs of nearly equal tokens, none of them empty.

    Args:
        documents: int64 [shards], of each shard in the line's order.
        tokens: int64 [shards], likewise.
        lengths: tokens per document of the shard at a place; asked of shards that hold a cut.

    Returns:
        int64 [lanes + 1]: the ordinals of the documents at which the runs begin, and the end.
    """
    token_ends, document_ends = np.cumsum(tokens), np.cumsum(documents)
    # Everything is counted in 1/lanes of a token: the targets are then whole numbers.
    targets = np.arange(1, lanes, dtype=np.int64) * token_ends[-1]
    owners = np.searchsorted(token_ends * lanes, targets)
    cuts = np.zeros(lanes + 1, np.int64)
    cuts[-1] = document_ends[-1]
    for place in np.unique(owners):
        inside = np.cumsum(lengths(int(place)), dtype=np.int64)
        borders = (token_ends[place] - tokens[place] + np.append(0, inside)) * lanes
        mine = np.flatnonzero(owners == place)
        begin = document_ends[place] - documents[place]
        cuts[1 + mine] = begin + _nearest(borders, targets[mine])
    return _at_least_one(cuts)


def _nearest(borders: np.ndarray, targets: np.ndarray) -> np.ndarray:
    """Index of the border nearest to each target, the lower one on a tie.

    The first border lies below every target, the last one does not.
    """
    above = np.searchsorted(borders, targets)
    below = above - 1
    return np.where(targets - borders[below] <= borders[above] - targets, below, above)


def _at_least_one(cuts: np.ndarray) -> np.ndarray:
    """Move cuts as little as needed for each run to hold a document."""
    ramp = np.arange(len(cuts))
    spread = np.maximum.accumulate(cuts - ramp) + ramp
    return np.minimum(spread, cuts[-1] - ramp[::-1])
