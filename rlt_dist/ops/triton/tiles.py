"""What kernels that multiply blocks have in common: loads, products, a softmax met bit by bit."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = tl.constexpr(1.4426950408889634)
"""Kernels of attention take 2^x: scores are scaled by log2(e) as well."""


def product_type(*operands: Tensor) -> Any:
    """The type that operands have when they meet in a product, as kernels are told it.

    Theirs, so that tensor cores multiply bfloat16; sums are float32 in any case. The interpreter
    would multiply the bits of bfloat16 as integers, and is given float32.
    """
    narrow = operands[0].dtype == torch.bfloat16 and operands[0].is_cuda
    return tl.bfloat16 if narrow else tl.float32


def on_amd() -> bool:
    """Whether kernels run on AMD's chips, which have less shared memory and wider warps."""
    return torch.version.hip is not None


def padded_width(width: int) -> int:
    """The columns of the block that holds a head: a power of two that a product takes."""
    return max(16, triton.next_power_of_2(width))


def whole_row(d: int) -> dict[str, int]:
    """A program has a whole row: up to 8192 columns at most 16 numbers of it a thread.

    Twice as many fit too; of rows longer than 16384 backward kernels spill 8 or 16 bytes a thread
    on sm_90.
    """
    block = triton.next_power_of_2(d)
    return {"BLOCK": block, "warps": min(16, max(4, block // 512))}


def some_columns(count: int, most: int) -> dict[str, int]:
    """A program has some columns of rows whose columns do not meet, at most so many."""
    return {"BLOCK": min(most, triton.next_power_of_2(count)), "warps": 4}


@triton.jit
def start_of(x, lane, lane_stride, head, head_stride):
    """Where a lane's head begins; a tensor may hold more numbers than int32 counts."""
    return x + lane.to(tl.int64) * lane_stride + tl.cast(head, tl.int64) * head_stride


@triton.jit
def load_rows(base, row, stride, count, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """float32 [rows, COLUMNS]: rows 0 .. count - 1 of a matrix, and zeros outside of it."""
    column = tl.arange(0, COLUMNS)
    inside = ((row >= 0) & (row < count))[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * stride + column[None, :]
    return tl.load(base + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rows(base, row, stride, count, x, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows that lie inside the matrix, in its type."""
    column = tl.arange(0, COLUMNS)
    inside = (row < count)[:, None] & (column < WIDTH)[None, :]
    at = row[:, None] * stride + column[None, :]
    tl.store(base + at, x.to(base.dtype.element_ty), mask=inside)


@triton.jit
def product(x, y, PRODUCT: tl.constexpr):
    """x y in float32, of operands rounded to PRODUCT; float32 ones are multiplied as they are."""
    return tl.dot(x.to(PRODUCT), y.to(PRODUCT), input_precision="ieee")


@triton.jit
def keys_of(first, row, begin, query_count, key_count, QUERIES: tl.constexpr, KEYS: tl.constexpr):
    """The nearest key that each query of a block may see, and where blocks of such keys lie.

    Args:
        first: of a lane, [query_count].
        row: the queries, begin .. begin + QUERIES - 1. The last key is the last query's own.

    Returns:
        [QUERIES], beyond all keys where there is no query; the first block's start, and the end.
    """
    nearest = tl.load(first + row, mask=row < query_count, other=key_count)
    start = tl.min(nearest, axis=0) // KEYS * KEYS
    return nearest, start, tl.minimum(key_count, key_count - query_count + begin + QUERIES)


@triton.jit
def softmax_step(score, seen, most, total):
    """Take more keys into a softmax over rows (Milakov, Gimelshein, arXiv 1805.02867).

    Args:
        score: [rows, keys], in powers of two.
        seen: which of them count.
        most, total: [rows], of the keys so far: the largest score, and the sum of 2^(score - most).

    Returns:
        2^(score - most), what the sums so far shrink by, and most and total with these keys.
    """
    score = tl.where(seen, score, float("-inf"))
    larger = tl.maximum(most, tl.max(score, axis=1))
    base = tl.where(larger == float("-inf"), 0.0, larger)  # a row may have seen no key so far
    weight = tl.exp2(score - base[:, None])
    shrink = tl.exp2(most - base)
    return weight, shrink, larger, total * shrink + tl.sum(weight, axis=1)


@triton.jit
def turned(low, high, start, SIZE: tl.constexpr, AXIS: tl.constexpr):
    """SIZE numbers along an axis of [low high], from a start on that each row has of its own.

    A diagonal band of distances becomes a block of keys, or the other way round. Of the numbers
    whose places are alike modulo SIZE each row takes one: choose it, then turn the row.

    Args:
        low, high: [rows, SIZE] for axis 1, [SIZE, rows] for axis 0.
        start: [rows], 0 .. SIZE - 1.
    """
    place = tl.expand_dims(tl.arange(0, SIZE), 1 - AXIS)
    start = tl.expand_dims(start, AXIS)
    chosen = tl.where(place >= start, low, high)
    return tl.gather(chosen, (place + start) & (SIZE - 1), axis=AXIS)


@triton.jit
def turned_back(x, start, SIZE: tl.constexpr):
    """low and high of which `turned` makes x along axis 1, zero where it takes nothing."""
    place = tl.arange(0, SIZE)[None, :]
    back = tl.gather(x, (place - start[:, None]) & (SIZE - 1), axis=1)
    low = place >= start[:, None]
    return tl.where(low, back, 0.0), tl.where(low, 0.0, back)


@triton.jit
def uniform_bits(stream, element):
    """`ops.noise.uniform_bits` of a lane's stream at the elements with these numbers, int64."""
    return shift_bits(mix_bits(mix_bits(stream) + (element + 1) * -7046029254386353131), 40)


@triton.jit
def mix_bits(x):
    """The finaliser of splitmix64 on int64, as in `ops.noise`."""
    x = (x ^ shift_bits(x, 30)) * -4658895280553007687
    x = (x ^ shift_bits(x, 27)) * -7723592293110705685
    return x ^ shift_bits(x, 31)


@triton.jit
def shift_bits(x, BITS: tl.constexpr):
    """Logical right shift of int64."""
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)
