"""The types that products and sums are formed in."""

import torch
from torch import Tensor


def product_dtype(x: Tensor) -> torch.dtype:
    """The type in which F.linear would multiply x here: autocast's, else its own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def wide(dtype: torch.dtype) -> torch.dtype:
    """`dtype`, or float32 where it is narrower."""
    return torch.promote_types(dtype, torch.float32)


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b for matrices, where total may be wider than the product."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
