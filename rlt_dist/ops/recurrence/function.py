"""The autograd Function around a whole segment, and its loop in torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlt_dist.ops.precision import product_dtype
from rlt_dist.ops.recurrence import recompute
from rlt_dist.ops.recurrence.feedback import enter, enter_backward
from rlt_dist.ops.recurrence.parts import Cut
from rlt_dist.ops.recurrence.problem import Operands, Plan
from rlt_dist.ops.recurrence.steps import layer_backward, layer_forward, view_of
from rlt_dist.ops.recurrence.tape import Tape

MakeLoop = Callable[[Operands], recompute.Loop]


def run_with(
    make: MakeLoop, cut: Cut, plan: Plan, operands: Operands
) -> tuple[Tensor, list[Tensor]]:
    """Outputs s [T, B, d], and by layer the window after the segment."""
    s, *windows = _Segment.apply(make, cut, plan, operands, *operands.flat())
    return s, windows


class _Segment(torch.autograd.Function):
    """Sequential activation gradients, batched weight gradients."""

    @staticmethod
    def forward(
        ctx: Any, make: MakeLoop, cut: Cut, plan: Plan, operands: Operands, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        operands = operands.like(tensors).with_contiguous_memories()
        s, after, ctx.parts = recompute.forward(make(operands), cut, plan, operands)
        ctx.make, ctx.operands, ctx.s = make, operands, s
        ctx.save_for_backward(*tensors)
        # A view: an output that its own context holds would never be freed.
        return (s.view_as(s), *after.windows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ds: Tensor, *dwindows: Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # raises where one of them was changed in place after forward
        loop = ctx.make(ctx.operands)
        found = recompute.backward(loop, ctx.parts, ctx.operands, ctx.s, ds, dwindows)
        return (None, None, None, None, *found.flat())


_FEW = 1 << 24
"""Multiplications of a product on which a second thread is woken later than the first is done."""


class PythonLoop:
    """The loop in torch."""

    def __init__(self, operands: Operands) -> None:
        """The tape has all that it needs of the operands."""

    def precision(self, x: Tensor) -> torch.dtype:
        """Autocast's, where it is on."""
        return product_dtype(x)

    def forward(self, tape: Tape) -> None:
        """Fill the tape."""
        with _threads_for(tape):
            self._forward(tape)

    def backward(self, tape: Tape) -> None:
        """Fill its gradients, those of activations only."""
        with _threads_for(tape):
            self._backward(tape)

    def _forward(self, tape: Tape) -> None:
        plan = tape.plan
        for k, at in enumerate(plan.chunks.slots):
            view, x = view_of(plan, k, at), enter(tape.feedback, plan.chunks, k, at)
            for layer in tape.layers:
                x = layer_forward(x, layer, at, view, plan.shape)
            at.put(tape.feedback.s[1:], x)

    def _backward(self, tape: Tape) -> None:
        plan = tape.plan
        for k, at in reversed(list(enumerate(plan.chunks.slots))):
            view, dy = view_of(plan, k, at), at.get(tape.feedback.ds[1:])
            for layer in reversed(tape.layers):
                dy = layer_backward(dy, layer, at, view, plan.shape)
            enter_backward(tape.feedback, plan.chunks, k, at, dy)


@contextmanager
def _threads_for(tape: Tape) -> Iterator[None]:
    """One thread where a chunk's products are small, else as many as there were."""
    rows = int(tape.plan.chunks.length.amax()) * tape.feedback.e.shape[1]
    before = torch.get_num_threads()
    if rows * tape.layers[0].weights.gate_up.numel() < _FEW:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
