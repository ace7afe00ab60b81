"""The kernels of `relative`: forward, and backward by query, by key and by distance.

k and v have strides by lane, token and head, R by distance and head; all else of heads is
[b, n, heads, w], contiguous. Logarithms and means are by lane, head and query. Query i's own key
is key_count - query_count + i; row m of R is the distance key_count - 1 - m, so the row of query
i and key j is query_count - 1 - i + j.
"""

import triton
import triton.language as tl

from rlt_dist.ops.triton.tiles import (
    LOG2_E,
    keys_of,
    load_rows,
    product,
    softmax_step,
    start_of,
    store_rows,
    turned,
    turned_back,
    uniform_bits,
)


@triton.jit
def relative_keep(
    streams,
    bits,
    query_count,
    key_count,
    first_head,
    all_heads,
    threshold,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
):
    """Which weights are kept, for a block of queries and 32 keys: a bit of int32 for each key."""
    word, head, lane = tl.program_id(1), tl.program_id(2) % HEADS, tl.program_id(2) // HEADS
    row, bit = tl.program_id(0) * QUERIES + tl.arange(0, QUERIES), tl.arange(0, 32)
    distance = key_count - query_count + row[:, None] - (word * 32 + bit)[None, :]
    number = (distance.to(tl.int64) * all_heads + first_head + head) * query_count + row[:, None]
    kept = uniform_bits(tl.load(streams + lane), number) >= threshold
    packed = tl.sum(kept.to(tl.int32) << bit[None, :], axis=1)
    at = ((lane * HEADS + head).to(tl.int64) * query_count + row) * tl.num_programs(1) + word
    tl.store(bits + at, packed, mask=row < query_count)


@triton.jit
def _word(bits, row, key, key_count, inside, ALIGNED: tl.constexpr):
    """int32 [rows]: the bits of each query's keys from `key` on, 32 or up to the next multiple."""
    words, at = tl.cdiv(key_count, 32), key >> 5
    word = tl.load(bits + row * words + at, mask=inside & (at >= 0) & (at < words), other=0)
    if ALIGNED:
        return word >> (key & 31)
    at += 1
    high = tl.load(bits + row * words + at, mask=inside & (at >= 0) & (at < words), other=0)
    both = (high.to(tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)
    return (both >> (key & 31)).to(tl.int32)


@triton.jit
def _keep(
    bits,
    row,
    key,
    key_count,
    inside,
    boost,
    KEYS: tl.constexpr,
    AXIS: tl.constexpr,
    ALIGNED: tl.constexpr = True,
):
    """The scaled keep-mask, 0 or `boost`, of at most 64 keys, on AXIS, from `key` on.

    Args:
        row, key, inside: [rows], queries, the first key of each, and whether they are any.
        ALIGNED: keys begin at a multiple of 32, or of KEYS where these are fewer.
    """
    place = tl.expand_dims(tl.arange(0, KEYS), 1 - AXIS)
    word = tl.expand_dims(_word(bits, row, key, key_count, inside, ALIGNED), AXIS)
    if KEYS > 32:
        high = tl.expand_dims(_word(bits, row, key + 32, key_count, inside, ALIGNED), AXIS)
        word = tl.where(place < 32, word, high)
    return tl.where((word >> (place & 31)) & 1 != 0, boost, 0.0)


@triton.jit
def relative_forward(
    content,
    position,
    key,
    value,
    relative,
    first,
    output,
    logs,
    key_lane,
    key_token,
    key_head,
    value_lane,
    value_token,
    value_head,
    relative_row,
    relative_head,
    query_count,
    key_count,
    scale,
    bits,
    boost,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DROPS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """A block of queries of one head and lane, all its keys."""
    begin, head, lane = tl.program_id(0) * QUERIES, tl.program_id(1), tl.program_id(2)
    step = tl.arange(0, KEYS)
    row, turn = begin + tl.arange(0, QUERIES), QUERIES - 1 - tl.arange(0, QUERIES)
    inside, own = row < query_count, key_count - query_count + row
    by_head = (lane.to(tl.int64) * query_count * HEADS + head) * WIDTH
    by_query = (lane * HEADS + head).to(tl.int64) * query_count
    bits += by_query * tl.cdiv(key_count, 32)
    key = start_of(key, lane, key_lane, head, key_head)
    value = start_of(value, lane, value_lane, head, value_head)
    relative = start_of(relative, lane, 0, head, relative_head)
    q_u = load_rows(content + by_head, row, HEADS * WIDTH, query_count, WIDTH, COLUMNS)
    q_v = load_rows(position + by_head, row, HEADS * WIDTH, query_count, WIDTH, COLUMNS)
    nearest, start, stop = keys_of(
        first + lane * query_count, row, begin, query_count, key_count, QUERIES, KEYS
    )
    place = query_count - begin - QUERIES + step  # rows of R in the low half for key 0
    most = tl.full([QUERIES], float("-inf"), tl.float32)
    total = tl.zeros([QUERIES], tl.float32)
    sums = tl.zeros([QUERIES, COLUMNS], tl.float32)
    for block in tl.range(start, stop, KEYS, disable_licm=True):
        column = block + step
        near = load_rows(relative, place + block, relative_row, key_count, WIDTH, COLUMNS)
        low = product(q_v, tl.trans(near), PRODUCT)
        far = load_rows(relative, place + block + KEYS, relative_row, key_count, WIDTH, COLUMNS)
        high = product(q_v, tl.trans(far), PRODUCT)
        k = load_rows(key, column, key_token, key_count, WIDTH, COLUMNS)
        score = product(q_u, tl.trans(k), PRODUCT) + turned(low, high, turn, KEYS, 1)
        seen = (column[None, :] >= nearest[:, None]) & (column[None, :] <= own[:, None])
        weight, shrink, most, total = softmax_step(score * (scale * LOG2_E), seen, most, total)
        if DROPS:
            keys = tl.zeros_like(row) + block
            weight *= _keep(bits, row, keys, key_count, inside, boost, KEYS, 1)
        x = load_rows(value, column, value_token, key_count, WIDTH, COLUMNS)
        sums = sums * shrink[:, None] + product(weight, x, PRODUCT)
    total = tl.where(inside, total, 1.0)
    sums = sums / total[:, None]
    store_rows(output + by_head, row, HEADS * WIDTH, query_count, sums, WIDTH, COLUMNS)
    tl.store(logs + by_query + row, most + tl.log2(total), mask=inside)


@triton.jit
def relative_backward_query(
    content,
    position,
    key,
    value,
    relative,
    first,
    output,
    d_output,
    logs,
    means,
    d_query,
    key_lane,
    key_token,
    key_head,
    value_lane,
    value_token,
    value_head,
    relative_row,
    relative_head,
    query_count,
    key_count,
    scale,
    bits,
    boost,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DROPS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """d_query of a block of queries, and the weights' mean of their gradients for the others."""
    begin, head, lane = tl.program_id(0) * QUERIES, tl.program_id(1), tl.program_id(2)
    step = tl.arange(0, KEYS)
    row, turn = begin + tl.arange(0, QUERIES), QUERIES - 1 - tl.arange(0, QUERIES)
    inside, own = row < query_count, key_count - query_count + row
    by_head = (lane.to(tl.int64) * query_count * HEADS + head) * WIDTH
    by_query = (lane * HEADS + head).to(tl.int64) * query_count
    bits += by_query * tl.cdiv(key_count, 32)
    key = start_of(key, lane, key_lane, head, key_head)
    value = start_of(value, lane, value_lane, head, value_head)
    relative = start_of(relative, lane, 0, head, relative_head)
    q_u = load_rows(content + by_head, row, HEADS * WIDTH, query_count, WIDTH, COLUMNS)
    q_v = load_rows(position + by_head, row, HEADS * WIDTH, query_count, WIDTH, COLUMNS)
    y = load_rows(output + by_head, row, HEADS * WIDTH, query_count, WIDTH, COLUMNS)
    dy = load_rows(d_output + by_head, row, HEADS * WIDTH, query_count, WIDTH, COLUMNS)
    log = tl.load(logs + by_query + row, mask=inside, other=0.0)
    mean = tl.sum(y * dy, axis=1)
    tl.store(means + by_query + row, mean, mask=inside)
    nearest, start, stop = keys_of(
        first + lane * query_count, row, begin, query_count, key_count, QUERIES, KEYS
    )
    place = query_count - begin - QUERIES + step
    dq = tl.zeros([QUERIES, COLUMNS], tl.float32)
    for block in tl.range(start, stop, KEYS, disable_licm=True):
        column = block + step
        near = load_rows(relative, place + block, relative_row, key_count, WIDTH, COLUMNS)
        low = product(q_v, tl.trans(near), PRODUCT)
        far = load_rows(relative, place + block + KEYS, relative_row, key_count, WIDTH, COLUMNS)
        high = product(q_v, tl.trans(far), PRODUCT)
        k = load_rows(key, column, key_token, key_count, WIDTH, COLUMNS)
        score = product(q_u, tl.trans(k), PRODUCT) + turned(low, high, turn, KEYS, 1)
        seen = (column[None, :] >= nearest[:, None]) & (column[None, :] <= own[:, None])
        weight = tl.where(seen, tl.exp2(score * (scale * LOG2_E) - log[:, None]), 0.0)
        x = load_rows(value, column, value_token, key_count, WIDTH, COLUMNS)
        d_weight = product(dy, tl.trans(x), PRODUCT)
        if DROPS:
            keys = tl.zeros_like(row) + block
            d_weight *= _keep(bits, row, keys, key_count, inside, boost, KEYS, 1)
        d_score = weight * (d_weight - mean[:, None])
        dq += product(d_score, k, PRODUCT)
        d_low, d_high = turned_back(d_score, turn, KEYS)
        dq += product(d_low, near, PRODUCT)
        dq += product(d_high, far, PRODUCT)
    store_rows(d_query + by_head, row, HEADS * WIDTH, query_count, dq * scale, WIDTH, COLUMNS)


# Below blocks are [keys, queries]: sums over queries stay where they are.


@triton.jit
def relative_backward_key(
    content,
    position,
    key,
    value,
    relative,
    first,
    ends,
    d_output,
    logs,
    means,
    d_key,
    d_value,
    d_u,
    key_lane,
    key_token,
    key_head,
    value_lane,
    value_token,
    value_head,
    relative_row,
    relative_head,
    query_count,
    key_count,
    scale,
    bits,
    boost,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DROPS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """d_key and d_value of a block of keys, over its queries, and its part of u's gradient."""
    begin, head, lane = tl.program_id(0) * KEYS, tl.program_id(1), tl.program_id(2)
    past, step = key_count - query_count, tl.arange(0, KEYS)
    column, turn = begin + step, QUERIES - 1 - tl.arange(0, QUERIES)
    by_head = (lane.to(tl.int64) * query_count * HEADS + head) * WIDTH
    by_query = (lane * HEADS + head).to(tl.int64) * query_count
    content, position, d_output = content + by_head, position + by_head, d_output + by_head
    bits += by_query * tl.cdiv(key_count, 32)
    key = start_of(key, lane, key_lane, head, key_head)
    value = start_of(value, lane, value_lane, head, value_head)
    relative = start_of(relative, lane, 0, head, relative_head)
    k = load_rows(key, column, key_token, key_count, WIDTH, COLUMNS)
    x = load_rows(value, column, value_token, key_count, WIDTH, COLUMNS)
    dk = tl.zeros([KEYS, COLUMNS], tl.float32)
    dx = tl.zeros([KEYS, COLUMNS], tl.float32)
    over_queries = tl.zeros([KEYS], tl.float32)
    start = tl.maximum(0, begin - past) // QUERIES * QUERIES
    stop = tl.load(ends + lane * key_count + tl.minimum(begin + KEYS, key_count) - 1)
    for block in tl.range(start, stop, QUERIES, disable_licm=True):
        row = block + tl.arange(0, QUERIES)
        inside = row < query_count
        q_v = load_rows(position, row, HEADS * WIDTH, query_count, WIDTH, COLUMNS)
        place = query_count - block - QUERIES + begin + step
        r = load_rows(relative, place, relative_row, key_count, WIDTH, COLUMNS)
        low = product(r, tl.trans(q_v), PRODUCT)
        r = load_rows(relative, place + KEYS, relative_row, key_count, WIDTH, COLUMNS)
        high = product(r, tl.trans(q_v), PRODUCT)
        q_u = load_rows(content, row, HEADS * WIDTH, query_count, WIDTH, COLUMNS)
        score = product(k, tl.trans(q_u), PRODUCT) + turned(low, high, turn, KEYS, 0)
        log = tl.load(logs + by_query + row, mask=inside, other=0.0)
        mean = tl.load(means + by_query + row, mask=inside, other=0.0)
        nearest = tl.load(first + lane * query_count + row, mask=inside, other=key_count)
        seen = (column[:, None] >= nearest[None, :]) & (column[:, None] <= past + row[None, :])
        weight = tl.where(seen, tl.exp2(score * (scale * LOG2_E) - log[None, :]), 0.0)
        dy = load_rows(d_output, row, HEADS * WIDTH, query_count, WIDTH, COLUMNS)
        d_weight, kept = product(x, tl.trans(dy), PRODUCT), weight
        if DROPS:
            keys = tl.zeros_like(row) + begin
            keep = _keep(bits, row, keys, key_count, inside, boost, KEYS, 0)
            d_weight, kept = d_weight * keep, weight * keep
        dx += product(kept, dy, PRODUCT)
        d_score = weight * (d_weight - mean[None, :])
        dk += product(d_score, q_u, PRODUCT)
        over_queries += tl.sum(d_score, axis=1)
    by_head = (lane.to(tl.int64) * key_count * HEADS + head) * WIDTH
    store_rows(d_key + by_head, column, HEADS * WIDTH, key_count, dk * scale, WIDTH, COLUMNS)
    store_rows(d_value + by_head, column, HEADS * WIDTH, key_count, dx, WIDTH, COLUMNS)
    _store_bias(d_u, tl.sum(over_queries[:, None] * k, axis=0) * scale, HEADS, WIDTH, COLUMNS)


@triton.jit
def relative_backward_relative(
    content,
    position,
    key,
    value,
    relative,
    first,
    d_output,
    logs,
    means,
    d_relative,
    d_v,
    key_lane,
    key_token,
    key_head,
    value_lane,
    value_token,
    value_head,
    relative_row,
    relative_head,
    query_count,
    key_count,
    scale,
    bits,
    boost,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    QUERIES: tl.constexpr,
    KEYS: tl.constexpr,
    DROPS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """One lane's gradient of a block of rows of R, and its part of v's: keys turn to distances.

    Query i meets row m at key i + m - (query_count - 1).
    """
    begin, head, lane = tl.program_id(0) * KEYS, tl.program_id(1), tl.program_id(2)
    step, turn = tl.arange(0, KEYS), tl.arange(0, QUERIES)
    place = begin + step
    by_head = (lane.to(tl.int64) * query_count * HEADS + head) * WIDTH
    by_query = (lane * HEADS + head).to(tl.int64) * query_count
    content, position, d_output = content + by_head, position + by_head, d_output + by_head
    bits += by_query * tl.cdiv(key_count, 32)
    key = start_of(key, lane, key_lane, head, key_head)
    value = start_of(value, lane, value_lane, head, value_head)
    relative = start_of(relative, lane, 0, head, relative_head)
    r = load_rows(relative, place, relative_row, key_count, WIDTH, COLUMNS)
    dr = tl.zeros([KEYS, COLUMNS], tl.float32)
    over_queries = tl.zeros([KEYS], tl.float32)
    start = tl.maximum(0, query_count - begin - KEYS) // QUERIES * QUERIES
    for block in tl.range(start, query_count, QUERIES, disable_licm=True):
        row = block + turn
        inside = row < query_count
        column = block + begin - (query_count - 1) + step  # keys of the first query
        q_u = load_rows(content, row, HEADS * WIDTH, query_count, WIDTH, COLUMNS)
        k = load_rows(key, column, key_token, key_count, WIDTH, COLUMNS)
        low = product(k, tl.trans(q_u), PRODUCT)
        k = load_rows(key, column + KEYS, key_token, key_count, WIDTH, COLUMNS)
        high = product(k, tl.trans(q_u), PRODUCT)
        q_v = load_rows(position, row, HEADS * WIDTH, query_count, WIDTH, COLUMNS)
        score = product(r, tl.trans(q_v), PRODUCT) + turned(low, high, turn, KEYS, 0)
        log = tl.load(logs + by_query + row, mask=inside, other=0.0)
        mean = tl.load(means + by_query + row, mask=inside, other=0.0)
        nearest = tl.load(first + lane * query_count + row, mask=inside, other=key_count)
        at = column[:, None] + turn[None, :]
        seen = (at >= nearest[None, :]) & (place < key_count)[:, None]
        weight = tl.where(seen, tl.exp2(score * (scale * LOG2_E) - log[None, :]), 0.0)
        dy = load_rows(d_output, row, HEADS * WIDTH, query_count, WIDTH, COLUMNS)
        x = load_rows(value, column, value_token, key_count, WIDTH, COLUMNS)
        low = product(x, tl.trans(dy), PRODUCT)
        x = load_rows(value, column + KEYS, value_token, key_count, WIDTH, COLUMNS)
        high = product(x, tl.trans(dy), PRODUCT)
        d_weight = turned(low, high, turn, KEYS, 0)
        if DROPS:
            keys = begin + row - (query_count - 1)
            d_weight *= _keep(bits, row, keys, key_count, inside, boost, KEYS, 0, False)
        d_score = weight * (d_weight - mean[None, :])
        dr += product(d_score, q_v, PRODUCT)
        over_queries += tl.sum(d_score, axis=1)
    d_relative += (lane.to(tl.int64) * key_count * HEADS + head) * WIDTH
    store_rows(d_relative, place, HEADS * WIDTH, key_count, dr * scale, WIDTH, COLUMNS)
    _store_bias(d_v, tl.sum(over_queries[:, None] * r, axis=0) * scale, HEADS, WIDTH, COLUMNS)


@triton.jit
def _store_bias(to, x, HEADS: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """A program's part x [COLUMNS] of a bias's gradient, into [lanes, blocks, H, w]."""
    at = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)) * HEADS + tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    tl.store(to + at.to(tl.int64) * WIDTH + column, x, mask=column < WIDTH)
