"""Batches of lanes: the next segment of each of a rank's lanes, and where they then stand.

Ranks come in as plain numbers. A lane's tokens do not depend on who reads it, so a change of the
data-parallel size only changes which slice of the lanes a rank is given.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import numpy as np
import torch
from torch import Tensor

from rlt_dist.data.corpus.index import SplitIndex
from rlt_dist.data.stream.lane import LaneStream, plan_lanes
from rlt_dist.data.stream.lanes import Cursor
from rlt_dist.util.errors import UserError


@dataclass(frozen=True, eq=False)
class Batch:
    """One segment of b lanes.

    Attributes:
        tokens: int64 [b, T + 1]; inputs are `[:, :-1]`, targets `[:, 1:]`.
        document_start: bool [b, T]: input i begins a document.
        loss_mask: bool [b, T]: False where the target is the next document's first token.
        lanes: int64 [b], the lanes' global numbers.
        cursors: int64 [b, 4], where the lanes stand after this batch (see `Cursor.FIELDS`).
    """

    tokens: Tensor
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
    """Reads the lanes of one rank, all in step. Lanes never end."""

    def __init__(
        self,
        split: SplitIndex,
        *,
        lanes: int,
        local: range,
        segment: int,
        seed: int,
        max_document: int | None = None,
        cursors: Tensor | None = None,
    ) -> None:
        """Open the lanes `local` of `lanes`.

        Args:
            segment: T, input tokens of each lane in a batch.
            max_document: a longer document is read as several of this many tokens.
            cursors: int64 [len(local), 4], where each lane goes on; None: at its very start.

        Raises:
            UserError: the split has fewer documents than lanes, a cursor does not exist in it, or
                a shard is damaged.
            ValueError: `local` or `cursors` do not fit the lanes.
        """
        if not set(local) <= set(range(lanes)):
            raise ValueError(f"lanes {local} are not among the {lanes} there are")
        if cursors is not None and cursors.shape != (len(local), len(Cursor.FIELDS)):
            raise ValueError(f"cursors {tuple(cursors.shape)} do not fit {len(local)} lanes")
        plan = plan_lanes(split, lanes, seed)
        begin = [Cursor()] * len(local) if cursors is None else _to_cursors(cursors)
        self._segment = segment
        self._lanes = torch.tensor(local, dtype=torch.int64)
        self._streams = [
            LaneStream(split, plan, lane, cursor, max_document)
            for lane, cursor in zip(local, begin, strict=True)
        ]

    @property
    def cursors(self) -> Tensor:
        """int64 [b, 4]: where the lanes stand now."""
        return _stack([stream.cursor.to_array() for stream in self._streams])

    def next(self) -> Batch:
        """The next segment of every lane.

        Raises:
            UserError: a shard is damaged, or does not hold what its index says.
        """
        segments = [stream.next_segment(self._segment) for stream in self._streams]
        return Batch(
            tokens=_stack([segment.tokens for segment in segments]),
            document_start=_stack([segment.document_start for segment in segments]),
            loss_mask=_stack([segment.loss_mask for segment in segments]),
            lanes=self._lanes,
            cursors=self.cursors,
        )


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


def _to_cursors(cursors: Tensor) -> list[Cursor]:
    return [Cursor.from_array(row) for row in cursors.tolist()]


def _stack(rows: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.stack(rows))
