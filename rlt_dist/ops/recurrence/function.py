"""The autograd Function around a whole segment."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlt_dist.ops.recurrence.gradients import zero_weights
from rlt_dist.ops.recurrence.loop import MakeLoop
from rlt_dist.ops.recurrence.parts import Cut
from rlt_dist.ops.recurrence.problem import Border, Operands, Plan
from rlt_dist.ops.recurrence.stage import StageDecoder


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
        operands = operands.like(tensors)
        stage = StageDecoder(make(operands), cut, plan, operands)
        for part in stage.parts:
            stage.decode_part(part.start)
        ctx.make, ctx.operands, ctx.stage = make, operands, stage
        ctx.save_for_backward(*tensors)
        # Views: an output that its own context holds would never be freed.
        return tuple(x.view_as(x) for x in (stage.outputs(), *stage.after.windows))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, ds: Tensor, *dwindows: Tensor) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # raises where one of them was changed in place after forward
        stage, weights = ctx.stage, zero_weights(ctx.operands)
        stage.begin_backward(ctx.make(ctx.operands), weights, ds, Border(dwindows))
        for part in reversed(stage.parts):
            stage.replay(part.start)
            stage.decode_part_backward(part.start)
            stage.add_inputs(part.start)
            stage.add_weights(part.start)
        return (None, None, None, None, *stage.end_backward().flat())
