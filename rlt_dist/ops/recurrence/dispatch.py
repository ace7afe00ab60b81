"""Which backend runs the recurrence, and in what parts."""

import warnings
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rlt_dist.ops.choice import asker, prefers_triton, require_triton
from rlt_dist.ops.precision import product_dtype
from rlt_dist.ops.recurrence.function import run_with
from rlt_dist.ops.recurrence.loop import MakeLoop, PythonLoop
from rlt_dist.ops.recurrence.parts import Choice, Cut, cut
from rlt_dist.ops.recurrence.problem import Operands, Plan
from rlt_dist.ops.recurrence.reference import run_reference
from rlt_dist.ops.seam import WHOLE, Seam
from rlt_dist.util.errors import UserError

Backend = Literal["auto", "reference", "python", "native", "triton"]
_COMPILED = (torch.float32, torch.float64)

_WORTH_PACKING = 8
"""Tokens from which the compiled loop is faster, its packing of the weights included."""


class Kind(NamedTuple):
    """What is to be computed, as far as implementations differ in what they can.

    Attributes:
        device: its kind.
        dtype: of operands.
        products: the type that products are formed in.
        width: of a head; 0: unknown, or there are none.
        window: entries of RLT's window; 0: unknown, or there is none.
    """

    device: str
    dtype: torch.dtype = torch.float32
    products: torch.dtype = torch.float32
    width: int = 0
    window: int = 0


@dataclass(frozen=True)
class Recurrence:
    """How the recurrence is computed; no choice changes a result.

    Attributes:
        backend: reference is plain autograd; python one Function; native its loop compiled for
            the CPU; triton its loop in kernels for a GPU. auto: on a GPU triton, where it is
            installed, products are in bfloat16 and heads and windows fit; on a CPU native, where it
            can be compiled, has whole weights and knows the type; else python, and for a few
            tokens without a gradient too.
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
        e, shape = operands.e, plan.shape
        kind = Kind(e.device.type, e.dtype, product_dtype(e), shape.head_width, shape.window)
        return _loop(self.backend, kind, plan.seam)

    def cut(self, plan: Plan, operands: Operands) -> Cut:
        """The parts of a segment that a loop goes through."""
        return cut(self.decoder_chunk, self.budget, plan, operands)

    def prepare(self, kind: Kind, seam: Seam = WHOLE) -> None:
        """Compile what has to be compiled.

        Raises:
            UserError: what is asked for, native or triton, cannot be had.
        """
        _loop(self.backend, kind, seam)


DEFAULT = Recurrence()


def _is_short(plan: Plan) -> bool:
    """Whether packing all weights costs more than it saves, as when text is generated."""
    return len(plan.position) < _WORTH_PACKING and not torch.is_grad_enabled()


def _loop(choice: Backend, kind: Kind, seam: Seam) -> MakeLoop | None:
    if choice == "reference":
        return None
    device, dtype, products, *sizes = kind
    if choice == "triton":
        require_triton(device, products, *sizes)
        return _triton()
    if choice == "auto" and prefers_triton(device, products, *sizes):
        return _triton()
    whole, known = seam is WHOLE, device == "cpu" and dtype in _COMPILED
    if choice == "python" or (choice == "auto" and not (whole and known)):
        return PythonLoop
    if not whole:
        raise UserError(
            f"{asker()}: native has whole weights, and mesh.tensor cuts them over processes; "
            "take auto or python"
        )
    if not known:
        raise UserError(
            f"{asker()}: native runs on a CPU in float32 or float64, "
            f"not on {device} in {str(dtype).removeprefix('torch.')}; take auto"
        )
    return _native(choice)


def _triton() -> MakeLoop:
    """Imported when it is to run: it needs triton."""
    from rlt_dist.ops.recurrence.triton_loop import TritonLoop

    return TritonLoop


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
