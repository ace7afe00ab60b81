"""Transformer-XL attention with relative positions and memory; scores never leave the chip.

`ops.relative.attend_relative` defines the result. The position's scores (q + v) r of a block are
formed by distance, as a product; a block of keys needs them moved, each row one place further than
the row above. Two neighbouring halves of a band of distances hold all of it, so `tiles.turned`
chooses between them and turns the rows; backward turns gradients back the same way. So each half
is multiplied twice: keeping one for the next block would spill registers.

All else is as in `band`: skipped blocks, log2 sum 2^score for backward, and gradients summed by one
program in one order. The gradient of R is summed over queries by programs that own distances; what
only the lanes share (R, u, v) is left by lane for torch to add up. Which weights are dropped is
drawn once, a bit each, and kept for backward: the hash takes longer than the products.

Floor, with n the pairs of a query and a key that it sees, of all lanes and heads: forward moves
q, k, v, R and the output once and multiplies 6 n w; backward reads these and the output's gradient,
writes four, and multiplies 16 n w, of which six form weights and their gradients again. (These
kernels multiply 8 n w, and by query, key and distance 14, 12 and 12.) `rlt-dist kernels list` has
the numbers of a configuration.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlt_dist.ops.noise import WeightMask
from rlt_dist.ops.reach import Reach
from rlt_dist.ops.triton.build import Build
from rlt_dist.ops.triton.launch import launch
from rlt_dist.ops.triton.relative_kernels import (
    relative_backward_key,
    relative_backward_query,
    relative_backward_relative,
    relative_forward,
    relative_keep,
)
from rlt_dist.ops.triton.shapes import Shapes
from rlt_dist.ops.triton.tiles import on_amd, padded_width, product_type

_DRAWN = 64
"""Queries whose kept weights one program draws."""


class Blocks(NamedTuple):
    """Queries and keys (or distances, at least as many) of a block, and how it is launched."""

    queries: int
    keys: int
    warps: int
    stages: int


def attend_relative(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    relative: Tensor,
    biases: tuple[Tensor, Tensor],
    reach: Reach,
    dropped: WeightMask | None = None,
) -> Tensor:
    """softmax(((q_i + u) k_j + (q_i + v) r_{i-j}) / sqrt(d_head)) V over the keys of `reach`.

    Args:
        query: [b, Q, H, d_head], float32 or bfloat16.
        key, value: [b, K, H, d_head].
        relative: [K, H, d_head], the projected R of distances K - 1 .. 0, as keys are ordered.
        biases: u and v, each [H, d_head].
        dropped: which weights are dropped; None: none.

    Returns:
        [b, Q, H * d_head].
    """
    output: Tensor = _Relative.apply(query, key, value, relative, *biases, reach, dropped)
    return output.flatten(2)


def blocks(kernel: str, width: int, dtype: torch.dtype, amd: bool) -> Blocks:
    """How each of the four kernels is cut for heads of `width`.

    The largest blocks found that spill no register on sm_90 and gfx942 and fit into shared memory.
    """
    if amd or dtype == torch.float32:
        return Blocks(32, 32, 4, 1)
    by_query = kernel in ("forward", "query")
    if width > 64:
        return Blocks(32, 32, 4, 2) if by_query else Blocks(32, 64, 8, 2)
    if kernel == "query":
        return Blocks(32, 32, 4, 2)
    return Blocks(64 if kernel == "forward" else 32, 64, 4, 2)


class _Relative(torch.autograd.Function):
    """Query [b, Q, H, w], key and value [b, K, H, w], relative [K, H, w] to [b, Q, H, w]."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        relative: Tensor,
        u: Tensor,
        v: Tensor,
        reach: Reach,
        dropped: WeightMask | None,
    ) -> Tensor:
        biased = (_biased(query, u), _biased(query, v))
        operands = _Operands(*biased, *map(_by_rows, (key, value, relative)))
        lanes, queries, heads, _ = query.shape
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        logs = query.new_empty((lanes, heads, queries), dtype=torch.float32)
        bits = _keep_bits(dropped, operands)
        boost = 1.0 if dropped is None else 1.0 / (1.0 - dropped.p)
        _launch("forward", operands, bits, boost, reach.first, output, logs)
        ctx.save_for_backward(*operands, bits, output, logs)
        ctx.reach, ctx.boost, ctx.biases = reach, boost, u.dtype
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor | None, ...]:
        *saved, bits, output, logs = ctx.saved_tensors
        operands, d_output = _Operands(*saved), d_output.contiguous()
        content, _, key, value, relative = operands
        d_query, d_key, d_value = (
            torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (content, key, value)
        )
        lanes, heads, means = len(key), relative.shape[1:], torch.empty_like(logs)
        parts = {
            kernel: triton.cdiv(len(relative), _blocks(kernel, content).keys)
            for kernel in ("key", "relative")
        }
        d_u, d_v = (logs.new_empty(lanes, count, *heads) for count in parts.values())
        d_relative = logs.new_empty(lanes, *relative.shape)
        given, first, ends = (operands, bits, ctx.boost), ctx.reach.first, ctx.reach.ends
        _launch("query", *given, first, output, d_output, logs, means, d_query)
        _launch("key", *given, first, ends, d_output, logs, means, d_key, d_value, d_u)
        _launch("relative", *given, first, d_output, logs, means, d_relative, d_v)
        d_relative = d_relative.sum(0).to(relative.dtype)
        d_biases = (d.sum((0, 1)).to(ctx.biases) for d in (d_u, d_v))
        return d_query, d_key, d_value, d_relative, *d_biases, None, None


class _Operands(NamedTuple):
    """What all kernels read first: q + u and q + v, contiguous, and as in `attend_relative`."""

    content: Tensor
    position: Tensor
    key: Tensor
    value: Tensor
    relative: Tensor


def _biased(query: Tensor, bias: Tensor) -> Tensor:
    """q + bias in the query's type: products read it from memory, which costs no registers."""
    biased = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    return torch.add(query, bias, out=biased)


def _by_rows(x: Tensor) -> Tensor:
    """x [..., w] where one number follows another within a head."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _keep_bits(dropped: WeightMask | None, operands: _Operands) -> Tensor | None:
    """int32 [b, H, Q, ceil(K / 32)]: bit k % 32 of word k // 32 says whether key k's is kept."""
    if dropped is None:
        return None
    lanes, queries, heads, _ = operands.content.shape
    keys = operands.key.shape[1]
    words = triton.cdiv(keys, 32)
    bits = dropped.streams.new_empty((lanes, heads, queries, words), dtype=torch.int32)
    launch(
        relative_keep,
        (triton.cdiv(queries, _DRAWN), words, heads * lanes),
        *(dropped.streams, bits, queries, keys),
        *(dropped.heads.start, dropped.all_heads, dropped.threshold),
        HEADS=heads,
        QUERIES=_DRAWN,
    )
    return bits


def _blocks(kernel: str, like: Tensor) -> Blocks:
    return blocks(kernel, like.shape[-1], like.dtype, on_amd())


def _launch(
    kernel: str, operands: _Operands, bits: Tensor | None, boost: float, *results: Tensor
) -> None:
    """One of the four kernels; `results` are what it takes besides operands, in its order."""
    content, _, key, value, relative = operands
    cut, (lanes, queries, heads, width) = _blocks(kernel, content), content.shape
    by_query = kernel in ("forward", "query")
    count = triton.cdiv(queries, cut.queries) if by_query else triton.cdiv(key.shape[1], cut.keys)
    strides = [stride for x in (key, value) for stride in x.stride()[:3]]
    launch(
        _KERNELS[kernel],
        (count, heads, lanes),
        *operands,
        *results,
        *strides,
        *relative.stride()[:2],
        queries,
        key.shape[1],
        width**-0.5,
        results[0] if bits is None else bits,  # which the kernel does not read then
        boost,
        warps=cut.warps,
        stages=cut.stages,
        **_constants(cut, heads, width, bits is not None),
        PRODUCT=product_type(content),
    )


def _constants(cut: Blocks, heads: int, width: int, drops: bool) -> dict[str, int]:
    return {
        "HEADS": heads,
        "WIDTH": width,
        "COLUMNS": padded_width(width),
        "QUERIES": cut.queries,
        "KEYS": cut.keys,
        "DROPS": drops,
    }


_KERNELS = {
    "forward": relative_forward,
    "query": relative_backward_query,
    "key": relative_backward_key,
    "relative": relative_backward_relative,
}


def builds(shapes: Shapes) -> Iterator[Build]:
    """The four kernels, with dropped weights and without, and what draws these."""
    if shapes.model != "transformer_xl":
        return
    for kind in _KERNELS:
        for drops in (True, False):
            on_nvidia, amd = (_build(kind, shapes, drops, amd) for amd in (False, True))
            yield replace(on_nvidia, amd=amd)
    constants = {"HEADS": shapes.heads, "QUERIES": _DRAWN}
    names = [name for name in relative_keep.arg_names if name not in constants]
    signature = dict.fromkeys(names, "i32") | {"streams": "*i64", "bits": "*i32"}
    yield Build("relative_keep", relative_keep, signature, constants)


def _build(kind: str, shapes: Shapes, drops: bool, amd: bool) -> Build:
    kernel, cut = _KERNELS[kind], blocks(kind, shapes.width, shapes.products, amd)
    constants: dict[str, Any] = _constants(cut, shapes.heads, shapes.width, drops)
    constants["PRODUCT"] = tl.dtype(shapes.dtype)
    names = [name for name in kernel.arg_names if name not in constants]
    strides, counts = names.index("key_lane"), names.index("query_count")
    signature = dict.fromkeys(names[:strides], f"*{shapes.dtype}")
    signature |= dict.fromkeys(names[strides:counts], "i32:16") | dict.fromkeys(
        names[counts:], "i32"
    )
    types = dict.fromkeys(("logs", "means", "d_u", "d_v", "d_relative"), "*fp32")
    types |= dict.fromkeys(("first", "ends", "bits"), "*i32")
    types |= {"scale": "fp32", "boost": "fp32"}
    signature |= {name: kind for name, kind in types.items() if name in names}
    name = "relative_forward" if kind == "forward" else f"relative_backward_{kind}"
    name += "_dropping" if drops else ""
    return Build(name, kernel, signature, constants, cut.warps, cut.stages, product=True)
