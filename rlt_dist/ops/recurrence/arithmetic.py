"""Small functions that the steps are made of, each with its gradient.

The gradients of softmax and silu are the operators that autograd itself calls for them: torch has
no other name for them, and one call takes the place of four to eight.
"""

import torch
import torch.nn.functional as F
from torch import Tensor


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, formed in the weight's type, given in x's."""
    return F.linear(x.to(weight.dtype), weight).to(x.dtype)


def product_backward(dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient of `product` with respect to x."""
    return (dy.to(weight.dtype) @ weight).to(dy.dtype)


def normalise(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """n = x / rms(x), and 1 / rms(x) [..., 1]."""
    # Not vecdot, whose operands autocast would round.
    scale = (x * x).mean(dim=-1, keepdim=True).add_(eps).rsqrt_()
    return x * scale, scale


def normalise_backward(dy: Tensor, dn: Tensor, n: Tensor, scale: Tensor) -> Tensor:
    """dy plus the gradient with respect to x of `normalise`, dn being that of n."""
    inner = torch.linalg.vecdot(dn, n).unsqueeze(-1)
    return torch.addcmul(dy, scale, torch.addcmul(dn, n, inner, value=-1 / n.shape[-1]))


def softmax_backward(dweight: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a softmax with respect to its scores."""
    gradient: Tensor = torch.ops.aten._softmax_backward_data(dweight, weight, -1, weight.dtype)
    return gradient


def silu_backward(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of silu with respect to its argument x."""
    gradient: Tensor = torch.ops.aten.silu_backward(dy, x)
    return gradient


def rotate(x: Tensor, cos: Tensor, sin: Tensor, direction: int = 1) -> Tensor:
    """`ops.rotary.rotate` for tables as wide as a head, (cos, cos) and (-sin, sin).

    Direction -1 is its gradient.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, swapped, sin, value=direction)


def by_lane(x: Tensor, kv_heads: int) -> Tensor:
    """[C, B, H, n] to [B, KV, C R, n]: a lane's queries together, R = H / KV."""
    return x.unflatten(2, (kv_heads, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)


def by_token(x: Tensor, tokens: int) -> Tensor:
    """The inverse of `by_lane`."""
    return x.unflatten(2, (tokens, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3)
