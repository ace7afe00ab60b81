"""The feedback in front of the layers: RMSNorm of the state fed back, and the gated merge.

A chunk k of each lane is fed h: the learned state at a document's start, the output before its
first token, or the boundary state that was carried in. With r = h / rms(h) and (g, v) = r W^T, its
tokens are given e + alpha sigmoid(gate_e + g) v. k stands in memory, so that one launch, recorded,
serves all chunks; `facts` are int32 [3, K, B]: the first token, whether the chunk is fresh, whether
it starts a document. Tapes are float32, workspaces of products are of their type.

Floors on an H200 (4.8 TB/s), for B lanes, C tokens of a chunk, d' of d columns, p bytes of a
product's number. At 48 + 48 (B = 8, C = 1, d = d' = 2048, bfloat16):

- `boundary_norm`: B d (8 + p) bytes; 164 kB, 0.03 us.
- `merge`: gate_e, g and v come, g and v and what is added go: B d' (4 C + 2 p + 8 + 4 C) bytes;
  328 kB, 0.07 us.
- `merge_backward`: du, gate_e, g and v come, dgate_e and twice dg and dv go:
  B d' (8 C + 8 + 4 C + 8 + 2 p) bytes; 524 kB, 0.11 us.
- `boundary_norm_backward`: dr and r come, one gradient is added to: B d (p + 4 + 8) bytes; 229 kB,
  0.05 us.

All of it lies in the cache, and each is launched once a chunk, not once a layer.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from rlt_dist.ops.triton.build import Build
from rlt_dist.ops.triton.launch import launch
from rlt_dist.ops.triton.shapes import Shapes
from rlt_dist.ops.triton.tiles import some_columns, whole_row

_COLUMNS = 256
"""Columns of a program where columns do not meet."""


@triton.jit
def _fed_by(chunk, facts, chunks, lane, LANES: tl.constexpr):
    """Where a lane's facts of a chunk lie, and the facts: see above."""
    at = tl.load(chunk) * LANES + lane
    first = tl.load(facts + at).to(tl.int64)
    fresh = tl.load(facts + chunks * LANES + at)
    return at, first, fresh, tl.load(facts + 2 * chunks * LANES + at)


@triton.jit
def _boundary_norm(
    chunk,
    facts,
    s,
    initial,
    boundary,
    r_to,
    r_tape,
    scale_tape,
    eps,
    chunks,
    D: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    at, first, fresh, start = _fed_by(chunk, facts, chunks, lane, LANES)
    column = tl.arange(0, BLOCK)
    inside, own = column < D, lane * D + column
    # Two of the three are zeros. (The interpreter cannot take one truth for a block's.)
    h = tl.load(initial + own, column < D * fresh * start, 0.0).to(tl.float32)
    h += tl.load(s + first * LANES * D + own, column < D * fresh * (1 - start), 0.0)
    h += tl.load(boundary + own, column < D * (1 - fresh), 0.0)
    scale = tl.rsqrt(tl.sum(h * h, axis=0) / D + eps)
    r = h * scale
    tl.store(r_to + own, r.to(r_to.dtype.element_ty), inside)
    tl.store(r_tape + at * D + column, r, inside)
    tl.store(scale_tape + at, scale)


def boundary_norm(
    chunk: Tensor,
    facts: Tensor,
    s: Tensor,
    initial: Tensor,
    boundary: Tensor,
    r: Tensor,
    tape: tuple[Tensor, Tensor],
    eps: float,
) -> None:
    """r = h / rms(h) of chunk k.

    Args:
        chunk: int64 [1], k.
        facts: int32 [3, K, B], see above.
        s: float32 [T + 2, B, d], slot 0 the output before the segment.
        initial, boundary: float32 [B, d].
        r: [B, d] in the type of products, written.
        tape: r [K, B, d] and 1 / rms(h) [K, B, 1], float32, written at k.
    """
    lanes, d = r.shape
    launch(
        _boundary_norm,
        (lanes,),
        *(chunk, facts, s, initial, boundary, r, *tape, eps, facts.shape[1]),
        **whole_row(d),
        D=d,
        LANES=lanes,
    )


@triton.jit
def _merge(
    index,
    chunk,
    gate_e,
    fed,
    fed_tape,
    added,
    alpha,
    D: tl.constexpr,
    OWN: tl.constexpr,
    START: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lane = row % LANES
    place = tl.load(index + row) * LANES + lane
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own = column - START
    here = (own >= 0) & (own < OWN)
    gate_h = tl.load(fed + lane * 2 * OWN + own, here, 0.0).to(tl.float32)
    value = tl.load(fed + lane * 2 * OWN + OWN + own, here, 0.0).to(tl.float32)
    gate = tl.sigmoid(tl.load(gate_e + place * OWN + own, here, 0.0).to(tl.float32) + gate_h)
    tl.store(added + row * D + column, alpha * gate * value, column < D)
    if row < LANES:
        at = (tl.load(chunk) * LANES + lane) * 2 * OWN + own
        tl.store(fed_tape + at, gate_h, here)
        tl.store(fed_tape + at + OWN, value, here)


def merge(
    index: Tensor,
    chunk: Tensor,
    gate_e: Tensor,
    fed: Tensor,
    fed_tape: Tensor,
    added: Tensor,
    start: int,
    alpha: float,
) -> None:
    """alpha sigmoid(gate_e + g) v, in the d' columns from `start` on; zeros in the others.

    Args:
        index: int64 [C, B], slots of the rows.
        chunk: int64 [1], k.
        gate_e: float32 [T + 1, B, d'].
        fed: [B, 2 d'], g before v, in the type of products.
        fed_tape: float32 [K, B, 2 d'], the same, written at k.
        added: float32 [C B, d], written.
    """
    d = added.shape[-1]
    constants = some_columns(d, _COLUMNS)
    launch(
        _merge,
        (index.numel(), triton.cdiv(d, constants["BLOCK"])),
        *(index, chunk, gate_e, fed, fed_tape, added, alpha),
        **constants,
        D=d,
        OWN=gate_e.shape[-1],
        START=start,
        LANES=index.shape[1],
    )


@triton.jit
def _merge_backward(
    index,
    chunk,
    du,
    gate_e,
    fed_tape,
    dgate_e,
    dfed,
    dfed_tape,
    alpha,
    rows,
    padding,
    D: tl.constexpr,
    OWN: tl.constexpr,
    START: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    own = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    here = own < OWN
    at = (tl.load(chunk) * LANES + lane) * 2 * OWN + own
    gate_h = tl.load(fed_tape + at, here, 0.0).to(tl.float32)
    value = tl.load(fed_tape + at + OWN, here, 0.0).to(tl.float32)
    sum_gate, sum_value = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for first in range(0, rows, LANES):
        row = first + lane
        slot = tl.load(index + row)
        is_token = own < tl.where(slot < padding, OWN, 0)
        place = (slot * LANES + lane) * OWN + own
        gate = tl.sigmoid(tl.load(gate_e + place, is_token, 0.0).to(tl.float32) + gate_h)
        d = tl.load(du + row * D + START + own, is_token, 0.0).to(tl.float32)
        d_value = alpha * d * gate
        d_gate = d_value * value * (1 - gate)
        tl.store(dgate_e + place, d_gate, is_token)
        sum_gate += d_gate
        sum_value += d_value
    tl.store(dfed_tape + at, sum_gate, here)
    tl.store(dfed_tape + at + OWN, sum_value, here)
    to = dfed + lane * 2 * OWN + own
    tl.store(to, sum_gate.to(dfed.dtype.element_ty), here)
    tl.store(to + OWN, sum_value.to(dfed.dtype.element_ty), here)


def merge_backward(
    index: Tensor,
    chunk: Tensor,
    du: Tensor,
    gate_e: Tensor,
    fed_tape: Tensor,
    dgate_e: Tensor,
    dfed: Tensor,
    dfed_tape: Tensor,
    start: int,
    alpha: float,
) -> None:
    """The gradient of `merge` with respect to gate_e and, added over a chunk's tokens, g and v.

    Args:
        index, chunk, gate_e, fed_tape, start: as for `merge`.
        du: float32 [C B, d], the gradient of what was added.
        dgate_e: float32 [T + 1, B, d'], written at the chunk's tokens.
        dfed, dfed_tape: [B, 2 d'] in the type of products, and float32 [K, B, 2 d']; written.
    """
    constants = some_columns(own := gate_e.shape[-1], _COLUMNS)
    launch(
        _merge_backward,
        (index.shape[1], triton.cdiv(own, constants["BLOCK"])),
        *(index, chunk, du, gate_e, fed_tape, dgate_e, dfed, dfed_tape, alpha),
        *(index.numel(), len(gate_e) - 1),
        **constants,
        D=du.shape[-1],
        OWN=own,
        START=start,
        LANES=index.shape[1],
    )


@triton.jit
def _boundary_norm_backward(
    chunk,
    facts,
    dr,
    r_tape,
    scale_tape,
    ds,
    dinitial,
    dboundary,
    chunks,
    D: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    lane = tl.program_id(0).to(tl.int64)
    at, first, fresh, start = _fed_by(chunk, facts, chunks, lane, LANES)
    column = tl.arange(0, BLOCK)
    inside, own = column < D, lane * D + column
    d = tl.load(dr + own, inside, 0.0).to(tl.float32)
    r = tl.load(r_tape + at * D + column, inside, 0.0).to(tl.float32)
    dh = tl.load(scale_tape + at) * (d - r * (tl.sum(d * r, axis=0) / D))
    to = dinitial + own
    if fresh == 0:
        to = dboundary + own
    elif start == 0:
        to = ds + first * LANES * D + own
    tl.store(to, tl.load(to, inside, 0.0) + dh, inside)


def boundary_norm_backward(
    chunk: Tensor,
    facts: Tensor,
    dr: Tensor,
    tape: tuple[Tensor, Tensor],
    ds: Tensor,
    dinitial: Tensor,
    dboundary: Tensor,
) -> None:
    """Add the gradient of chunk k's h to that of what it came from.

    Args:
        chunk, facts, tape: as for `boundary_norm`.
        dr: [B, d].
        ds: float32 [T + 2, B, d].
        dinitial, dboundary: float32 [B, d].
    """
    lanes, d = dr.shape
    launch(
        _boundary_norm_backward,
        (lanes,),
        *(chunk, facts, dr, *tape, ds, dinitial, dboundary, facts.shape[1]),
        **whole_row(d),
        D=d,
        LANES=lanes,
    )


def builds(shapes: Shapes) -> Iterator[Build]:
    """At a chunk of any length, whole columns."""
    if shapes.model != "rlt":
        return
    d, product, tape, place = shapes.d, f"*{shapes.dtype}", "*fp32", "*i64"
    row, columns, lanes = whole_row(d), some_columns(d, _COLUMNS), {"LANES": shapes.lanes}
    of_row = {"D": d, "BLOCK": row["BLOCK"], **lanes}
    of_columns = {"D": d, "OWN": d, "START": 0, "BLOCK": columns["BLOCK"], **lanes}
    facts = {"chunk": place, "facts": "*i32"}
    forward = {**facts, "s": tape, "initial": tape, "boundary": tape, "r_to": product}
    forward |= {"r_tape": tape, "scale_tape": tape, "eps": "fp32", "chunks": "i32"}
    yield Build("boundary_norm", _boundary_norm, forward, of_row, row["warps"])
    forward = {"index": place, "chunk": place, "gate_e": tape, "fed": product, "fed_tape": tape}
    forward |= {"added": tape, "alpha": "fp32"}
    yield Build("merge", _merge, forward, of_columns, columns["warps"])
    backward = {"index": place, "chunk": place, "du": tape, "gate_e": tape, "fed_tape": tape}
    backward |= {"dgate_e": tape, "dfed": product, "dfed_tape": tape, "alpha": "fp32"}
    backward |= {"rows": "i32", "padding": "i32"}
    yield Build("merge_backward", _merge_backward, backward, of_columns, columns["warps"])
    backward = {**facts, "dr": product, "r_tape": tape, "scale_tape": tape, "ds": tape}
    backward |= {"dinitial": tape, "dboundary": tape, "chunks": "i32"}
    name = "boundary_norm_backward"
    yield Build(name, _boundary_norm_backward, backward, of_row, row["warps"])
