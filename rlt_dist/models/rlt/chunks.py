"""Which tokens the decoder runs together: the feedback interval as data.

RLT-1's chunk is one token, RLT-2's is B tokens counted from the document's start, RLT-0's is the
whole segment. Rows whose documents start at different places run their k-th chunks together,
padded on the right.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """The k-th chunk of every row.

    Attributes:
        index: int64 [b, C], segment indices of the chunk's tokens; padding repeats a token.
        length: int64 [b], real tokens of each row, 0 .. C.
        full: every row has C tokens, so nothing is padding.
        fresh: bool [b], the row's chunk starts at a chunk border (else the carried one runs on).
        start: bool [b], the row's chunk starts a document.
    """

    index: Tensor
    length: Tensor
    full: bool
    fresh: Tensor
    start: Tensor


@dataclass(frozen=True)
class ChunkPlan:
    """All chunks of a segment, and where each token's output stands in their concatenation."""

    chunks: list[Chunk]
    slot: Tensor
    """int64 [b, T]"""

    @property
    def full(self) -> bool:
        return all(chunk.full for chunk in self.chunks)

    def split(self, x: Tensor) -> list[Tensor]:
        """Each chunk's part [b, C, ...] of x [b, T, ...]."""
        if self.full:
            return list(x.split([chunk.index.shape[1] for chunk in self.chunks], dim=1))
        return [_take(x, chunk.index) for chunk in self.chunks]

    def join(self, outputs: list[Tensor]) -> Tensor:
        """The inverse of `split`: chunk outputs to [b, T, ...], padding dropped."""
        joined = torch.cat(outputs, dim=1)
        return joined if self.full else _take(joined, self.slot)


def plan_chunks(position: Tensor, feedback: int) -> ChunkPlan:
    """Cut a segment into chunks.

    Args:
        position: int64 [b, T], index of each token within its document.
        feedback: B; 0 makes one chunk of the whole segment.
    """
    rows, length = position.shape
    time = torch.arange(length, device=position.device).expand(rows, length)
    border = position % feedback == 0 if feedback else torch.zeros_like(position, dtype=torch.bool)
    begins = border | (time == 0)
    number = begins.cumsum(dim=1) - 1
    count = int(number.max()) + 1
    first = position.new_full((rows, count), length - 1)
    first.scatter_reduce_(1, number, time, reduce="amin")
    sizes = torch.zeros_like(first).scatter_add_(1, number, torch.ones_like(number))
    widths = sizes.amax(dim=0)
    offsets = widths.cumsum(0) - widths
    slot = offsets[number] + time - first.gather(1, number)
    chunks = [
        _chunk(first[:, k], sizes[:, k], width, position, border)
        for k, width in enumerate(widths.tolist())
    ]
    return ChunkPlan(chunks, slot)


def advance(entries: Tensor, past: int, chunk: Chunk, keep: int) -> Tensor:
    """The window after a chunk: the newest `keep` entries of each row, aligned right.

    Args:
        entries: [b, past + C, ...], the window before the chunk followed by the chunk's tokens.
        keep: entries to keep; rows with fewer repeat their first, which no mask lets be seen.
    """
    keep = min(keep, entries.shape[1])
    if chunk.full:
        return entries[:, entries.shape[1] - keep :]
    end = past + chunk.length
    index = end[:, None] - keep + torch.arange(keep, device=entries.device)
    return _take(entries, index.clamp(min=0))


def last_output(x: Tensor, chunk: Chunk, previous: Tensor) -> Tensor:
    """Output [b, d] of each row's last real token in x [b, C, d]; `previous` where it has none."""
    if chunk.full:
        return x[:, -1]
    last = _take(x, (chunk.length - 1).clamp(min=0)[:, None])[:, 0]
    return torch.where((chunk.length > 0)[:, None], last, previous)


def _chunk(first: Tensor, size: Tensor, width: int, position: Tensor, border: Tensor) -> Chunk:
    offsets = torch.arange(width, device=first.device)
    index = (first[:, None] + offsets).clamp(max=position.shape[1] - 1)
    return Chunk(
        index=index,
        length=size,
        full=bool((size == width).all()),
        fresh=border.gather(1, first[:, None])[:, 0],
        start=position.gather(1, first[:, None])[:, 0] == 0,
    )


def _take(x: Tensor, index: Tensor) -> Tensor:
    """x [b, N, ...] at per-row indices [b, M] of dimension 1."""
    return x[torch.arange(x.shape[0], device=x.device)[:, None], index]
