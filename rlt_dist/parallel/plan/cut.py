"""How a tensor is cut over the processes of the tensor axis: pure index arithmetic."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


def own(size: int, rank: int, ranks: int) -> range:
    """Which of `size` things process `rank` of `ranks` has: torch.chunk's rule, the rest last."""
    each = -(-size // ranks)
    return range(min(rank * each, size), min((rank + 1) * each, size))


@dataclass(frozen=True)
class Cut:
    """A dimension that is cut over processes.

    Attributes:
        dim: which dimension.
        segments: the lengths that the dimension is made of, each cut by itself: the q, k and v of
            a fused weight, the clusters of a vocabulary.
        block: what is never cut, such as the rows of a head.
        copied: where a segment has fewer blocks than there are processes, each block is held by
            several of them (a key/value head whose query heads are cut).
    """

    dim: int
    segments: tuple[int, ...]
    block: int = 1
    copied: bool = False

    def ranges(self, rank: int, ranks: int) -> Iterator[range]:
        """What process `rank` has along the dimension, a range for each segment."""
        first = 0
        for length in self.segments:
            blocks = length // self.block
            if self.copied and blocks < ranks:
                here = range(rank * blocks // ranks, rank * blocks // ranks + 1)
            else:
                here = own(blocks, rank, ranks)
            yield range(first + here.start * self.block, first + here.stop * self.block)
            first += length

    def index(self, rank: int, ranks: int) -> Tensor:
        """The same as indices, int64."""
        return torch.cat([torch.arange(r.start, r.stop) for r in self.ranges(rank, ranks)])

    def part(self, whole: Tensor, rank: int, ranks: int) -> Tensor:
        """What process `rank` has of a whole tensor; a view where it lies in one piece."""
        if ranks == 1:
            return whole
        pieces = [
            whole.narrow(self.dim, r.start, len(r)) for r in self.ranges(rank, ranks) if len(r)
        ]
        if not pieces:
            return whole.narrow(self.dim, 0, 0)
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)

    def spread(self, part: Tensor, rank: int, ranks: int) -> Tensor:
        """Zeros of the whole's size with a process's part in its place."""
        if ranks == 1:
            return part
        shape = list(part.shape)
        shape[self.dim] = sum(self.segments)
        index = self.index(rank, ranks).to(part.device)
        return part.new_zeros(shape).index_copy_(self.dim, index, part)

    def copies(self, ranks: int) -> int:
        """How many processes hold the same."""
        blocks = min(self.segments) // self.block
        return ranks // blocks if self.copied and blocks < ranks else 1
