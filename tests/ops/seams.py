"""Processes that share weights, simulated by threads of one process.

`run(size, work)` calls `work(seam)` for each of them; a message is a meeting of all, and sums are
formed in the order of the processes, so that every one of them gets the same bits.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlt_dist.ops.seam import Seam

T = TypeVar("T")


class Meeting:
    """Where all processes exchange one tensor each; a thread that fails wakes the others."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=60)
        self._given: list[Tensor | None] = [None] * size

    def exchange(self, rank: int, x: Tensor) -> list[Tensor]:
        """What every process gave, in order; all must give the same shape and type."""
        self._given[rank] = x.detach().clone()
        self._barrier.wait()
        taken = [given for given in self._given if given is not None]
        assert {(given.shape, given.dtype) for given in taken} == {(x.shape, x.dtype)}
        self._barrier.wait()
        return taken

    def abort(self) -> None:
        self._barrier.abort()


class ThreadSeam(Seam):
    """The seam of one of the processes that meet; it counts its messages."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank, self.messages = meeting, rank, 0

    def own(self, size: int) -> range:
        each = -(-size // self.meeting.size)
        return range(size)[self.rank * each : (self.rank + 1) * each]

    def enter(self, x: Tensor) -> Tensor:
        return _Enter.apply(x, self)

    def leave(self, x: Tensor) -> Tensor:
        return _Leave.apply(x, self)

    def total(self, x: Tensor) -> Tensor:
        first, *others = self._exchange(x)
        return sum(others, start=first)

    def largest(self, x: Tensor) -> Tensor:
        return torch.stack(self._exchange(x)).amax(dim=0)

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self.messages += 1
        return self.meeting.exchange(self.rank, x)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seam: Seam) -> Tensor:
        ctx.seam = seam
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:
        return ctx.seam.total(dx), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, seam: Seam) -> Tensor:
        return seam.total(x)

    @staticmethod
    def backward(_: Any, dx: Tensor) -> tuple[Tensor, None]:
        return dx, None


def run(size: int, work: Callable[[ThreadSeam], T]) -> list[T]:
    """What `work` gives for each of `size` processes; the first error of its own is raised."""
    meeting = Meeting(size)

    def guarded(rank: int) -> T:
        try:
            return work(ThreadSeam(meeting, rank))
        except BaseException:
            meeting.abort()
            raise

    with ThreadPoolExecutor(size) as pool:
        done = [pool.submit(guarded, rank) for rank in range(size)]
    errors = [error for future in done if (error := future.exception())]
    if errors:
        raise min(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError))
    return [future.result() for future in done]


def cut(x: Tensor, dim: int, segments: Sequence[int], seam: Seam, unit: int = 1) -> Tensor:
    """One process's part of x, whose `dim` holds segments that are each cut by themselves.

    Args:
        segments: their sizes, counted in units of `unit` entries.
    """
    parts = []
    for segment in x.split([size * unit for size in segments], dim):
        own = seam.own(segment.shape[dim] // unit)
        parts.append(segment.narrow(dim, own.start * unit, len(own) * unit))
    return torch.cat(parts, dim)


def join(parts: Sequence[Tensor], dim: int, segments: Sequence[int], unit: int = 1) -> Tensor:
    """The whole of what `cut` gave the processes."""
    seams = [ThreadSeam(Meeting(len(parts)), rank) for rank in range(len(parts))]
    own = [[len(seam.own(size)) * unit for size in segments] for seam in seams]
    pieces = [part.split(sizes, dim) for part, sizes in zip(parts, own, strict=True)]
    return torch.cat([torch.cat(segment, dim) for segment in zip(*pieces, strict=True)], dim)
