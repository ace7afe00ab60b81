"""Which documents each lane reads, and where it stands: pure arithmetic, no files.

For every epoch the shards are put into an order drawn from (seed, epoch); their documents, in
order, form one line. The line is cut at document borders into G runs of nearly equal tokens, one a
lane: run k ends at the border nearest to (k + 1) / G of all tokens. Each document is in exactly one
run of each epoch. Lanes count their own epochs: a lane that has read its run of epoch e goes on
with its run of epoch e + 1, wherever the others are.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
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

    def to_array(self) -> np.ndarray:
        """int64 [4], in the order of `FIELDS`."""
        return np.array(astuple(self), np.int64)

    @classmethod
    def from_array(cls, values: Iterable[int]) -> "Cursor":
        """The cursor that `to_array` gave; ValueError if it is not four numbers of at least 0."""
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

    def __init__(self, lengths: Sequence[np.ndarray], lanes: int, seed: int) -> None:
        """Plan `lanes` lanes.

        Args:
            lengths: tokens of each document of each shard: int [documents] per shard.

        Raises:
            UserError: there are fewer documents than lanes.
        """
        self.lanes = lanes
        self._seed = seed
        self._lengths = lengths
        self._totals = np.array([shard.sum(dtype=np.int64) for shard in lengths], np.int64)
        documents = sum(len(shard) for shard in lengths)
        if not 1 <= lanes <= documents:
            raise UserError(
                f"{lanes} lanes cannot share {documents} documents: every lane needs at least one; "
                f"take fewer lanes or more documents"
            )
        self._line = lru_cache(_EPOCHS_KEPT)(self._cut_epoch)

    def run(self, epoch: int, lane: int) -> Run:
        """What `lane` reads in its epoch `epoch`."""
        order, cuts = self._line(epoch)
        first, last = int(cuts[lane]), int(cuts[lane + 1])
        spans: list[Span] = []
        start = 0
        for shard in order:
            end = start + len(self._lengths[shard])
            if start < last and first < end:
                spans.append(Span(shard, max(first, start) - start, min(last, end) - start))
            start = end
        return Run(tuple(spans))

    def _cut_epoch(self, epoch: int) -> tuple[list[int], np.ndarray]:
        """The shards' order, and the line's cuts: int64 [lanes + 1], counted in documents."""
        order = shard_order(len(self._lengths), self._seed, epoch)
        lengths = [self._lengths[shard] for shard in order]
        return order, cut_line(lengths, self._totals[order], self.lanes)


def shard_order(shards: int, seed: int, epoch: int) -> list[int]:
    """The order of `shards` shards in one epoch: sorted by the SHA-256 of "seed/epoch/shard".

    A hash, and no library's generator, because a resumed run must find the same order whatever
    versions are installed by then.
    """

    def rank(shard: int) -> bytes:
        return hashlib.sha256(f"{seed}/{epoch}/{shard}".encode()).digest()

    return sorted(range(shards), key=rank)


def cut_line(lengths: Sequence[np.ndarray], totals: np.ndarray, lanes: int) -> np.ndarray:
    """Cut a line of documents into `lanes` runs of nearly equal tokens, none of them empty.

    Only the lengths of shards that hold a cut are looked at.

    Args:
        lengths: tokens per document of each shard, in the line's order.
        totals: int64 [shards], their sums.

    Returns:
        int64 [lanes + 1]: the ordinals of the documents at which the runs begin, and the end.
    """
    token_ends = np.cumsum(totals)
    document_ends = np.cumsum([len(shard) for shard in lengths])
    # Everything is counted in 1/lanes of a token: the targets are then whole numbers.
    targets = np.arange(1, lanes, dtype=np.int64) * token_ends[-1]
    owners = np.searchsorted(token_ends * lanes, targets)
    cuts = np.zeros(lanes + 1, np.int64)
    cuts[-1] = document_ends[-1]
    for shard in np.unique(owners):
        inside = np.cumsum(lengths[shard], dtype=np.int64)
        borders = (token_ends[shard] - totals[shard] + np.append(0, inside)) * lanes
        mine = np.flatnonzero(owners == shard)
        begin = document_ends[shard] - len(lengths[shard])
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
