"""Which backend runs the recurrence, and in what parts."""

import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from rlt_dist.ops.recurrence.function import run_with
from rlt_dist.ops.recurrence.loop import MakeLoop, PythonLoop
from rlt_dist.ops.recurrence.parts import Choice, Cut, cut
from rlt_dist.ops.recurrence.problem import Operands, Plan
from rlt_dist.ops.recurrence.reference import run_reference
from rlt_dist.ops.seam import WHOLE, Seam
from rlt_dist.util.errors import UserError

Backend = Literal["auto", "reference", "python", "native"]
_COMPILED = (torch.float32, torch.float64)

_WORTH_PACKING = 8
"""Tokens from which the compiled loop is faster, its packing of the weights included."""


@dataclass(frozen=True)
class Recurrence:
    """How the recurrence is computed; no choice changes a result.

    Attributes:
        backend: reference is plain autograd; python one Function; native its loop compiled for
            the CPU; auto native on a CPU where it can be compiled, has whole weights, knows the
            type and is faster for so many tokens, else python.
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
        loop = self.loop(plan, operands)
        if loop is None:
            return run_reference(plan, operands)
        return run_with(loop, self.cut(plan, operands), plan, operands)

    def loop(self, plan: Plan, operands: Operands) -> MakeLoop | None:
        """The loop of the backend; None: the reference, which has none.

        Raises:
            UserError: see `prepare`.
        """
        if self.backend == "auto" and _is_short(plan):
            return PythonLoop
        return _loop(self.backend, operands.e.device.type, operands.e.dtype, plan.seam)

    def cut(self, plan: Plan, operands: Operands) -> Cut:
        """The parts of a segment that a loop goes through."""
        return cut(self.decoder_chunk, self.budget, plan, operands)

    def prepare(self, device: str, seam: Seam = WHOLE) -> None:
        """Compile what has to be compiled.

        Raises:
            UserError: `native` is asked for and cannot be had.
        """
        _loop(self.backend, device, torch.float32, seam)


DEFAULT = Recurrence()


def _is_short(plan: Plan) -> bool:
    """Whether packing all weights costs more than it saves, as when text is generated."""
    return len(plan.position) < _WORTH_PACKING and not torch.is_grad_enabled()


def _loop(choice: Backend, device: str, dtype: torch.dtype, seam: Seam) -> MakeLoop | None:
    if choice == "reference":
        return None
    whole, known = seam is WHOLE, device == "cpu" and dtype in _COMPILED
    if choice == "python" or (choice == "auto" and not (whole and known)):
        return PythonLoop
    if not whole:
        raise UserError(
            "ops.recurrence: native has whole weights, and mesh.tensor cuts them over processes; "
            "take auto or python"
        )
    if not known:
        raise UserError(
            "ops.recurrence: native runs on a CPU in float32 or float64, "
            f"not on {device} in {str(dtype).removeprefix('torch.')}; take auto"
        )
    return _native(choice)


@lru_cache
def _native(choice: Backend) -> MakeLoop:
    """Settled once: every segment asks, and a compiler that fails must not be run for each."""
    from rlt_dist.ops.recurrence.native.build import library
    from rlt_dist.ops.recurrence.native.loop import NativeLoop

    try:
        library()
    except UserError as error:
        if choice == "native":
            raise
        warnings.warn(f"the recurrence runs in torch, more slowly: {error}", stacklevel=2)
        return PythonLoop
    return NativeLoop
