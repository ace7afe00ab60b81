"""Rotary positions: the first half of a head pairs with its second half."""

import torch
from torch import Tensor


def rotary_tables(
    position: Tensor, d_head: int, base: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Cosine and sine of angle_i = position * base^(-2i / d_head), i = 0 .. d_head/2 - 1.

    Angles are formed in float64: at position 10^7 a float32 angle is off by half a radian.

    Args:
        position: int64 [b, T].

    Returns:
        two [b, T, 1, d_head/2] of `dtype`, to broadcast over heads.
    """
    index = torch.arange(d_head // 2, dtype=torch.float64, device=position.device)
    frequency = base ** (-2.0 * index / d_head)
    angle = position.to(torch.float64)[..., None] * frequency
    return angle.cos().to(dtype)[:, :, None], angle.sin().to(dtype)[:, :, None]


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) for x [b, T, heads, d_head].

    With -sin it is its own gradient.
    """
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
