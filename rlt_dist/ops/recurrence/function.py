"""The autograd Function around a whole segment, and its loop in torch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlt_dist.ops.recurrence.feedback import enter, enter_backward
from rlt_dist.ops.recurrence.gradients import gradients
from rlt_dist.ops.recurrence.problem import Operands, Plan
from rlt_dist.ops.recurrence.steps import layer_backward, layer_forward
from rlt_dist.ops.recurrence.tape import Tape


class Loop(NamedTuple):
    """Two passes over a tape, chunk by chunk: forward, and backward of the activations."""

    forward: Callable[[Tape], None]
    backward: Callable[[Tape], None]


def run_with(loop: Loop, plan: Plan, operands: Operands) -> tuple[Tensor, list[Tensor]]:
    """Outputs s [T, B, d], and by layer the window after the segment."""
    s, *windows = _Segment.apply(loop, plan, operands, *operands.flat())
    return s, windows


class _Segment(torch.autograd.Function):
    """Sequential activation gradients, batched weight gradients."""

    @staticmethod
    def forward(
        ctx: Any, loop: Loop, plan: Plan, operands: Operands, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        tape = Tape(plan, operands.like(tensors))
        loop.forward(tape)
        ctx.loop, ctx.tape = loop, tape
        return (tape.feedback.outputs(), *(layer.window_after() for layer in tape.layers))

    @staticmethod
    def backward(ctx: Any, ds: Tensor, *dwindows: Tensor) -> tuple[Any, ...]:
        tape: Tape = ctx.tape
        tape.feedback.begin_backward(ds)
        for layer, dwindow in zip(tape.layers, dwindows, strict=True):
            layer.begin_backward(dwindow)
        ctx.loop.backward(tape)
        return (None, None, None, *gradients(tape).flat())


def _forward(tape: Tape) -> None:
    plan = tape.plan
    for k, at in enumerate(plan.chunks.slots):
        sight, x = plan.sight(at), enter(tape.feedback, plan.chunks, k, at)
        for layer in tape.layers:
            x = layer_forward(x, layer, at, sight, plan.shape)
        at.put(tape.feedback.s[1:], x)


def _backward(tape: Tape) -> None:
    plan = tape.plan
    for k, at in reversed(list(enumerate(plan.chunks.slots))):
        sight, dy = plan.sight(at), at.get(tape.feedback.ds[1:])
        for layer in reversed(tape.layers):
            dy = layer_backward(dy, layer, at, sight, plan.shape)
        enter_backward(tape.feedback, plan.chunks, k, at, dy)


PYTHON = Loop(_forward, _backward)
