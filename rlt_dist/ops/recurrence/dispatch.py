"""Which backend runs the recurrence."""

import warnings
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Literal

from torch import Tensor

from rlt_dist.ops.recurrence.function import PYTHON, run_with
from rlt_dist.ops.recurrence.problem import Operands, Plan
from rlt_dist.ops.recurrence.reference import run_reference
from rlt_dist.util.errors import UserError

Backend = Literal["auto", "reference", "python", "native"]
Run = Callable[[Plan, Operands], tuple[Tensor, list[Tensor]]]


def backend(choice: Backend, device: str) -> Run:
    """The function that runs a segment.

    `auto` takes the compiled loop on a CPU where it can be compiled, else the loop in torch.

    Raises:
        UserError: `native` is asked for and cannot be had.
    """
    if choice == "reference":
        return run_reference
    if choice == "python" or (choice == "auto" and device != "cpu"):
        return partial(run_with, PYTHON)
    return _native(choice, device)


@lru_cache
def _native(choice: Backend, device: str) -> Run:
    """Settled once: every segment asks, and a compiler that fails must not be run for each."""
    from rlt_dist.ops.recurrence.native.build import library
    from rlt_dist.ops.recurrence.native.loop import NATIVE

    if device != "cpu":
        raise UserError(f"ops.recurrence: native runs on a CPU, not on {device}; take auto")
    try:
        library()
    except UserError as error:
        if choice == "native":
            raise
        warnings.warn(f"the recurrence runs in torch, more slowly: {error}", stacklevel=2)
        return partial(run_with, PYTHON)
    return partial(run_with, NATIVE)
