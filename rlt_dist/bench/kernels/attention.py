"""Attention over a segment: RLT's to a band of keys, Transformer-XL's with relative positions."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from rlt_dist.bench.kernels.case import Case, Floor, Made, with_gradients
from rlt_dist.ops import relative
from rlt_dist.ops.attention import attend
from rlt_dist.ops.noise import Noise, WeightMask
from rlt_dist.ops.reach import Reach, reach_mask
from rlt_dist.ops.triton.band import attend_band
from rlt_dist.ops.triton.relative import attend_relative
from rlt_dist.ops.triton.shapes import Shapes

Attend = Callable[..., Tensor]


def cases(shapes: Shapes) -> Iterator[Case]:
    """Forward, and both directions, of a layer over a segment behind a full memory."""
    past, keys = shapes.memory, shapes.memory + shapes.tokens
    query = (shapes.lanes, shapes.tokens, shapes.heads, shapes.width)
    key = (shapes.lanes, keys, shapes.kv_heads, shapes.width)
    sizes: list[tuple[int, ...]] = [query, key, key]
    with torch.device("cpu"):
        pairs = int(reach_mask(_position(shapes), past, past).sum()) * shapes.heads * shapes.width
    if shapes.model == "rlt":
        yield from _both("band", shapes, sizes, _band, pairs * 4, pairs * 10)
        return
    sizes += [(keys, *query[2:]), query[2:], query[2:]]
    yield from _both("relative", shapes, sizes, _relative, pairs * 6, pairs * 16)
    yield from _both("relative_dropping", shapes, sizes, _dropping, pairs * 6, pairs * 16)


def _both(
    name: str,
    shapes: Shapes,
    sizes: list[tuple[int, ...]],
    made: Callable[[Shapes], tuple[Attend, Attend]],
    forward: int,
    backward: int,
) -> Iterator[Case]:
    """Forward reads inputs and writes an output as large as the first; backward does it twice."""
    dtype = shapes.products
    numbers = sum(torch.Size(size).numel() for size in (*sizes, sizes[0]))
    moved = numbers * dtype.itemsize

    def inputs() -> list[Tensor]:
        return [torch.randn(size).to(dtype) for size in sizes]

    def alone() -> Made:
        kernel, plain = made(shapes)
        return Made(inputs(), lambda *x: (kernel(*x),), lambda *x: (plain(*x),))

    def with_backward() -> Made:
        return Made(inputs(), *(with_gradients(attend) for attend in made(shapes)))

    yield Case(f"{name}_forward", Floor(moved, forward), alone)
    yield Case(f"{name}_forward_backward", Floor(3 * moved, forward + backward), with_backward)


def _position(shapes: Shapes) -> Tensor:
    """Every third lane's document begins in the middle of the segment."""
    position = shapes.memory + torch.arange(shapes.tokens).repeat(shapes.lanes, 1)
    position[::3] = torch.arange(shapes.tokens) % -(-shapes.tokens // 2)
    return position


def _band(shapes: Shapes) -> tuple[Attend, Attend]:
    position, past = _position(shapes), shapes.memory
    types = (shapes.products, torch.float64)
    here = {dtype: Reach(position, past, past, dtype) for dtype in types}

    def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend_band(query, key, value, here[query.dtype])

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attend(query, key, value, here[query.dtype].mask)

    return kernel, plain


def _dropping(shapes: Shapes) -> tuple[Attend, Attend]:
    noise, heads = Noise(0, 0, torch.arange(shapes.lanes)), shapes.heads
    return _relative(shapes, noise.weight_mask(0.1, "attn.weights", 0, range(heads), heads))


def _relative(shapes: Shapes, dropped: WeightMask | None = None) -> tuple[Attend, Attend]:
    position, past = _position(shapes), shapes.memory
    reach = Reach(position, past, past, shapes.products)
    allowed = reach_mask(position, past, past)
    keep = None if dropped is None else dropped.drawn(shapes.tokens, past + shapes.tokens)

    def kernel(
        query: Tensor, key: Tensor, value: Tensor, distance: Tensor, u: Tensor, v: Tensor
    ) -> Tensor:
        return attend_relative(query, key, value, distance, (u, v), reach, dropped)

    def plain(
        query: Tensor, key: Tensor, value: Tensor, distance: Tensor, u: Tensor, v: Tensor
    ) -> Tensor:
        return relative.attend_relative(query, key, value, distance, (u, v), allowed, keep)

    return kernel, plain
