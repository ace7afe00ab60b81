"""Cross entropy of a linear softmax whose logits live in registers alone.

`ops.cross_entropy` defines the result, and calls the two functions here where kernels compute.
`token_logs` forms blocks of logits and keeps of each token the largest, the sum of exponentials and
the target's; processes that share a vocabulary exchange these three in torch. `gradient` forms the
blocks again and writes softmax - one-hot, in the type of products, for the two products that give
the gradients of tokens and weights: they stay cuBLAS's.

Floor for n tokens, V rows here, of width d, in bfloat16: the first forms 2 n V d operations and
reads x and W, the second the same and writes 2 n V bytes. On an H200 (4.8 TB/s, 790 TFLOP/s) with
n = 4096: 32,000 rows of 2,048 are 537 GFLOP, 680 us each, and 0.26 GB written, 55 us of them; the
head of wt103's adaptive softmax, 20,003 rows of 1,024, 168 GFLOP, 212 us each. Both are bound by
their products.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rlt_dist.ops.seam import WHOLE, Seam
from rlt_dist.ops.triton.build import Build
from rlt_dist.ops.triton.launch import launch
from rlt_dist.ops.triton.shapes import Shapes
from rlt_dist.ops.triton.tiles import product, product_type

_PROGRAMS = 528
"""Four for each of an H200's 132 processors: the vocabulary is split where tokens make fewer."""


class Blocks(NamedTuple):
    """Tokens, ids and columns of width that meet at a time, and how kernels are launched."""

    tokens: int
    ids: int
    depth: int
    warps: int
    stages: int


def blocks(dtype: torch.dtype) -> Blocks:
    """How both kernels are cut."""
    if dtype == torch.float32:
        return Blocks(32, 32, 32, 4, 2)
    return Blocks(128, 128, 64, 8, 3)


class TokenLogs(NamedTuple):
    """What is known of each token's softmax over all processes' rows.

    Attributes:
        log: float32 [n], log sum exp of its logits.
        wanted: float32 [n], its target's logit.
        owners: float32 [n], how many processes have its target's row; 1 unless it is no id.
    """

    log: Tensor
    wanted: Tensor
    owners: Tensor


def token_logs(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, seam: Seam = WHOLE
) -> TokenLogs:
    """For x [n, d], weight [V, d], bias [V] of one type, and targets int64 [n], as `linear_nll`."""
    largest, sums, wanted = _statistics(x, weight, bias, targets)
    owners = ((targets >= 0) & (targets < len(weight))).to(torch.float32)
    if seam is not WHOLE:
        own, largest = largest, seam.largest(largest)
        sums = sums * (own - largest).exp()  # where nothing is here, 0 * 0
        sums, wanted, owners = seam.total(torch.stack((sums, wanted, owners))).unbind()
    return TokenLogs(largest + sums.log(), wanted, owners)


def gradient(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    log: Tensor,
    out: Tensor,
    d_bias: Tensor | None,
) -> None:
    """softmax - one-hot, of operands as in `token_logs`.

    Args:
        log: of `token_logs`.
        out: [n, V] in x's type, which becomes the gradient.
        d_bias: float32 [V], to which the gradient's sum over the tokens is added before it is
            rounded; None: nobody wants it.
    """
    cut = blocks(x.dtype)
    grid = (triton.cdiv(len(x), cut.tokens), triton.cdiv(len(weight), cut.ids))
    sums = log if d_bias is None else log.new_empty(grid[0], len(weight))
    tensors = (x, weight, bias, targets, log, out, sums)
    _launch(entropy_gradient, grid, *tensors, out.stride(0), SUMS=d_bias is not None)
    if d_bias is not None:
        d_bias += sums.sum(0)


def _statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Of each token, float32 [n]: the largest logit, the sum of exp(logit - largest), the target's.

    Without rows here these are -inf, 0 and 0, and so is the last where the target is elsewhere.
    """
    (tokens, _), vocabulary = x.shape, len(weight)
    cut = blocks(x.dtype)
    count = triton.cdiv(tokens, cut.tokens)
    columns = triton.cdiv(vocabulary, cut.ids)
    span = triton.cdiv(columns * max(1, count), _PROGRAMS)  # blocks of ids that a program takes
    splits = triton.cdiv(columns, max(1, span))
    largest, sums, wanted = x.new_empty(3, splits, tokens, dtype=torch.float32)
    tensors = (x, weight, bias, targets, largest, sums, wanted)
    _launch(entropy_statistics, (count, splits), *tensors, span * cut.ids)
    if not splits:
        nothing = sums.sum(0)
        return nothing - torch.inf, nothing, nothing
    most = largest.amax(0)
    return most, (sums * (largest - most).exp()).sum(0), wanted.sum(0)


def _launch(
    kernel: Any,
    grid: tuple[int, int],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *others: Any,
    **constants: bool,
) -> None:
    if 0 in grid:
        return
    x, weight = (rows if rows.stride(1) == 1 else rows.contiguous() for rows in (x, weight))
    cut = blocks(x.dtype)
    launch(
        kernel,
        grid,
        *(x, weight, weight if bias is None else bias.contiguous(), targets.to(torch.int32)),
        *others,
        *(x.stride(0), weight.stride(0), *x.shape, len(weight)),
        warps=cut.warps,
        stages=cut.stages,
        **_constants(cut, bias is not None),
        **constants,
        PRODUCT=product_type(x),
    )


def _constants(cut: Blocks, biased: bool) -> dict[str, int]:
    return {"BIASED": biased, "TOKENS": cut.tokens, "IDS": cut.ids, "DEPTH": cut.depth}


# -- kernels -----------------------------------------------------------------------------------


@triton.jit
def _tile(base, row, stride, count, column, width):
    """float32 [rows, columns] of a matrix, and zeros outside of it."""
    inside = (row < count)[:, None] & (column < width)[None, :]
    at = row.to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(base + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _logits(
    x,
    weight,
    bias,
    row,
    column,
    x_row,
    weight_row,
    tokens,
    width,
    vocabulary,
    BIASED: tl.constexpr,
    TOKENS: tl.constexpr,
    IDS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """A block of logits, float32 [TOKENS, IDS]."""
    logit = tl.zeros([TOKENS, IDS], tl.float32)
    for begin in range(0, width, DEPTH):
        inner = begin + tl.arange(0, DEPTH)
        a = _tile(x, row, x_row, tokens, inner, width)
        b = _tile(weight, column, weight_row, vocabulary, inner, width)
        logit += product(a, tl.trans(b), PRODUCT)
    if BIASED:
        added = tl.load(bias + column, mask=column < vocabulary, other=0.0)
        logit += added.to(tl.float32)[None, :]
    return logit


@triton.jit
def entropy_statistics(
    x,
    weight,
    bias,
    targets,
    largest,
    sums,
    wanted,
    span,
    x_row,
    weight_row,
    tokens,
    width,
    vocabulary,
    BIASED: tl.constexpr,
    TOKENS: tl.constexpr,
    IDS: tl.constexpr,
    DEPTH: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """A block of tokens and `span` ids: largest logit, sum of exponentials, the target's logit."""
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    first = tl.program_id(1) * span
    target = tl.load(targets + row, mask=row < tokens, other=-1)
    most = tl.full([TOKENS], float("-inf"), tl.float32)
    total = tl.zeros([TOKENS], tl.float32)
    found = tl.zeros([TOKENS], tl.float32)
    for begin in range(first, tl.minimum(first + span, vocabulary), IDS):
        column = begin + tl.arange(0, IDS)
        logit = _logits(
            x,
            weight,
            bias,
            row,
            column,
            x_row,
            weight_row,
            tokens,
            width,
            vocabulary,
            BIASED,
            TOKENS,
            IDS,
            DEPTH,
            PRODUCT,
        )
        here = (column < vocabulary)[None, :]
        found += tl.sum(tl.where(here & (column[None, :] == target[:, None]), logit, 0.0), axis=1)
        logit = tl.where(here, logit, float("-inf"))
        larger = tl.maximum(most, tl.max(logit, axis=1))
        total = total * tl.exp(most - larger) + tl.sum(tl.exp(logit - larger[:, None]), axis=1)
        most = larger
    at = tl.program_id(1) * tokens + row
    tl.store(largest + at, most, mask=row < tokens)
    tl.store(sums + at, total, mask=row < tokens)
    tl.store(wanted + at, found, mask=row < tokens)


@triton.jit
def entropy_gradient(
    x,
    weight,
    bias,
    targets,
    log,
    gradient,
    sums,
    gradient_row,
    x_row,
    weight_row,
    tokens,
    width,
    vocabulary,
    BIASED: tl.constexpr,
    TOKENS: tl.constexpr,
    IDS: tl.constexpr,
    DEPTH: tl.constexpr,
    SUMS: tl.constexpr,
    PRODUCT: tl.constexpr,
):
    """A block of softmax - one-hot, and with SUMS its sum over these tokens.

    Programs that follow one another have the same ids, so that W comes from memory once.
    """
    row = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    column = tl.program_id(1) * IDS + tl.arange(0, IDS)
    logit = _logits(
        x,
        weight,
        bias,
        row,
        column,
        x_row,
        weight_row,
        tokens,
        width,
        vocabulary,
        BIASED,
        TOKENS,
        IDS,
        DEPTH,
        PRODUCT,
    )
    known = row < tokens
    target = tl.load(targets + row, mask=known, other=-1)
    log_sum = tl.load(log + row, mask=known, other=float("inf"))  # of no token: softmax 0
    d_logit = tl.exp(logit - log_sum[:, None])
    d_logit -= tl.where(column[None, :] == target[:, None], 1.0, 0.0)
    here = column < vocabulary
    at = row.to(tl.int64)[:, None] * gradient_row + column[None, :]
    inside = known[:, None] & here[None, :]
    tl.store(gradient + at, d_logit.to(gradient.dtype.element_ty), mask=inside)
    if SUMS:
        at = tl.program_id(0).to(tl.int64) * vocabulary + column
        tl.store(sums + at, tl.sum(d_logit, axis=0), mask=here)


def builds(shapes: Shapes) -> Iterator[Build]:
    """Both kernels for the widest softmax: sizes but the blocks' are arguments."""
    cut, biased = blocks(shapes.products), shapes.model == "transformer_xl"
    types = dict.fromkeys(("largest", "sums", "wanted", "log"), "*fp32") | {"targets": "*i32"}
    types |= dict.fromkeys(("x", "weight", "bias", "gradient"), f"*{shapes.dtype}")
    types |= dict.fromkeys(("x_row", "weight_row", "gradient_row", "width"), "i32:16")
    for kernel in (entropy_statistics, entropy_gradient):
        constants: dict[str, Any] = _constants(cut, biased)
        constants["PRODUCT"] = tl.dtype(shapes.dtype)
        if kernel is entropy_gradient:
            constants["SUMS"] = biased
        names = [name for name in kernel.arg_names if name not in constants]
        signature = {name: types.get(name, "i32") for name in names}
        name = "entropy_statistics" if kernel is entropy_statistics else "entropy_gradient"
        yield Build(name, kernel, signature, constants, cut.warps, cut.stages, product=True)
