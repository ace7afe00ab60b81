"""Which backend runs the recurrence, and in what parts."""

import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from torch import Tensor

from rlt_dist.ops.recurrence.function import MakeLoop, PythonLoop, run_with
from rlt_dist.ops.recurrence.parts import Choice, cut
from rlt_dist.ops.recurrence.problem import Operands, Plan
from rlt_dist.ops.recurrence.reference import run_reference
from rlt_dist.util.errors import UserError

Backend = Literal["auto", "reference", "python", "native"]


@dataclass(frozen=True)
class Recurrence:
    """How the recurrence is computed; no choice changes a result.

    Attributes:
        backend: reference is plain autograd; python one Function; native its loop compiled for
            the CPU; auto native on a CPU where it can be compiled, else python.
        decoder_chunk: tokens of a part of a segment that backward computes again; "none": all is
            kept; "auto": all is kept unless it exceeds the budget, else the longest parts that
            fit. The reference always keeps everything.
        budget: bytes that auto lets the decoder take for its backward.
    """

    backend: Backend = "auto"
    decoder_chunk: Choice = "auto"
    budget: int = 4 << 30

    def run(self, plan: Plan, operands: Operands) -> tuple[Tensor, list[Tensor]]:
        """Outputs s [T, B, d], and by layer the window after the segment.

        Raises:
            UserError: see `prepare`.
        """
        loop = _loop(self.backend, operands.e.device.type)
        if loop is None:
            return run_reference(plan, operands)
        parts = cut(self.decoder_chunk, self.budget, plan, operands)
        return run_with(loop, parts, plan, operands)

    def prepare(self, device: str) -> None:
        """Compile what has to be compiled.

        Raises:
            UserError: `native` is asked for and cannot be had.
        """
        _loop(self.backend, device)


DEFAULT = Recurrence()


@lru_cache
def _loop(choice: Backend, device: str) -> MakeLoop | None:
    """Settled once: every segment asks, and a compiler that fails must not be run for each."""
    if choice == "reference":
        return None
    if choice == "python" or (choice == "auto" and device != "cpu"):
        return PythonLoop
    from rlt_dist.ops.recurrence.native.build import library
    from rlt_dist.ops.recurrence.native.loop import NativeLoop

    if device != "cpu":
        raise UserError(f"ops.recurrence: native runs on a CPU, not on {device}; take auto")
    try:
        library()
    except UserError as error:
        if choice == "native":
            raise
        warnings.warn(f"the recurrence runs in torch, more slowly: {error}", stacklevel=2)
        return PythonLoop
    return NativeLoop
