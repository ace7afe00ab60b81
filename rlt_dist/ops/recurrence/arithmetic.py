"""Small functions that the steps are made of, each with its gradient."""

import torch.nn.functional as F
from torch import Tensor


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x W^T, formed in the weight's type, given in x's."""
    return F.linear(x.to(weight.dtype), weight).to(x.dtype)


def product_backward(dy: Tensor, weight: Tensor) -> Tensor:
    """The gradient of `product` with respect to x."""
    return (dy.to(weight.dtype) @ weight).to(dy.dtype)


def outer(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of `product` with respect to the weight: the sum over all rows of dy x^T."""
    return dy.flatten(0, -2).T @ x.flatten(0, -2)


def normalise(x: Tensor, eps: float) -> Tensor:
    """x / rms(x)."""
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()


def normalise_backward(dn: Tensor, x: Tensor, eps: float) -> Tensor:
    """The gradient of `normalise`."""
    scale = (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()
    return scale * (dn - x * (scale.square() * (dn * x).mean(dim=-1, keepdim=True)))


def softmax_backward(dweight: Tensor, weight: Tensor) -> Tensor:
    """The gradient of a softmax with respect to its scores."""
    return weight * (dweight - (dweight * weight).sum(dim=-1, keepdim=True))


def by_lane(x: Tensor, kv_heads: int) -> Tensor:
    """[C, B, H, n] to [B, KV, C R, n]: a lane's queries together, R = H / KV."""
    return x.unflatten(2, (kv_heads, -1)).permute(1, 2, 0, 3, 4).flatten(2, 3)


def by_token(x: Tensor, tokens: int) -> Tensor:
    """The inverse of `by_lane`."""
    return x.unflatten(2, (tokens, -1)).permute(2, 0, 1, 3, 4).flatten(2, 3)
