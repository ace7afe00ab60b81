"""SwiGLU's product and the projection that reads it, keeping the gate and the up branch only.

Shazeer, "GLU Variants Improve Transformer", arXiv 2002.05202: (silu(gate) * up) W^T. Plain autograd
keeps silu(gate) and the product as well; forming them again takes a few per cent of the time of
the products beside them.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlt_dist.ops.precision import product_dtype


def swiglu_linear_plain(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """(silu(gate) * up) W^T under plain autograd: the definition of `swiglu_linear`."""
    return F.linear(F.silu(gate) * up, weight)


def swiglu_linear(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """`swiglu_linear_plain`, keeping its operands only.

    Args:
        gate, up: [..., f], of one type.
        weight: [d, f].

    Returns:
        [..., d], in the type that autocast asks for.
    """
    output: Tensor = _SwigluLinear.apply(gate, up, weight)
    return output


class _SwigluLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        product = F.silu(gate).mul_(up)
        dtype = product_dtype(product)
        return F.linear(product.to(dtype), weight.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_output: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up, weight = ctx.saved_tensors
        silu = F.silu(gate)
        product = (silu * up).to(d_output.dtype)
        d_weight = d_output.flatten(0, -2).mT @ product.flatten(0, -2)
        d_product = (d_output @ weight.to(d_output.dtype)).to(gate.dtype)
        d_up = silu.mul_(d_product)
        d_gate = torch.ops.aten.silu_backward(d_product.mul_(up), gate)
        return d_gate, d_up, d_weight.to(weight.dtype)
