"""Batches of lanes: the next segment of each of a rank's lanes, and where they then stand.

Ranks come in as plain numbers. A lane's tokens do not depend on who reads it, so a change of the
data-parallel size only changes which slice of the lanes a rank is given.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

from rlt_dist.data.stream.lanes import Cursor
from rlt_dist.data.stream.reading import LaneGroup, Reading
from rlt_dist.data.stream.workers import Worker
from rlt_dist.util.errors import UserError


@dataclass(frozen=True, eq=False)
class Batch:
    """One segment of b lanes.

    Attributes:
        tokens: int64 [b, T + 1]; inputs are `[:, :-1]`.
        targets: int64 [b, T]: what is to be predicted after each input. It is the next token,
            unless a label of a labelled corpus says otherwise.
        document_start: bool [b, T]: input i begins a document.
        loss_mask: bool [b, T]: False where nothing is to be predicted: the next token is the next
            document's first, or a label says so. Targets there are ids like others.
        lanes: int64 [b], the lanes' global numbers.
        cursors: int64 [b, corpora, 4], where the lanes then stand (see `Cursor.FIELDS`).
    """

    tokens: Tensor
    targets: Tensor
    document_start: Tensor
    loss_mask: Tensor
    lanes: Tensor
    cursors: Tensor

    def rows(self, rows: slice) -> "Batch":
        """The batch of some of its lanes: a micro-batch."""
        return self._map(lambda tensor: tensor[rows])

    def to(self, device: torch.device) -> "Batch":
        """The batch on a device; the cursors, which no model reads, stay where they are."""
        return replace(self._map(lambda tensor: tensor.to(device)), cursors=self.cursors)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        return Batch(**{field.name: function(getattr(self, field.name)) for field in fields(self)})


class LaneLoader:
    """Reads the lanes of one rank, all in step, here or in worker processes. Lanes never end."""

    def __init__(
        self,
        reading: Reading,
        local: range,
        *,
        cursors: Tensor | None = None,
        workers: int = 0,
        ahead: int = 1,
    ) -> None:
        """Open the lanes `local` of `reading.lanes`.

        Args:
            cursors: int64 [len(local), corpora, 4], where each lane goes on; None: at its start.
            workers: processes that share the lanes and read ahead; 0: they are read when asked for.
            ahead: segments that a worker may hold ready.

        Raises:
            UserError: a corpus has fewer documents than there are lanes, a cursor does not exist
                in it, or a shard is damaged. Where there are workers, `next` raises it.
            ValueError: `local` or `cursors` do not fit the lanes.
        """
        if not set(local) <= set(range(reading.lanes)):
            raise ValueError(f"lanes {local} are not among the {reading.lanes} there are")
        start = cursors_at_start(len(local), len(reading.mixture)) if cursors is None else cursors
        if start.shape != cursors_at_start(len(local), len(reading.mixture)).shape:
            raise ValueError(f"cursors {tuple(start.shape)} do not fit {len(local)} lanes")
        self._lanes = torch.tensor(local, dtype=torch.int64)
        self._sources: list[LaneGroup | Worker] = [
            Worker(reading, lanes, rows, ahead) if workers else LaneGroup(reading, lanes, rows)
            for lanes, rows in _shares(local, start.numpy(), max(1, workers))
        ]
        self._skipped = 0
        self._notices: list[str] = []

    def next(self) -> Batch:
        """The next segment of every lane.

        Raises:
            UserError: a shard is damaged, and damage is not to be skipped; or workers die one
                after the other.
        """
        parts = [source.next() for source in self._sources]
        self._skipped += sum(part.skipped for part in parts)
        self._notices += [notice for part in parts for notice in part.notices]
        tokens = _join([part.tokens for part in parts])
        return Batch(
            tokens=tokens,
            targets=_targets(tokens, [part.labels for part in parts if part.labels is not None]),
            document_start=_join([part.document_start for part in parts]),
            loss_mask=_join([part.loss_mask for part in parts]),
            lanes=self._lanes,
            cursors=_join([part.cursors for part in parts]),
        )

    def take_notices(self) -> tuple[int, list[str]]:
        """Documents skipped since the last call; lines that a person should read."""
        found = self._skipped, self._notices
        self._skipped, self._notices = 0, []
        return found

    def close(self) -> None:
        """End the worker processes."""
        for source in self._sources:
            if isinstance(source, Worker):
                source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def cursors_at_start(lanes: int, corpora: int) -> Tensor:
    """int64 [lanes, corpora, 4]: the cursors of lanes that have read nothing."""
    return torch.zeros(lanes, corpora, len(Cursor.FIELDS), dtype=torch.int64)


def lanes_of_rank(lanes: int, rank: int, world: int) -> range:
    """The contiguous slice of the lanes that data-parallel rank `rank` of `world` reads.

    Raises:
        UserError: the lanes cannot be shared out equally.
    """
    if lanes % world:
        raise UserError(
            f"{lanes} lanes cannot be shared equally by {world} data-parallel ranks; "
            f"take a number of lanes that {world} divides"
        )
    each = lanes // world
    return range(rank * each, (rank + 1) * each)


def _shares(local: range, cursors: np.ndarray, sources: int) -> Iterator[tuple[range, np.ndarray]]:
    """Contiguous and nearly equal shares of the lanes, and their cursors; none is empty."""
    borders = np.linspace(0, len(local), min(sources, len(local)) + 1).astype(int).tolist()
    for begin, end in pairwise(borders):
        yield local[begin:end], cursors[begin:end]


def _targets(tokens: Tensor, labels: list[np.ndarray]) -> Tensor:
    """What the labels say, if there are any; else each input's next token."""
    following = tokens[:, 1:]
    if not labels:
        return following
    found = _join(labels)
    return torch.where(found < 0, following, found)


def _join(rows: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(rows[0] if len(rows) == 1 else np.concatenate(rows))
