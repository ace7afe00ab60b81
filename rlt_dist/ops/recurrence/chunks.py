"""Which tokens the decoder runs together: the feedback interval as data.

RLT-1's chunk is one token, RLT-2's is B tokens counted from the document's start, RLT-0's is the
whole segment. Lanes whose documents start at different places run their k-th chunks together.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


class Slots:
    """Where the C tokens of a chunk stand in time-major buffers of T + 1 slots.

    Where lanes' chunks differ in place or length, the shorter ones are padded, and padding stands
    in the last slot, which belongs to no token.
    """

    def __init__(self, first: int, count: int, index: Tensor | None) -> None:
        """All lanes stand at `first` .. `first + count - 1`, or at int64 [C, B] `index`."""
        self.first, self.count = first, count
        self.index = index
        if index is not None:
            self._lanes = torch.arange(index.shape[1], device=index.device)

    def get(self, buffer: Tensor) -> Tensor:
        """[C, B, ...] of a buffer [T + 1, B, ...]."""
        if self.index is None:
            return buffer[self.first : self.first + self.count]
        return buffer[self.index, self._lanes]

    def put(self, buffer: Tensor, value: Tensor) -> None:
        """Write [C, B, ...] into a buffer."""
        if self.index is None:
            buffer[self.first : self.first + self.count] = value
        else:
            buffer[self.index, self._lanes] = value.to(buffer.dtype)


@dataclass(frozen=True)
class Chunks:
    """The chunks of a segment.

    Attributes:
        tokens: T.
        first: int64 [K, B], the first token of each lane's k-th chunk.
        length: int64 [K, B], its tokens; 0 where the lane has fewer chunks than others.
        fresh: bool [K, B], it starts at a chunk border (else the one carried in runs on).
        start: bool [K, B], it starts a document.
        number: int64 [T, B], the chunk that each token is in.
    """

    tokens: int
    first: Tensor
    length: Tensor
    fresh: Tensor
    start: Tensor
    number: Tensor

    def __len__(self) -> int:
        return len(self.first)

    def last(self) -> tuple[Tensor, Tensor, Tensor]:
        """`first`, `fresh` and `start`, [B], of each lane's last chunk."""
        at = (self.number[-1], torch.arange(self.number.shape[1], device=self.number.device))
        return self.first[at], self.fresh[at], self.start[at]

    @cached_property
    def slots(self) -> list[Slots]:
        """Where each chunk's tokens stand."""
        alike = (self.first == self.first[:, :1]) & (self.length == self.length[:, :1])
        facts = zip(
            alike.all(dim=1).tolist(),
            self.first[:, 0].tolist(),
            self.length.amax(dim=1).tolist(),
            strict=True,
        )
        return [
            Slots(first, count, None if same else self.index[k, :count])
            for k, (same, first, count) in enumerate(facts)
        ]

    @cached_property
    def index(self) -> Tensor:
        """int64 [K, C, B], where the tokens stand of chunks padded to C, the longest one's."""
        offset = torch.arange(int(self.length.max()), device=self.first.device)[:, None]
        is_token = offset < self.length[:, None]
        return torch.where(is_token, self.first[:, None] + offset, self.tokens)


def plan_chunks(position: Tensor, feedback: int) -> Chunks:
    """Cut a segment into chunks.

    Args:
        position: int64 [T, B], index of each token within its document.
        feedback: tokens of a chunk; 0 makes one chunk of the whole segment.
    """
    tokens, lanes = position.shape
    time = torch.arange(tokens, device=position.device)[:, None].expand(tokens, lanes)
    border = position % feedback == 0 if feedback else torch.zeros_like(position, dtype=torch.bool)
    number = (border | (time == 0)).cumsum(dim=0) - 1
    count = int(number.max()) + 1
    first = position.new_full((count, lanes), tokens - 1)
    first.scatter_reduce_(0, number, time, reduce="amin")
    length = torch.zeros_like(first).scatter_add_(0, number, torch.ones_like(number))
    start = position.gather(0, first) == 0
    return Chunks(tokens, first, length, border.gather(0, first), start, number)
