"""Segments of some lanes at once: what one process reads, be it the trainer or a worker of its."""

import resource
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from rlt_dist.data.stream.damage import Damage
from rlt_dist.data.stream.documents import plan_lanes
from rlt_dist.data.stream.lane import LaneStream
from rlt_dist.data.stream.lanes import Cursor
from rlt_dist.data.stream.mixture import Mixture


@dataclass(frozen=True, eq=False)
class Reading:
    """How a mixture is read; the same for all lanes. It can be sent to another process.

    Attributes:
        lanes: G, how many share the corpora.
        segment: T, input tokens of each lane in a batch.
        max_document: a longer document is read as several of this many tokens.
        skip_bad_shards: go on where a shard cannot be read, and count what is skipped.
    """

    mixture: Mixture
    lanes: int
    segment: int
    seed: int
    max_document: int | None = None
    skip_bad_shards: bool = False


@dataclass(frozen=True, eq=False)
class Segments:
    """The next segment of b lanes.

    Attributes:
        tokens: int64 [b, T + 1]; the last is the next segment's first input.
        document_start: bool [b, T]: input i begins a document (or a piece of a long one).
        loss_mask: bool [b, T]: False where the target is the next document's first token, or a
            label says that there is none.
        labels: int64 [b, T]: the target, where a label says it; else -1: the target is the next
            token. None: no corpus is labelled.
        cursors: int64 [b, corpora, 4]: where the lanes stand after it (see `Cursor.FIELDS`).
        skipped: documents that could not be read and were left out.
        notices: what a person should know of that.
    """

    tokens: np.ndarray
    document_start: np.ndarray
    loss_mask: np.ndarray
    labels: np.ndarray | None
    cursors: np.ndarray
    skipped: int
    notices: tuple[str, ...]

    def noting(self, notices: Sequence[str]) -> "Segments":
        """The same, with notices before its own."""
        return replace(self, notices=(*notices, *self.notices)) if notices else self


class LaneGroup:
    """Some lanes, read in step."""

    def __init__(self, reading: Reading, lanes: Sequence[int], cursors: np.ndarray) -> None:
        """Open lanes where `cursors`, int64 [b, corpora, 4], say.

        Raises:
            UserError: a corpus has fewer documents than there are lanes, a cursor does not exist
                in it, or a shard is damaged.
        """
        _allow_open_files()
        self._length = reading.segment
        self._labelled = any(share.split.labelled for share in reading.mixture)
        self._damage = Damage(reading.skip_bad_shards)
        plans = [plan_lanes(share.split, reading.lanes, reading.seed) for share in reading.mixture]
        self._streams = [
            LaneStream(
                reading.mixture,
                plans,
                lane,
                cursors=[Cursor.from_numbers(row) for row in rows],
                max_document=reading.max_document,
                damage=self._damage,
            )
            for lane, rows in zip(lanes, cursors.tolist(), strict=True)
        ]

    def next(self) -> Segments:
        """The next segment of every lane.

        Raises:
            UserError: a shard is damaged, and damage is not to be skipped.
        """
        lanes, length = len(self._streams), self._length
        tokens = np.empty((lanes, length + 1), np.int64)
        document_start, loss_mask = np.zeros((lanes, length), bool), np.ones((lanes, length), bool)
        labels = np.full((lanes, length), -1) if self._labelled else None
        for row, stream in enumerate(self._streams):
            own = None if labels is None else labels[row]
            stream.fill(tokens[row], document_start[row], loss_mask[row], own)
        cursors = np.array([stream.places for stream in self._streams], np.int64)
        skipped, notices = self._damage.take()
        return Segments(tokens, document_start, loss_mask, labels, cursors, skipped, notices)


def _allow_open_files() -> None:
    """Let this process open as many files as it may: each lane keeps one of every corpus open."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
