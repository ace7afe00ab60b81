"""Small things that models make and run their modules with."""

from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

M = TypeVar("M", bound=nn.Module)


def unfilled(kind: type[M], *sizes: int, **choices: Any) -> M:
    """A module on the default device (`meta` included); `models.initial` fills its parameters."""
    device = torch.get_default_device()
    return nn.utils.skip_init(kind, *sizes, device=device, **choices)


def run_layer(layer: nn.Module, *given: Any, recompute: bool) -> Any:
    """What a layer makes of its inputs; recomputed: backward keeps the inputs and runs it again."""
    if recompute and torch.is_grad_enabled():
        # Masks are functions of names: no generator's state need be kept.
        return checkpoint(layer, *given, use_reentrant=False, preserve_rng_state=False)
    return layer(*given)


def present(piece: M | None) -> M:
    """A piece that must be here, on a pipeline stage that may be without it.

    Raises:
        RuntimeError: it is on another stage.
    """
    if piece is None:
        raise RuntimeError("this piece of the model is on another pipeline stage")
    return piece
