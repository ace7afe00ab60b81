"""FLOPs as torch counts them."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry

_aten = torch.ops.aten
_NAMESAKES = {
    _aten.addmm_: _aten.addmm,
    _aten.baddbmm_: _aten.baddbmm,
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        _aten._scaled_dot_product_flash_attention_backward
    ),
}
"""torch's registry knows products by their operators, and lacks those that add in place and the
CPU's fused attention; they are given the formulas of their namesakes."""


@pytest.fixture(scope="session")
def counted() -> Callable[[], AbstractContextManager[FlopCounterMode]]:
    """`with counted() as mode`: the FLOPs of a block."""
    formulas = {name: _raw(flop_registry[same]) for name, same in _NAMESAKES.items()}
    return lambda: FlopCounterMode(display=False, custom_mapping=formulas)


def _raw(formula: Callable[..., int]) -> Callable[..., int]:
    """A formula of the registry, which takes shapes off tensors itself."""
    given: Any = partial(formula)
    given._get_raw = True
    return given
