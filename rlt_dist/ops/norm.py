"""RMSNorm and the projections that read it, keeping one array of the input's size for backward.

Zhang, Sennrich, "Root Mean Square Layer Normalization", NeurIPS 2019: with g the gain and
n = x / sqrt(mean(x^2) + eps), the projections read g n. Plain autograd keeps x for the norm and
g n for the projections; n and its scale give the gradients of both.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlt_dist.ops.precision import add_product_, product_dtype


def norm_linear_plain(
    x: Tensor, gain: Tensor, eps: float, weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """RMSNorm(x) W^T for each weight, under plain autograd: the definition of `norm_linear`."""
    normed = F.rms_norm(x, gain.shape, gain, eps)
    return tuple(F.linear(normed, weight) for weight in weights)


def norm_linear(
    x: Tensor, gain: Tensor, eps: float, weights: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """`norm_linear_plain`, keeping n in the type of products and 1 / rms(x) only.

    Args:
        x: [..., d], float32 or wider, as gain [d] and weights [out, d] are.

    Returns:
        one [..., out] for each weight, in the type that autocast asks for.
    """
    outputs: tuple[Tensor, ...] = _NormLinear.apply(x, gain, eps, *weights)
    return outputs


class _NormLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, eps: float, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        dtype = product_dtype(x)
        scale = _mean_product(x, x).add_(eps).rsqrt_()
        n = x * scale
        normed = (n * gain).to(dtype)
        ctx.save_for_backward(n.to(dtype), scale, gain, *weights)
        return tuple(F.linear(normed, weight.to(dtype)) for weight in weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *d_outputs: Tensor) -> tuple[Tensor | None, ...]:
        n, scale, gain, *weights = ctx.saved_tensors
        rows = n.flatten(0, -2)
        d_rows = [d_output.flatten(0, -2) for d_output in d_outputs]
        # The gain is the same in all rows, so it waits for the sum over them.
        d_weights = [(d.mT @ rows) * gain for d in d_rows]
        d_normed = torch.zeros(rows.shape, dtype=scale.dtype, device=n.device)
        for d, weight in zip(d_rows, weights, strict=True):
            add_product_(d_normed, d, weight.to(d.dtype))
        d_gain = (d_normed * rows).sum(0)
        d_n = d_normed.mul_(gain).view_as(n)
        dx = d_n.addcmul_(n, _mean_product(d_n, n.to(d_n.dtype)), value=-1).mul_(scale)
        return dx, d_gain, None, *d_weights


def _mean_product(x: Tensor, y: Tensor) -> Tensor:
    """The mean of x y over the last dimension, kept as 1; autocast would round its operands."""
    with torch.autocast(x.device.type, enabled=False):
        return torch.linalg.vecdot(x, y).div_(x.shape[-1]).unsqueeze(-1)
