"""Attention to a band of keys: causal, within the document, of limited reach; grouped heads.

`ops.attention.attend` under `ops.reach.Reach` defines the result. A query sees consecutive keys, so
the mask is the first of them, and blocks of keys in front of a block's first are never read. Scores
live in registers (Dao, "FlashAttention-2", arXiv 2307.08691): forward leaves log2 sum 2^score of
each query, from which backward forms them again; every gradient is summed by one program, in order.

Floor, with n the pairs of a query and a key that it sees, of all lanes and heads: forward moves q
and the output, and k and v once; it multiplies 4 n w. Backward reads these and the output's
gradient, writes three, and multiplies 10 n w. On an H200 (4.8 TB/s, 790 TFLOP/s in bfloat16), where
48 + 48 RLT has 8 lanes of 512 tokens and 16 heads of 128:

- its encoder, memory_len 512: n = 8 * 16 * 512 * 513 at most; forward 17.2 GFLOP in 101 MB, 22 us,
  backward 43 GFLOP in 201 MB, 54 us;
- its window of 8 for a part of 64 tokens: 9 MB, 2 us, and 18 MB, 4 us: memory alone counts.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlt_dist.ops.reach import Reach
from rlt_dist.ops.triton.build import Build
from rlt_dist.ops.triton.launch import launch
from rlt_dist.ops.triton.shapes import Shapes
from rlt_dist.ops.triton.tiles import (
    LOG2_E,
    keys_of,
    load_rows,
    on_amd,
    padded_width,
    product,
    product_type,
    softmax_step,
    start_of,
    store_rows,
)


class Blocks(NamedTuple):
    """Queries and keys of a block, and how its kernel is launched."""

    queries: int
    keys: int
    warps: int
    stages: int


def attend_band(query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
    """softmax(q k / sqrt(d_head)) v over the keys that `reach` lets a query see.

    Query head h uses key/value head floor(h * KV / H).

    Args:
        query: [b, Q, H, d_head], float32 or bfloat16.
        key, value: [b, K, KV, d_head].

    Returns:
        [b, Q, H * d_head].
    """
    key, value = key.to(query.dtype), value.to(query.dtype)
    output: Tensor = _Band.apply(query, key, value, reach)
    return output.flatten(2)


def blocks(kernel: str, width: int, group: int, dtype: torch.dtype, amd: bool) -> Blocks:
    """How each of the three kernels is cut, for `group` query heads of `width` to a key head.

    The largest blocks found that spill no register on sm_90 and gfx942 and fit into shared memory.
    """
    if dtype == torch.float32:  # multiplied without tensor cores
        return Blocks(32, 32, 8, 1)
    if amd:
        return Blocks(32, 64, 4, 1) if kernel == "key" else Blocks(64, 64, 4, 1)
    if kernel == "key":
        return Blocks(64 if width <= 64 else 32 if group == 1 else 16, 128, 8, 2)
    return Blocks(128, 64, 8, 3) if kernel == "forward" else Blocks(128, 64, 8, 2)


class _Band(torch.autograd.Function):
    """Query [b, Q, H, w], key and value [b, K, KV, w] to [b, Q, H, w]."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, reach: Reach) -> Tensor:
        query, key, value = (_by_rows(x) for x in (query, key, value))
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        lanes, queries, heads, _ = query.shape
        logs = query.new_empty((lanes, heads, queries), dtype=torch.float32)
        _launch("forward", (query, key, value), reach.first, output, logs)
        ctx.save_for_backward(query, key, value, output, logs)
        ctx.reach = reach
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, output, logs = ctx.saved_tensors
        first, ends, d_output = ctx.reach.first, ctx.reach.ends, d_output.contiguous()
        d_query, d_key, d_value = (
            torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (query, key, value)
        )
        means, inputs = torch.empty_like(logs), (query, key, value)
        _launch("query", inputs, first, output, d_output, logs, means, d_query)
        _launch("key", inputs, first, ends, d_output, logs, means, d_key, d_value)
        return d_query, d_key, d_value, None


def _by_rows(x: Tensor) -> Tensor:
    """x [b, n, heads, w] where one number follows another within a head."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _launch(kernel: str, inputs: tuple[Tensor, Tensor, Tensor], *tensors: Tensor) -> None:
    """One of the three kernels; `tensors` are what it takes besides q, k and v, in its order."""
    query, key, _ = inputs
    lanes, queries, heads, width = query.shape
    cut = blocks(kernel, width, heads // key.shape[2], query.dtype, on_amd())
    grid = (triton.cdiv(queries, cut.queries), heads, lanes)
    if kernel == "key":
        grid = (triton.cdiv(key.shape[1], cut.keys), key.shape[2], lanes)
    launch(
        _KERNELS[kernel],
        grid,
        *inputs,
        *tensors,
        *(stride for x in inputs for stride in x.stride()[:3]),
        queries,
        key.shape[1],
        width**-0.5,
        warps=cut.warps,
        stages=cut.stages,
        **_constants(cut, heads, key.shape[2], width),
        PRODUCT=product_type(query),
    )


def _constants(cut: Blocks, heads: int, key_value_heads: int, width: int) -> dict[str, int]:
    return {
        "HEADS": heads,
        "GROUP": heads // key_value_heads,
        "WIDTH": width,
        "COLUMNS": padded_width(width),
        "QUERIES": cut.queries,
        "KEYS": cut.keys,
    }


# -- kernels -----------------------------------------------------------------------------------
#
# q, k, v have strides by lane, token and head; what is written is [b, n, heads, w], contiguous.
# Sums and their logarithms are by lane, head and query. The key of query i's own token is
# key_count - query_count + i.


@triton.jit
def band_forward(
    query,
    key,
    value,
    first,
    output,
    logs,
    query_lane,
    query_token,
    query_head,
    key_lane,
    key_token,
    key_head,
    value_lane,
    value_token,
    value_head,
    query_count,
    key_count,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """A block of queries of one head and lane, all its keys."""
    begin, head, lane = tl.program_id(0) * QUERIES, tl.program_id(1), tl.program_id(2)
    row = begin + tl.arange(0, QUERIES)
    own = key_count - query_count + row
    key = start_of(key, lane, key_lane, head // GROUP, key_head)
    value = start_of(value, lane, value_lane, head // GROUP, value_head)
    q = load_rows(
        start_of(query, lane, query_lane, head, query_head),
        row,
        query_token,
        query_count,
        WIDTH,
        COLUMNS,
    )
    nearest, start, stop = keys_of(
        first + lane * query_count, row, begin, query_count, key_count, QUERIES, KEYS
    )
    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, COLUMNS], tl.float32)
    for block in range(start, stop, KEYS):
        column = block + tl.arange(0, KEYS)
        k = load_rows(key, column, key_token, key_count, WIDTH, COLUMNS)
        score = product(q, tl.trans(k), PRODUCT) * (scale * LOG2_E)
        seen = (column[None, :] >= nearest[:, None]) & (column[None, :] <= own[:, None])
        weight, shrink, most, total = softmax_step(score, seen, most, total)
        v = load_rows(value, column, value_token, key_count, WIDTH, COLUMNS)
        sums = sums * shrink[:, None] + product(weight, v, PRODUCT)
    at = output + (lane.to(tl.int64) * query_count * HEADS + head) * WIDTH
    inside = row < query_count
    total = tl.where(inside, total, 1.0)
    store_rows(at, row, HEADS * WIDTH, query_count, sums / total[:, None], WIDTH, COLUMNS)
    at = logs + (lane * HEADS + head).to(tl.int64) * query_count
    tl.store(at + row, most + tl.log2(total), mask=inside)


@triton.jit
def band_backward_query(
    query,
    key,
    value,
    first,
    output,
    d_output,
    logs,
    means,
    d_query,
    query_lane,
    query_token,
    query_head,
    key_lane,
    key_token,
    key_head,
    value_lane,
    value_token,
    value_head,
    query_count,
    key_count,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """d_query of a block of queries, and the weights' mean of their gradients for the keys'."""
    begin, head, lane = tl.program_id(0) * QUERIES, tl.program_id(1), tl.program_id(2)
    row = begin + tl.arange(0, QUERIES)
    inside, own = row < query_count, key_count - query_count + row
    key = start_of(key, lane, key_lane, head // GROUP, key_head)
    value = start_of(value, lane, value_lane, head // GROUP, value_head)
    q = load_rows(
        start_of(query, lane, query_lane, head, query_head),
        row,
        query_token,
        query_count,
        WIDTH,
        COLUMNS,
    )
    by_head = (lane.to(tl.int64) * query_count * HEADS + head) * WIDTH
    y = load_rows(output + by_head, row, HEADS * WIDTH, query_count, WIDTH, COLUMNS)
    dy = load_rows(d_output + by_head, row, HEADS * WIDTH, query_count, WIDTH, COLUMNS)
    by_query = (lane * HEADS + head).to(tl.int64) * query_count + row
    log = tl.load(logs + by_query, mask=inside, other=0.0)
    mean = tl.sum(y * dy, axis=1)
    tl.store(means + by_query, mean, mask=inside)
    nearest, start, stop = keys_of(
        first + lane * query_count, row, begin, query_count, key_count, QUERIES, KEYS
    )
    dq = tl.zeros([QUERIES, COLUMNS], tl.float32)
    for block in range(start, stop, KEYS):
        column = block + tl.arange(0, KEYS)
        k = load_rows(key, column, key_token, key_count, WIDTH, COLUMNS)
        v = load_rows(value, column, value_token, key_count, WIDTH, COLUMNS)
        score = product(q, tl.trans(k), PRODUCT) * (scale * LOG2_E)
        seen = (column[None, :] >= nearest[:, None]) & (column[None, :] <= own[:, None])
        weight = tl.where(seen, tl.exp2(score - log[:, None]), 0.0)
        d_score = weight * (product(dy, tl.trans(v), PRODUCT) - mean[:, None])
        dq += product(d_score, k, PRODUCT)
    store_rows(d_query + by_head, row, HEADS * WIDTH, query_count, dq * scale, WIDTH, COLUMNS)


@triton.jit
def band_backward_key(
    query,
    key,
    value,
    first,
    ends,
    d_output,
    logs,
    means,
    d_key,
    d_value,
    query_lane,
    query_token,
    query_head,
    key_lane,
    key_token,
    key_head,
    value_lane,
    value_token,
    value_head,
    query_count,
    key_count,
    scale,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """d_key and d_value of a block of keys of one key/value head, over its queries and heads."""
    begin, group, lane = tl.program_id(0) * KEYS, tl.program_id(1), tl.program_id(2)
    past = key_count - query_count
    column = begin + tl.arange(0, KEYS)
    k = load_rows(
        start_of(key, lane, key_lane, group, key_head), column, key_token, key_count, WIDTH, COLUMNS
    )
    v = load_rows(
        start_of(value, lane, value_lane, group, value_head),
        column,
        value_token,
        key_count,
        WIDTH,
        COLUMNS,
    )
    dk = tl.zeros([KEYS, COLUMNS], tl.float32)
    dv = tl.zeros([KEYS, COLUMNS], tl.float32)
    start = tl.maximum(0, begin - past) // QUERIES * QUERIES
    stop = tl.load(ends + lane * key_count + tl.minimum(begin + KEYS, key_count) - 1)
    for head in range(group * GROUP, (group + 1) * GROUP):
        queries = start_of(query, lane, query_lane, head, query_head)
        dys = d_output + (lane.to(tl.int64) * query_count * HEADS + head) * WIDTH
        by_query = (lane * HEADS + head).to(tl.int64) * query_count
        for block in range(start, stop, QUERIES):
            row = block + tl.arange(0, QUERIES)
            inside = row < query_count
            q = load_rows(queries, row, query_token, query_count, WIDTH, COLUMNS)
            dy = load_rows(dys, row, HEADS * WIDTH, query_count, WIDTH, COLUMNS)
            log = tl.load(logs + by_query + row, mask=inside, other=0.0)
            mean = tl.load(means + by_query + row, mask=inside, other=0.0)
            nearest = tl.load(first + lane * query_count + row, mask=inside, other=key_count)
            score = product(k, tl.trans(q), PRODUCT) * (scale * LOG2_E)
            seen = (column[:, None] >= nearest[None, :]) & (column[:, None] <= past + row[None, :])
            weight = tl.where(seen, tl.exp2(score - log[None, :]), 0.0)
            dv += product(weight, dy, PRODUCT)
            d_score = weight * (product(v, tl.trans(dy), PRODUCT) - mean[None, :])
            dk += product(d_score, q, PRODUCT)
    heads = HEADS // GROUP
    by_head = (lane.to(tl.int64) * key_count * heads + group) * WIDTH
    store_rows(d_key + by_head, column, heads * WIDTH, key_count, dk * scale, WIDTH, COLUMNS)
    store_rows(d_value + by_head, column, heads * WIDTH, key_count, dv, WIDTH, COLUMNS)


_KERNELS = {
    "forward": band_forward,
    "query": band_backward_query,
    "key": band_backward_key,
}


def builds(shapes: Shapes) -> Iterator[Build]:
    """The three kernels, for heads as they are here."""
    if shapes.model == "rlt":
        for kind in _KERNELS:
            yield replace(_build(kind, shapes, amd=False), amd=_build(kind, shapes, amd=True))


def _build(kind: str, shapes: Shapes, amd: bool) -> Build:
    kernel, group = _KERNELS[kind], shapes.heads // shapes.kv_heads
    cut = blocks(kind, shapes.width, group, shapes.products, amd)
    constants: dict[str, Any] = _constants(cut, shapes.heads, shapes.kv_heads, shapes.width)
    constants["PRODUCT"] = tl.dtype(shapes.dtype)
    names = [name for name in kernel.arg_names if name not in constants]
    strides, counts = names.index("query_lane"), names.index("query_count")
    signature = dict.fromkeys(names[:strides], f"*{shapes.dtype}")
    signature |= dict.fromkeys(names[strides:counts], "i32:16")
    signature |= dict.fromkeys(names[counts:], "i32") | {"scale": "fp32"}
    types = {"logs": "*fp32", "means": "*fp32", "first": "*i32", "ends": "*i32"}
    signature |= {name: kind for name, kind in types.items() if name in names}
    name = "band_forward" if kind == "forward" else f"band_backward_{kind}"
    return Build(name, kernel, signature, constants, cut.warps, cut.stages, product=True)
