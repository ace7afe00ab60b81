"""What stands around a sublayer's products: the residual with the next sublayer's RMSNorm, and
SwiGLU's product.

Rows are the C B tokens of a chunk, token first. `place` is where a row stands on a tape, buffers
[T + 1, B, ...]; workspaces [C B, ...] have the rows in order. Tapes are float32, workspaces of
products are of their type; arithmetic is float32.

Floors on an H200 (4.8 TB/s), for N rows of d and f numbers, p bytes of a product's number. At
48 + 48 (d 2048, f 5461, bfloat16, N = 8):

- `residual_norm`: x and the sublayer's output come, x and n twice go: N d (12 + 2 p) bytes;
  262 kB, 0.05 us.
- `residual_norm_backward`: dy, dn and n come, dy and d_out twice go: N d (16 + 2 p) bytes; 328 kB,
  0.07 us.
- `swiglu`: 2 f come and go to the tape, f go: N f (8 + 3 p) bytes; 612 kB, 0.13 us.
- `swiglu_backward`: f and 2 f come, 2 f go twice: N f (16 + 3 p) bytes; 961 kB, 0.20 us.

All of it lies in the cache, and each is launched once a sublayer: what they cost is the launch.
"""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from rlt_dist.ops.triton.build import Build
from rlt_dist.ops.triton.launch import launch
from rlt_dist.ops.triton.shapes import Shapes
from rlt_dist.ops.triton.tiles import some_columns, whole_row

_COLUMNS = 1024
"""Columns of a program where columns do not meet."""


@triton.jit
def _residual_norm(
    index,
    source,
    out,
    mask,
    x_to,
    y_tape,
    n_to,
    n_tape,
    scale_tape,
    eps,
    D: tl.constexpr,
    LANES: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(index + row) * LANES + row % LANES
    column = tl.arange(0, BLOCK)
    inside = column < D
    here, there = row * D + column, place * D + column
    x = tl.load(source + (there if GATHER else here), inside, 0.0).to(tl.float32)
    if out is not None:
        added = tl.load(out + here, inside, 0.0).to(tl.float32)
        if mask is not None:
            added *= tl.load(mask + there, inside, 0.0).to(tl.float32)
        x += added
    if x_to is not None:
        tl.store(x_to + here, x, inside)
    if y_tape is not None:
        tl.store(y_tape + there, x, inside)
    if n_to is not None:
        scale = tl.rsqrt(tl.sum(x * x, axis=0) / D + eps)
        n = x * scale
        tl.store(n_to + here, n.to(n_to.dtype.element_ty), inside)
        tl.store(n_tape + there, n, inside)
        tl.store(scale_tape + place, scale)


def residual_norm(
    index: Tensor,
    source: Tensor,
    out: Tensor | None,
    mask: Tensor | None,
    x: Tensor,
    norm: tuple[Tensor, Tensor, Tensor] | Tensor,
    eps: float = 0.0,
) -> None:
    """x = source + mask * out; and n = x / rms(x), or x onto a tape.

    Args:
        index: int64 [C, B], slots of the rows.
        source: [C B, d], which may be `x`, or a tape's [T + 1, B, d]; float32.
        out: [C B, d]; None: nothing is added.
        mask: [T + 1, B, d], a scaled dropout mask.
        x: float32 [C B, d], written.
        norm: n [C B, d] in the type of products, n [T + 1, B, d] and 1 / rms(x) [T + 1, B, 1]
            float32, written; or, where no norm follows, [T + 1, B, d] for x itself.
    """
    d, ends = x.shape[-1], isinstance(norm, Tensor)
    y_tape, normed = (norm, (None, None, None)) if isinstance(norm, Tensor) else (None, norm)
    launch(
        _residual_norm,
        (index.numel(),),
        *(index, source, out, mask, None if ends else x, y_tape, *normed, eps),
        **whole_row(d),
        D=d,
        LANES=index.shape[1],
        GATHER=source.dim() == 3,
    )


@triton.jit
def _residual_norm_backward(
    index,
    source,
    dn,
    n_tape,
    scale_tape,
    mask,
    dx_to,
    dx_tape,
    d_out_to,
    d_out_tape,
    D: tl.constexpr,
    LANES: tl.constexpr,
    GATHER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(index + row) * LANES + row % LANES
    column = tl.arange(0, BLOCK)
    inside = column < D
    here, there = row * D + column, place * D + column
    dx = tl.load(source + (there if GATHER else here), inside, 0.0).to(tl.float32)
    if dn is not None:
        d = tl.load(dn + here, inside, 0.0).to(tl.float32)
        n = tl.load(n_tape + there, inside, 0.0).to(tl.float32)
        dx += tl.load(scale_tape + place) * (d - n * (tl.sum(d * n, axis=0) / D))
    tl.store(dx_to + here, dx, inside)
    if dx_tape is not None:
        tl.store(dx_tape + there, dx, inside)
    if d_out_to is not None:
        if mask is not None:
            dx *= tl.load(mask + there, inside, 0.0).to(tl.float32)
        tl.store(d_out_to + here, dx.to(d_out_to.dtype.element_ty), inside)
        tl.store(d_out_tape + there, dx, inside)


def residual_norm_backward(
    index: Tensor,
    source: Tensor,
    norm: tuple[Tensor, Tensor, Tensor] | None,
    mask: Tensor | None,
    dx: Tensor,
    d_out: tuple[Tensor, Tensor] | Tensor,
) -> None:
    """The gradient of x, through the norm that read it; and that of what was added to make it.

    Args:
        index, mask: as in `residual_norm`.
        source: the gradient of x but for the norm's part: [C B, d], which may be `dx`, or a
            tape's [T + 1, B, d]; float32.
        norm: the gradient of n [C B, d], n [T + 1, B, d], 1 / rms(x) [T + 1, B, 1]; None: no
            norm read x.
        dx: float32 [C B, d], written.
        d_out: mask * dx, written: [C B, d] in the type of products and [T + 1, B, d] float32; or,
            where nothing was added, [T + 1, B, d] for dx itself.
    """
    d, ends = dx.shape[-1], isinstance(d_out, Tensor)
    dx_tape, outs = (d_out, (None, None)) if isinstance(d_out, Tensor) else (None, d_out)
    launch(
        _residual_norm_backward,
        (index.numel(),),
        *(index, source, *(norm or (None, None, None)), None if ends else mask),
        *(dx, dx_tape, *outs),
        **whole_row(d),
        D=d,
        LANES=index.shape[1],
        GATHER=source.dim() == 3,
    )


@triton.jit
def _swiglu(
    index,
    gate_up,
    gate_up_tape,
    hidden,
    F: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(index + row) * LANES + row % LANES
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    here, there = row * 2 * F + column, place * 2 * F + column
    gate = tl.load(gate_up + here, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up + here + F, inside, 0.0).to(tl.float32)
    tl.store(gate_up_tape + there, gate, inside)
    tl.store(gate_up_tape + there + F, up, inside)
    product = gate * tl.sigmoid(gate) * up
    tl.store(hidden + row * F + column, product.to(hidden.dtype.element_ty), inside)


def swiglu(index: Tensor, gate_up: Tensor, gate_up_tape: Tensor, hidden: Tensor) -> None:
    """hidden = silu(gate) * up.

    Args:
        index: int64 [C, B].
        gate_up: [C B, 2 f], gate before up.
        gate_up_tape: float32 [T + 1, B, 2 f], the same, written.
        hidden: [C B, f], written.
    """
    f = hidden.shape[-1]
    constants = some_columns(f, _COLUMNS)
    grid = (index.numel(), triton.cdiv(f, constants["BLOCK"]))
    launch(
        *(_swiglu, grid, index, gate_up, gate_up_tape, hidden),
        **constants,
        F=f,
        LANES=index.shape[1],
    )


@triton.jit
def _swiglu_backward(
    index,
    d_hidden,
    gate_up_tape,
    d_gate_up,
    d_gate_up_tape,
    F: tl.constexpr,
    LANES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(index + row) * LANES + row % LANES
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    here, there = row * 2 * F + column, place * 2 * F + column
    d = tl.load(d_hidden + row * F + column, inside, 0.0).to(tl.float32)
    gate = tl.load(gate_up_tape + there, inside, 0.0).to(tl.float32)
    up = tl.load(gate_up_tape + there + F, inside, 0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    d_gate, d_up = d * up * share * (1 + gate * (1 - share)), d * gate * share
    tl.store(d_gate_up_tape + there, d_gate, inside)
    tl.store(d_gate_up_tape + there + F, d_up, inside)
    tl.store(d_gate_up + here, d_gate.to(d_gate_up.dtype.element_ty), inside)
    tl.store(d_gate_up + here + F, d_up.to(d_gate_up.dtype.element_ty), inside)


def swiglu_backward(
    index: Tensor, d_hidden: Tensor, gate_up_tape: Tensor, d_gate_up: Tensor, d_tape: Tensor
) -> None:
    """The gradient of `swiglu` with respect to gate and up.

    Args:
        index: int64 [C, B].
        d_hidden: [C B, f].
        gate_up_tape: float32 [T + 1, B, 2 f].
        d_gate_up, d_tape: [C B, 2 f] in the type of products, and float32 [T + 1, B, 2 f];
            written.
    """
    f = d_hidden.shape[-1]
    constants = some_columns(f, _COLUMNS)
    grid = (index.numel(), triton.cdiv(f, constants["BLOCK"]))
    launch(
        *(_swiglu_backward, grid, index, d_hidden, gate_up_tape, d_gate_up, d_tape),
        **constants,
        F=f,
        LANES=index.shape[1],
    )


def builds(shapes: Shapes) -> Iterator[Build]:
    """Where a sublayer follows another, without dropout."""
    if shapes.model != "rlt":
        return
    product, tape, lanes = f"*{shapes.dtype}", "*fp32", {"LANES": shapes.lanes}
    row, columns = whole_row(shapes.d), some_columns(shapes.inner, _COLUMNS)
    of_row = {"D": shapes.d, "GATHER": False, "BLOCK": row["BLOCK"], **lanes}
    forward = {"index": "*i64", "source": tape, "out": product, "x_to": tape, "n_to": product}
    forward |= {"n_tape": tape, "scale_tape": tape, "eps": "fp32"}
    absent = {"mask": None, "y_tape": None}
    yield Build("residual_norm", _residual_norm, forward, of_row | absent, row["warps"])
    backward = {"index": "*i64", "source": tape, "dn": product, "n_tape": tape}
    backward |= {"scale_tape": tape, "dx_to": tape, "d_out_to": product, "d_out_tape": tape}
    absent = {"mask": None, "dx_tape": None}
    name = "residual_norm_backward"
    yield Build(name, _residual_norm_backward, backward, of_row | absent, row["warps"])
    of_columns = {"F": shapes.inner, "BLOCK": columns["BLOCK"], **lanes}
    forward = {"index": "*i64", "gate_up": product, "gate_up_tape": tape, "hidden": product}
    yield Build("swiglu", _swiglu, forward, of_columns, columns["warps"])
    backward = {"index": "*i64", "d_hidden": product, "gate_up_tape": tape}
    backward |= {"d_gate_up": product, "d_gate_up_tape": tape}
    yield Build("swiglu_backward", _swiglu_backward, backward, of_columns, columns["warps"])
