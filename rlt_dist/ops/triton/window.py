"""Attention of a chunk's tokens to the window: each sees W entries, its own the last.

Entries stand in one array [W + T, B, 2, KV, w], key before value: W - 1 that were carried in, then
the tokens', so that the token in slot t sees entries t .. t + W - 1. A token's own entry and those
of others of its chunk are made here: nobody waits for them to be written, each program takes them
from the projections, under their rotary. Backward has two launches: one by token makes d_score and
dq, one by entry adds up what the chunk's tokens give to it, in a fixed order, after which the
entries of the chunk itself are complete, for later chunks have gone before.

Letters as in `recurrence`: C tokens, B lanes, H query heads and KV key/value heads of width w.
Tapes are float32, workspaces of products are of their type.

Floors for p bytes of a product's number, N = C B rows; `rlt-dist kernels list` has the numbers of a
configuration:

- `window_forward`: q, k and v come, W - 1 entries are read, an entry, q, weights and the result go:
  N ((H + 2 KV) w p + 8 KV (W - 1) w + 8 KV w + H w (4 + p)) bytes.
- `window_backward`: dv, q, weights and W entries come, d_score, dq twice and the result go:
  N (H w p + 4 H w + 8 KV W w + H w (8 + p)) bytes; and W entries' gradients are
  added to, one goes on: N (16 KV W w + KV w (8 + 2 p)) bytes.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from rlt_dist.ops.triton.build import Build
from rlt_dist.ops.triton.launch import launch
from rlt_dist.ops.triton.shapes import Shapes


@triton.jit
def _turned(base, cos, sin, place, column, inside, WIDTH: tl.constexpr):
    """Numbers at `column` of a head, under the rotary of the tokens in `place`."""
    half: tl.constexpr = WIDTH // 2
    x = tl.load(base + column, inside, 0.0).to(tl.float32)
    other = tl.load(base + (column + half) % WIDTH, inside, 0.0).to(tl.float32)
    other = tl.where(column < half, -other, other)
    angle = place * half + column % half
    return x * tl.load(cos + angle, inside, 0.0) + other * tl.load(sin + angle, inside, 0.0)


@triton.jit
def _window_forward(
    index,
    qkv,
    cos,
    sin,
    nearest,
    entries,
    query_tape,
    weight_tape,
    attended,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane, token = row % LANES, row // LANES
    slot = tl.load(index + row)
    place = slot * LANES + lane
    group = head // (HEADS // KV_HEADS)
    stride: tl.constexpr = (HEADS + 2 * KV_HEADS) * WIDTH
    column, seen = tl.arange(0, COLUMNS), tl.arange(0, SLOTS)
    inside, there = column < WIDTH, seen < WINDOW
    q = _turned(qkv + row * stride + head * WIDTH, cos, sin, place, column, inside, WIDTH)
    tl.store(query_tape + (place * HEADS + head) * WIDTH + column, q, inside)

    # Entries of this chunk are in its projections, those before it in the array.
    source = token - (WINDOW - 1) + seen
    is_own = there & (source >= 0)
    both = inside[None, :]
    at = source * LANES + lane
    own = qkv + (at * stride + (HEADS + group) * WIDTH)[:, None]
    places = (tl.load(index + at, is_own, 0) * LANES + lane)[:, None]
    new = is_own[:, None] & both
    k = _turned(own, cos, sin, places, column[None, :], new, WIDTH)
    v = tl.load(own + KV_HEADS * WIDTH + column[None, :], new, 0.0).to(tl.float32)
    heads = ((slot + seen) * LANES + lane) * 2 * KV_HEADS + group
    old_k = entries + (heads * WIDTH)[:, None] + column[None, :]
    old = (there & (source < 0))[:, None] & both
    k += tl.load(old_k, old, 0.0).to(tl.float32)
    v += tl.load(old_k + KV_HEADS * WIDTH, old, 0.0).to(tl.float32)
    if head % (HEADS // KV_HEADS) == 0:
        mine = (seen == WINDOW - 1)[:, None] & both
        tl.store(old_k, k, mine)
        tl.store(old_k + KV_HEADS * WIDTH, v, mine)

    score = tl.sum(q[None, :] * k, axis=1)
    near = there & (seen >= tl.load(nearest + place))
    score = tl.where(near, score, float("-inf"))
    weight = tl.exp(score - tl.max(score, axis=0))
    weight = weight / tl.sum(weight, axis=0)
    tl.store(weight_tape + (place * HEADS + head) * WINDOW + seen, weight, there)
    out = tl.sum(weight[:, None] * v, axis=0)
    to = attended + (row * HEADS + head) * WIDTH + column
    tl.store(to, out.to(attended.dtype.element_ty), inside)


def window_forward(
    index: Tensor,
    qkv: Tensor,
    tables: tuple[Tensor, Tensor],
    nearest: Tensor,
    entries: Tensor,
    tape: tuple[Tensor, Tensor],
    attended: Tensor,
) -> None:
    """softmax(q k) v over each token's window, q and k under their rotary.

    Args:
        index: int64 [C, B], slots of the tokens: consecutive, the last ones maybe padding.
        qkv: [C B, (H + 2 KV) w], with 1 / sqrt(w) in q.
        tables: cosine and sine, float32 [T + 1, B, 1, w / 2].
        nearest: int32 [T + 1, B], the first of its W entries that a token sees.
        entries: float32 [W + T, B, 2, KV, w]; the tokens' own are written.
        tape: the query under its rotary [T + 1, B, H, w] and weights [T + 1, B, H, W]; float32,
            written.
        attended: [C B, H w], written.
    """
    heads, window = tape[1].shape[2:]
    launch(
        _window_forward,
        (index.numel(), heads),
        *(index, qkv, *tables, nearest, entries, *tape, attended),
        **_constants(index.shape[1], heads, entries.shape[3], entries.shape[4], window),
    )


@triton.jit
def _window_backward(
    index,
    d_attended,
    cos,
    sin,
    entries,
    weight_tape,
    d_score,
    attended_tape,
    d_qkv,
    d_qkv_tape,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    WINDOW: tl.constexpr,
    SLOTS: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    lane = row % LANES
    slot = tl.load(index + row)
    place = slot * LANES + lane
    group = head // (HEADS // KV_HEADS)
    half: tl.constexpr = WIDTH // 2
    column, seen = tl.arange(0, COLUMNS), tl.arange(0, SLOTS)
    inside, there = column < WIDTH, seen < WINDOW
    both = there[:, None] & inside[None, :]
    heads = ((slot + seen) * LANES + lane) * 2 * KV_HEADS + group
    keys = entries + (heads * WIDTH)[:, None]
    v = tl.load(keys + KV_HEADS * WIDTH + column[None, :], both, 0.0).to(tl.float32)
    d = tl.load(d_attended + (row * HEADS + head) * WIDTH + column, inside, 0.0).to(tl.float32)
    weight = tl.load(weight_tape + (place * HEADS + head) * WINDOW + seen, there, 0.0)
    d_weight = tl.sum(d[None, :] * v, axis=1)
    d_scores = weight * (d_weight - tl.sum(weight * d_weight, axis=0))
    tl.store(d_score + (row * HEADS + head) * WINDOW + seen, d_scores, there)
    out = tl.sum(weight[:, None] * v, axis=0)
    tl.store(attended_tape + (place * HEADS + head) * WIDTH + column, out, inside)

    k = tl.load(keys + column[None, :], both, 0.0).to(tl.float32)
    other = tl.load(keys + ((column + half) % WIDTH)[None, :], both, 0.0).to(tl.float32)
    dq = tl.sum(d_scores[:, None] * k, axis=0)
    turned = tl.sum(d_scores[:, None] * other, axis=0)
    turned = tl.where(column < half, turned, -turned)
    angle = place * half + column % half
    dq = dq * tl.load(cos + angle, inside, 0.0) + turned * tl.load(sin + angle, inside, 0.0)
    stride: tl.constexpr = (HEADS + 2 * KV_HEADS) * WIDTH
    to = head * WIDTH + column
    tl.store(d_qkv + row * stride + to, dq.to(d_qkv.dtype.element_ty), inside)
    tl.store(d_qkv_tape + place * stride + to, dq, inside)


@triton.jit
def _load_halves(base, half: tl.constexpr, inside):
    low = tl.load(base, inside, 0.0).to(tl.float32)
    return low, tl.load(base + half, inside, 0.0).to(tl.float32)


@triton.jit
def _store_halves(base, half: tl.constexpr, low, high, inside):
    tl.store(base, low.to(base.dtype.element_ty), inside)
    tl.store(base + half, high.to(base.dtype.element_ty), inside)


@triton.jit
def _window_entries(
    index,
    d_attended,
    cos,
    sin,
    query_tape,
    weight_tape,
    d_score,
    dentries,
    d_qkv,
    d_qkv_tape,
    tokens,
    padding,
    LANES: tl.constexpr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    HALF: tl.constexpr,
    WINDOW: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    entry = tl.program_id(0)
    lane, group = (tl.program_id(1) // KV_HEADS).to(tl.int64), tl.program_id(1) % KV_HEADS
    half: tl.constexpr = WIDTH // 2
    column, member = tl.arange(0, HALF), tl.arange(0, MEMBERS)
    together: tl.constexpr = HEADS // KV_HEADS
    head = group * together + member

    # Padding stands behind a lane's tokens: without the first that sees the entry, none sees it.
    earliest = tl.maximum(entry - (WINDOW - 1), 0)
    used = tl.load(index + earliest * LANES + lane) < padding
    inside, gets = column < half, column < tl.where(used, half, 0)
    at = (tl.load(index + lane) + entry) * LANES + lane
    dk = dentries + (at * 2 * KV_HEADS + group) * WIDTH + column
    dv = dk + KV_HEADS * WIDTH
    low_k, high_k = _load_halves(dk, half, gets)
    low_v, high_v = _load_halves(dv, half, gets)
    for token in range(earliest, tl.minimum(entry + 1, tokens)):
        row = token * LANES + lane
        slot = tl.load(index + row)
        here, kept = row * HEADS + head, (slot * LANES + lane) * HEADS + head
        gives = member < tl.where(slot < padding, together, 0)
        both = gives[:, None] & inside[None, :]
        score = tl.load(d_score + here * WINDOW + entry - token, gives, 0.0)[:, None]
        weight = tl.load(weight_tape + kept * WINDOW + entry - token, gives, 0.0)[:, None]
        low, high = _load_halves(query_tape + kept[:, None] * WIDTH + column[None, :], half, both)
        low_k, high_k = low_k + tl.sum(score * low, 0), high_k + tl.sum(score * high, 0)
        low, high = _load_halves(d_attended + here[:, None] * WIDTH + column[None, :], half, both)
        low_v, high_v = low_v + tl.sum(weight * low, 0), high_v + tl.sum(weight * high, 0)
    _store_halves(dk, half, low_k, high_k, gets)
    _store_halves(dv, half, low_v, high_v, gets)

    if entry >= WINDOW - 1:  # the chunk's own, complete now
        row = earliest * LANES + lane
        place = tl.load(index + row) * LANES + lane
        c = tl.load(cos + place * half + column, inside, 0.0)
        s = tl.load(sin + place * half + column, inside, 0.0)
        low, high = low_k * c + high_k * s, high_k * c - low_k * s
        stride: tl.constexpr = (HEADS + 2 * KV_HEADS) * WIDTH
        of_key = (HEADS + group) * WIDTH + column
        of_value = of_key + KV_HEADS * WIDTH
        _store_halves(d_qkv + row * stride + of_key, half, low, high, inside)
        _store_halves(d_qkv + row * stride + of_value, half, low_v, high_v, inside)
        _store_halves(d_qkv_tape + place * stride + of_key, half, low, high, inside)
        _store_halves(d_qkv_tape + place * stride + of_value, half, low_v, high_v, inside)


def window_backward(
    index: Tensor,
    d_attended: Tensor,
    tables: tuple[Tensor, Tensor],
    entries: Tensor,
    kept: tuple[Tensor, Tensor],
    d_score: Tensor,
    dentries: Tensor,
    d_qkv: Tensor,
    tape: tuple[Tensor, Tensor],
) -> None:
    """The gradient of `window_forward` with respect to qkv and to the entries before the chunk.

    Args:
        index, tables, entries: as in forward.
        d_attended: [C B, H w].
        kept: what forward left on the tape.
        d_score: float32 [C B, H, W], room between the launches.
        dentries: float32 [W + T, B, 2, KV, w], added to; later tokens must have gone before.
        d_qkv: [C B, (H + 2 KV) w], written.
        tape: the attended [T + 1, B, H w] and d_qkv [T + 1, B, (H + 2 KV) w]; float32, written.
    """
    tokens, lanes = index.shape
    (query_tape, weight_tape), (attended_tape, d_qkv_tape) = kept, tape
    heads, window = weight_tape.shape[2:]
    kv_heads, width = entries.shape[3:]
    launch(
        _window_backward,
        (index.numel(), heads),
        *(index, d_attended, *tables, entries, weight_tape, d_score, attended_tape),
        *(d_qkv, d_qkv_tape),
        **_constants(lanes, heads, kv_heads, width, window),
    )
    launch(
        _window_entries,
        (tokens + window - 1, lanes * kv_heads),
        *(index, d_attended, *tables, query_tape, weight_tape, d_score, dentries),
        *(d_qkv, d_qkv_tape, tokens, len(query_tape) - 1),
        **_constants_of_entries(lanes, heads, kv_heads, width, window),
    )


def _constants(lanes: int, heads: int, kv_heads: int, width: int, window: int) -> dict[str, int]:
    sizes = {"LANES": lanes, "HEADS": heads, "KV_HEADS": kv_heads, "WIDTH": width}
    sizes |= {"WINDOW": window, "SLOTS": triton.next_power_of_2(window)}
    return sizes | {"COLUMNS": triton.next_power_of_2(width)}


def _constants_of_entries(
    lanes: int, heads: int, kv_heads: int, width: int, window: int
) -> dict[str, int]:
    sizes = {"LANES": lanes, "HEADS": heads, "KV_HEADS": kv_heads, "WIDTH": width}
    sizes |= {"WINDOW": window, "HALF": triton.next_power_of_2(width // 2)}
    return sizes | {"MEMBERS": triton.next_power_of_2(heads // kv_heads)}


def builds(shapes: Shapes) -> Iterator[Build]:
    """At a chunk of any length."""
    if shapes.model != "rlt":
        return
    product, tape, place = f"*{shapes.dtype}", "*fp32", "*i64"
    sizes = (shapes.lanes, shapes.heads, shapes.kv_heads, shapes.width, shapes.window)
    constants = _constants(*sizes)
    tables = {"cos": tape, "sin": tape}
    forward = {"index": place, "qkv": product, **tables, "nearest": "*i32", "entries": tape}
    forward |= {"query_tape": tape, "weight_tape": tape, "attended": product}
    yield Build("window_forward", _window_forward, forward, constants)
    backward = {"index": place, "d_attended": product, **tables, "entries": tape}
    backward |= {"weight_tape": tape, "d_score": tape, "attended_tape": tape}
    backward |= {"d_qkv": product, "d_qkv_tape": tape}
    yield Build("window_backward", _window_backward, backward, constants)
    one, counted = ({"tokens": 1}, {}) if shapes.chunk == 1 else ({}, {"tokens": "i32"})
    entries = {"index": place, "d_attended": product, **tables, "query_tape": tape}
    entries |= {"weight_tape": tape, "d_score": tape, "dentries": tape}
    entries |= {"d_qkv": product, "d_qkv_tape": tape, **counted, "padding": "i32"}
    constants = _constants_of_entries(*sizes) | one
    yield Build("window_entries", _window_entries, entries, constants)
