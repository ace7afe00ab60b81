"""Steps of a pass, recorded as CUDA graphs: one for all steps of as many tokens.

A step of one token is hundreds of launches, each shorter than it takes to ask for it. What differs
between steps of as many tokens is where their tokens stand; so that stands in memory that the
recorded launches read, and is written anew before each replay. Where nothing is recorded the same
steps run as they are asked for.

A known cost: graphs belong to one pass over one tape, whose addresses they hold, and are recorded
anew for every part of a segment, in each direction. A part of few chunks gains little by them.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from rlt_dist.ops.recurrence.chunks import Chunks


class At(NamedTuple):
    """Where a step stands, in memory that all steps of as many tokens share.

    Attributes:
        slots: int64 [C, B], of the chunk's tokens; padding stands in the last slot. It begins at a
            multiple of 16 bytes, as triton compiles the fastest reads for.
        chunk: int64 [1], the number of the chunk.
    """

    slots: Tensor
    chunk: Tensor


Step = Callable[[At], None]
"""One chunk's share of a pass. It makes room in its first call with as many tokens only, and
nothing in it waits for the device."""


class Steps:
    """A pass over chunks, on the device where they are planned."""

    def __init__(self, chunks: Chunks, step: Step, *, record: bool) -> None:
        """What `step` reads and writes must stay where it is until this is gone.

        Args:
            record: whether graphs are recorded, where that can be done.
        """
        self._step, self._counts = step, [at.count for at in chunks.slots]
        self._table = _table(chunks)
        self._lanes, self._record = chunks.first.shape[1], record and chunks.first.is_cuda
        self._places: dict[int, Tensor] = {}
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def __call__(self, chunks: Iterable[int]) -> None:
        """Go through the chunks in this order."""
        for k in chunks:
            self._run(k, self._counts[k])

    def _run(self, k: int, count: int) -> None:
        row, is_first = self._table[k, : 2 + count * self._lanes], count not in self._places
        if is_first:
            self._places[count] = torch.empty_like(row)
        place = self._places[count].copy_(row)
        at = At(place[2:].view(count, -1), place[:1])
        if not self._record:
            self._step(at)
        elif is_first:  # Kernels are compiled, and room is made, before anything is recorded.
            with _aside(place.device):
                self._step(at)
        else:
            if count not in self._graphs:
                self._graphs[count] = self._recorded(at)
            self._graphs[count].replay()

    def _recorded(self, at: At) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with _aside(at.slots.device):
            # Other threads, which read batches or save, may go on with theirs.
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self._step(at)
            finally:  # A capture that never ends fails whatever this process asks for next.
                graph.capture_end()
        return graph


@contextmanager
def _aside(device: torch.device) -> Iterator[None]:
    """On the stream where graphs are recorded: cuBLAS has a workspace of its own for each stream,
    which must not be made while a graph is recorded, or it would go with the graph."""
    here, aside = torch.cuda.current_stream(device), _stream(device)
    aside.wait_stream(here)
    try:
        with torch.cuda.stream(aside):
            yield
    finally:
        here.wait_stream(aside)


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _table(chunks: Chunks) -> Tensor:
    """int64 [K, 2 + C B]: a chunk's number twice, which are 16 bytes, and its slots."""
    number = torch.arange(len(chunks), device=chunks.first.device)[:, None]
    return torch.cat((number, number, chunks.index.flatten(1)), dim=1)
