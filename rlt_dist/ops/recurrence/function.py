"""The autograd Function around a whole segment, and its loop in torch."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rlt_dist.ops.recurrence import recompute
from rlt_dist.ops.recurrence.feedback import enter, enter_backward
from rlt_dist.ops.recurrence.parts import Cut
from rlt_dist.ops.recurrence.problem import Memory, Operands, Plan
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
        operands = _with_contiguous_memories(operands.like(tensors))
        s, after, ctx.parts = recompute.forward(make(operands), cut, plan, operands)
        ctx.make, ctx.operands, ctx.s = make, operands, s
        # A view: an output that its own context holds would never be freed.
        return (s.view_as(s), *after.windows)

    @staticmethod
    def backward(ctx: Any, ds: Tensor, *dwindows: Tensor) -> tuple[Any, ...]:
        loop = ctx.make(ctx.operands)
        found = recompute.backward(loop, ctx.parts, ctx.operands, ctx.s, ds, dwindows)
        return (None, None, None, None, *found.flat())


def _with_contiguous_memories(operands: Operands) -> Operands:
    """Memories as the loops read them, made so once for all layers and parts."""
    memories = [Memory(k.contiguous(), v.contiguous()) for k, v in operands.memories]
    return operands._replace(memories=memories)


class PythonLoop:
    """The loop in torch."""

    def __init__(self, operands: Operands) -> None:
        """The tape has all that it needs of the operands."""

    def forward(self, tape: Tape) -> None:
        """Fill the tape."""
        plan = tape.plan
        for k, at in enumerate(plan.chunks.slots):
            view, x = view_of(plan, k, at), enter(tape.feedback, plan.chunks, k, at)
            for layer in tape.layers:
                x = layer_forward(x, layer, at, view, plan.shape)
            at.put(tape.feedback.s[1:], x)

    def backward(self, tape: Tape) -> None:
        """Fill its gradients, those of activations only."""
        plan = tape.plan
        for k, at in reversed(list(enumerate(plan.chunks.slots))):
            view, dy = view_of(plan, k, at), at.get(tape.feedback.ds[1:])
            for layer in reversed(tape.layers):
                dy = layer_backward(dy, layer, at, view, plan.shape)
            enter_backward(tape.feedback, plan.chunks, k, at, dy)
