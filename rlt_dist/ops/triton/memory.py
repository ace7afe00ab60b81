"""Attention of a chunk's tokens to the encoder memory: few queries, many entries.

Reading the memory is all that it costs, so programs split each lane's entries between them, and a
second launch puts their softmaxes together (Dao, Haziza, Massa, Sizov, "Flash-Decoding", 2023).
What a token sees is a range of entries, `first` .. `last` [T + 1, B], that is read where the
token's slot is: one launch, recorded, serves all chunks of as many tokens. Scores are taken to base
2, and their log2 sum 2^score is kept, from which backward forms the weights again, in one reading
of the memory. It makes no gradient of the memory: weights and d_score go to the tape, and two large
products afterwards make it for all tokens (`recurrence.gradients`).

Letters as in `recurrence`: C tokens, B lanes, H query heads and KV key/value heads of width w, M
memory entries. Tapes are float32, workspaces of products and the memory are of their type.

Floors for n entries that a token sees and p bytes of a memory's number. The memory is read once by
all tokens of a chunk, n + C - 1 entries, and by all H / KV queries of a key/value head:

- `memory_forward`: 2 B KV (n + C - 1) w p bytes, 4 C B H n w operations;
- `memory_backward`: 8 C B H (n + C - 1) bytes more, weights and d_score; 6 C B H n w operations.

At every published size, and for 64 tokens as for one, bytes take longer. `rlt-dist kernels list`
has the numbers of a configuration.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlt_dist.ops.triton.build import Build
from rlt_dist.ops.triton.launch import launch
from rlt_dist.ops.triton.shapes import Shapes
from rlt_dist.ops.triton.tiles import (
    LOG2_E,
    padded_width,
    product,
    product_type,
    softmax_step,
    start_of,
)

_PROGRAMS = 264
"""Two for each of an H200's 132 multiprocessors."""
_NOWHERE = tl.constexpr(1 << 30)


class Reading(NamedTuple):
    """The memory, and what of it the tokens see.

    Attributes:
        k, v: [B, KV, M, w], of one type and alike in memory; the first M of more entries. A
            head's entries follow one another.
        first, last: int32 [T + 1, B], the range of entries that the token in a slot sees.
    """

    k: Tensor
    v: Tensor
    first: Tensor
    last: Tensor


class Blocks(NamedTuple):
    """Rows (tokens by heads of a group) and entries of a block, programs of a row of blocks.

    All are powers of two, for each that is new is compiled anew.
    """

    rows: int
    keys: int
    splits: int
    warps: int
    stages: int


class Partial(NamedTuple):
    """What each of S programs found for the rows of its part of the memory, float32.

    Attributes:
        blocks: how the memory was split.
        x: [S, C B, H, w], weighted values, or a part of dq.
        most, total: [S, C B, H], the largest score and the sum of 2^(score - most).
    """

    blocks: Blocks
    x: Tensor
    most: Tensor
    total: Tensor

    @classmethod
    def room(cls, chosen: Blocks, rows: int, heads: int, width: int, like: Tensor) -> "Partial":
        """For C B rows, on the device of `like`."""
        size = (chosen.splits, rows, heads)
        sizes = ((*size, width), size, size)
        return cls(chosen, *(like.new_empty(size, dtype=torch.float32) for size in sizes))


def blocks(tokens: int, lanes: int, heads: int, kv_heads: int, seen: int) -> Blocks:
    """How a chunk of so many tokens reads `seen` entries.

    On sm_90 at width 128, 64 rows of 64 entries do not fit into registers, on four warps or eight.
    """
    queries = tokens * (heads // kv_heads)
    rows = min(64, max(16, triton.next_power_of_2(queries)))
    keys, warps = (64, 4) if rows == 16 else (32, 8)
    programs = triton.cdiv(queries, rows) * lanes * kv_heads
    splits = max(1, min(triton.cdiv(_PROGRAMS, programs), triton.cdiv(seen, keys)))
    return Blocks(rows, keys, triton.next_power_of_2(splits), warps, stages=2)


@triton.jit
def _rows(
    index,
    first,
    last,
    tokens,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    """A program's rows and its part of the entries.

    Returns:
        [ROWS]: which are there, their row in [C B, H] and on a tape [T + 1, B, H], their token's
        place on a tape [T + 1, B], the range that each sees; and the first and last of all.
    """
    block, split = tl.program_id(0) // SPLITS, tl.program_id(0) % SPLITS
    lane, group = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    together: tl.constexpr = HEADS // KV_HEADS
    row = block * ROWS + tl.arange(0, ROWS)
    token, head = row // together, group * together + row % together
    there = token < tokens
    at = token.to(tl.int64) * LANES + lane
    place = tl.load(index + at, there, 0) * LANES + lane
    low = tl.load(first + place, there, _NOWHERE)
    high = tl.load(last + place, there, -1)
    begin, end = tl.min(low, axis=0), tl.max(high, axis=0) + 1
    span = ((end - begin + SPLITS - 1) // SPLITS + KEYS - 1) // KEYS * KEYS
    begin += split * span
    end = tl.minimum(end, begin + span)
    return there, at * HEADS + head, place * HEADS + head, place, low, high, begin, end


@triton.jit
def _entries(base, key, end, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """[keys, COLUMNS] of a memory."""
    column = tl.arange(0, COLUMNS)
    inside = (key < end)[:, None] & (column < WIDTH)[None, :]
    return tl.load(base + (key[:, None] * WIDTH + column[None, :]), inside, 0.0)


@triton.jit
def _memory_forward(
    index,
    query,
    cos,
    sin,
    first,
    last,
    k,
    v,
    lane_stride,
    head_stride,
    query_tape,
    partial,
    partial_most,
    partial_total,
    tokens,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    there, here, taped, place, low, high, begin, end = _rows(
        index, first, last, tokens, LANES, HEADS, KV_HEADS, ROWS, KEYS, SPLITS
    )
    column = tl.arange(0, COLUMNS)
    half: tl.constexpr = WIDTH // 2
    inside = there[:, None] & (column < WIDTH)[None, :]
    own = query + here[:, None] * WIDTH
    x = tl.load(own + column[None, :], inside, 0.0).to(tl.float32)
    other = tl.load(own + ((column + half) % WIDTH)[None, :], inside, 0.0).to(tl.float32)
    angle = place[:, None] * half + (column % half)[None, :]
    turned = tl.where((column < half)[None, :], -other, other)
    q = x * tl.load(cos + angle, inside, 0.0) + turned * tl.load(sin + angle, inside, 0.0)
    split = tl.program_id(0) % SPLITS
    if split == 0:
        tl.store(query_tape + taped[:, None] * WIDTH + column[None, :], q, inside)
    q = q.to(PRODUCT)
    lane, group = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    k = start_of(k, lane, lane_stride, group, head_stride)
    v = start_of(v, lane, lane_stride, group, head_stride)
    most = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        score = product(q, tl.trans(_entries(k, key, end, WIDTH, COLUMNS)), PRODUCT) * LOG2_E
        seen = (key[None, :] >= low[:, None]) & (key[None, :] <= high[:, None])
        weight, shrink, most, total = softmax_step(score, seen, most, total)
        values = _entries(v, key, end, WIDTH, COLUMNS)
        sums = sums * shrink[:, None] + product(weight, values, PRODUCT)
    to = split.to(tl.int64) * tokens * LANES * HEADS + here
    tl.store(partial + to[:, None] * WIDTH + column[None, :], sums, inside)
    tl.store(partial_most + to, most, there)
    tl.store(partial_total + to, total, there)


@triton.jit
def _memory_reduce(
    index,
    partial,
    partial_most,
    partial_total,
    crossed,
    crossed_tape,
    log_tape,
    rows,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    here = row * HEADS + head
    taped = (tl.load(index + row) * LANES + row % LANES) * HEADS + head
    part, column = tl.arange(0, SPLITS), tl.arange(0, COLUMNS)
    at = part.to(tl.int64) * rows * HEADS + here
    most = tl.load(partial_most + at)
    largest = tl.max(most, axis=0)
    share = tl.exp2(most - largest)
    total = tl.sum(share * tl.load(partial_total + at), axis=0)
    inside = column < WIDTH
    each = tl.load(partial + at[:, None] * WIDTH + column[None, :], inside[None, :], 0.0)
    out = tl.sum(each * (share / total)[:, None], axis=0)
    tl.store(crossed + here * WIDTH + column, out.to(crossed.dtype.element_ty), inside)
    tl.store(crossed_tape + taped * WIDTH + column, out, inside)
    tl.store(log_tape + taped, largest + tl.log2(total))


def memory_forward(
    index: Tensor,
    query: Tensor,
    tables: tuple[Tensor, Tensor],
    reading: Reading,
    partial: Partial,
    crossed: Tensor,
    tape: tuple[Tensor, Tensor, Tensor],
) -> None:
    """softmax(q k) v over the entries that each token sees, q under its rotary.

    Args:
        index: int64 [C, B], slots of the tokens.
        query: [C B, H w], before the rotary, with 1 / sqrt(w).
        tables: cosine and sine, float32 [T + 1, B, 1, w / 2].
        partial: as `blocks` splits the memory; overwritten.
        crossed: [C B, H w], written.
        tape: the query under its rotary [T + 1, B, H, w], `crossed` [T + 1, B, H w] and log2 sum
            2^score [T + 1, B, H]; float32, written.
    """
    query_tape, crossed_tape, log_tape = tape
    arrays, sums = (reading.first, reading.last, reading.k, reading.v), partial[1:]
    _launch_split(
        *(_memory_forward, index, reading, partial),
        *(index, query, *tables, *arrays, *reading.k.stride()[:2], query_tape, *sums, len(index)),
    )
    rest = (*sums, crossed, crossed_tape, log_tape, index.numel())
    _launch_reduction(_memory_reduce, index, partial, *rest)


@triton.jit
def _memory_backward(
    index,
    d_crossed,
    query_tape,
    crossed_tape,
    log_tape,
    first,
    last,
    k,
    v,
    lane_stride,
    head_stride,
    weight_tape,
    d_score_tape,
    d_crossed_tape,
    partial,
    tokens,
    entries,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLITS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    there, here, taped, _, low, high, begin, end = _rows(
        index, first, last, tokens, LANES, HEADS, KV_HEADS, ROWS, KEYS, SPLITS
    )
    column = tl.arange(0, COLUMNS)
    inside = there[:, None] & (column < WIDTH)[None, :]
    mine = here[:, None] * WIDTH + column[None, :]
    kept = taped[:, None] * WIDTH + column[None, :]
    q = tl.load(query_tape + kept, inside, 0.0).to(tl.float32)
    d = tl.load(d_crossed + mine, inside, 0.0).to(tl.float32)
    crossed = tl.load(crossed_tape + kept, inside, 0.0).to(tl.float32)
    inner = tl.sum(d * crossed, axis=1)
    log = tl.load(log_tape + taped, there, 0.0)
    split = tl.program_id(0) % SPLITS
    if split == 0:
        tl.store(d_crossed_tape + kept, d, inside)
    q, d = q.to(PRODUCT), d.to(PRODUCT)
    lane, group = tl.program_id(1) // KV_HEADS, tl.program_id(1) % KV_HEADS
    k = start_of(k, lane, lane_stride, group, head_stride)
    v = start_of(v, lane, lane_stride, group, head_stride)
    dq = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(begin, end, KEYS):
        key = start + tl.arange(0, KEYS)
        keys = _entries(k, key, end, WIDTH, COLUMNS)
        score = product(q, tl.trans(keys), PRODUCT) * LOG2_E
        seen = (key[None, :] >= low[:, None]) & (key[None, :] <= high[:, None])
        weight = tl.where(seen, tl.exp2(score - log[:, None]), 0.0)
        d_weight = product(d, tl.trans(_entries(v, key, end, WIDTH, COLUMNS)), PRODUCT)
        d_score = weight * (d_weight - inner[:, None])
        tl.store((weight_tape + taped * entries)[:, None] + key[None, :], weight, seen)
        tl.store((d_score_tape + taped * entries)[:, None] + key[None, :], d_score, seen)
        dq += product(d_score, keys, PRODUCT)
    to = split.to(tl.int64) * tokens * LANES * HEADS + here
    tl.store(partial + to[:, None] * WIDTH + column[None, :], dq, inside)


@triton.jit
def _memory_reduce_backward(
    index,
    partial,
    cos,
    sin,
    dq,
    dq_tape,
    rows,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    here = row * HEADS + head
    place = tl.load(index + row) * LANES + row % LANES
    part, column = tl.arange(0, SPLITS), tl.arange(0, COLUMNS)
    half: tl.constexpr = WIDTH // 2
    inside = column < WIDTH
    own = partial + (part.to(tl.int64) * rows * HEADS + here)[:, None] * WIDTH
    both = inside[None, :]
    x = tl.sum(tl.load(own + column[None, :], both, 0.0), axis=0)
    other = tl.sum(tl.load(own + ((column + half) % WIDTH)[None, :], both, 0.0), axis=0)
    angle = place * half + column % half
    turned = tl.where(column < half, other, -other)
    d = x * tl.load(cos + angle, inside, 0.0) + turned * tl.load(sin + angle, inside, 0.0)
    tl.store(dq + here * WIDTH + column, d.to(dq.dtype.element_ty), inside)
    tl.store(dq_tape + (place * HEADS + head) * WIDTH + column, d, inside)


def memory_backward(
    index: Tensor,
    d_crossed: Tensor,
    tables: tuple[Tensor, Tensor],
    reading: Reading,
    partial: Partial,
    kept: tuple[Tensor, Tensor, Tensor],
    dq: Tensor,
    tape: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """The gradient of `memory_forward` with respect to its query.

    Args:
        index, tables, reading: as in forward.
        d_crossed: [C B, H w].
        partial: overwritten.
        kept: what forward left on the tape.
        dq: [C B, H w], before the rotary, written.
        tape: weights and d_score [T + 1, B, H, M], written where a token sees an entry; d_crossed
            [T + 1, B, H, w] and dq [T + 1, B, H w]; float32, written.
    """
    weight_tape, d_score_tape, d_crossed_tape, dq_tape = tape
    arrays = (reading.first, reading.last, reading.k, reading.v)
    _launch_split(
        *(_memory_backward, index, reading, partial),
        *(index, d_crossed, *kept, *arrays, *reading.k.stride()[:2]),
        *(weight_tape, d_score_tape, d_crossed_tape, partial.x),
        *(len(index), weight_tape.shape[-1]),
    )
    rest = (partial.x, *tables, dq, dq_tape, index.numel())
    _launch_reduction(_memory_reduce_backward, index, partial, *rest)


def _launch_split(
    kernel: Any, index: Tensor, reading: Reading, partial: Partial, *arguments: Any
) -> None:
    """A program for each block of rows, part of the memory, lane and group."""
    (tokens, lanes), kv_heads = index.shape, reading.k.shape[1]
    _, _, heads, width = partial.x.shape
    chosen = partial.blocks
    row_blocks = triton.cdiv(tokens * (heads // kv_heads), chosen.rows)
    launch(
        kernel,
        (row_blocks * chosen.splits, lanes * kv_heads),
        *arguments,
        **_heads(lanes, heads, width, chosen),
        **_rows_and_keys(kv_heads, chosen),
        PRODUCT=product_type(reading.k),
        warps=chosen.warps,
        stages=chosen.stages,
    )


def _launch_reduction(kernel: Any, index: Tensor, partial: Partial, *arguments: Any) -> None:
    """A program for each token and head."""
    _, rows, heads, width = partial.x.shape
    constants = _heads(index.shape[1], heads, width, partial.blocks)
    launch(kernel, (rows, heads), index, *arguments, **constants)


def _heads(lanes: int, heads: int, width: int, chosen: Blocks) -> dict[str, int]:
    sizes = {"LANES": lanes, "HEADS": heads, "WIDTH": width, "COLUMNS": padded_width(width)}
    return sizes | {"SPLITS": chosen.splits}


def _rows_and_keys(kv_heads: int, chosen: Blocks) -> dict[str, int]:
    return {"KV_HEADS": kv_heads, "ROWS": chosen.rows, "KEYS": chosen.keys}


def builds(shapes: Shapes) -> Iterator[Build]:
    """For a chunk, and, where it is not the chunk, for a part that is computed again."""
    if shapes.model != "rlt":
        return
    for name, tokens in {"": shapes.chunk, "_part": shapes.part}.items():
        if not name or tokens != shapes.chunk:
            yield from _builds(shapes, name, tokens)


def _builds(shapes: Shapes, name: str, tokens: int) -> Iterator[Build]:
    product, tape, place = f"*{shapes.dtype}", "*fp32", "*i64"
    sizes = (shapes.lanes, shapes.heads, shapes.kv_heads, shapes.memory + tokens)
    chosen = blocks(tokens, *sizes)
    heads = _heads(shapes.lanes, shapes.heads, shapes.width, chosen)
    split = {**heads, **_rows_and_keys(shapes.kv_heads, chosen), "PRODUCT": tl.dtype(shapes.dtype)}
    one, counted = ({"tokens": 1}, {}) if tokens == 1 else ({}, {"tokens": "i32"})
    split |= one
    launched = (chosen.warps, chosen.stages, True)
    reading = {"first": "*i32", "last": "*i32", "k": product, "v": product}
    reading |= {"lane_stride": "i32:16", "head_stride": "i32:16"}
    sums = dict.fromkeys(("partial", "partial_most", "partial_total"), tape)
    forward = {"index": place, "query": product, "cos": tape, "sin": tape, **reading}
    forward |= {"query_tape": tape, **sums, **counted}
    yield Build(f"memory_forward{name}", _memory_forward, forward, split, *launched)
    backward = {"index": place, "d_crossed": product, **reading, "partial": tape}
    backward |= dict.fromkeys(("query_tape", "crossed_tape", "log_tape"), tape)
    backward |= dict.fromkeys(("weight_tape", "d_score_tape", "d_crossed_tape"), tape)
    backward |= {**counted, "entries": "i32:16"}
    yield Build(f"memory_backward{name}", _memory_backward, backward, split, *launched)
    reduce = {"index": place, **sums, "crossed": product, "crossed_tape": tape, "log_tape": tape}
    reduce |= {"rows": "i32"}
    yield Build(f"memory_reduce{name}", _memory_reduce, reduce, heads)
    reduce = {"index": place, "partial": tape, "cos": tape, "sin": tape, "dq": product}
    reduce |= {"dq_tape": tape, "rows": "i32"}
    yield Build(f"memory_reduce_backward{name}", _memory_reduce_backward, reduce, heads)
