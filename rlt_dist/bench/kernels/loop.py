"""The recurrent loop: one decoder layer, all its kernels together.

Over a part of a segment inside a document, and over two where documents start, weights are dropped
and backward computes each part again: with a model's chunks, and with chunks of several tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from rlt_dist.bench.kernels.case import Case, Floor, Made
from rlt_dist.bench.recurrence import RecurrenceShape, operands_of, plan_of
from rlt_dist.config.model import RltConfig
from rlt_dist.ops.reach import segment_positions
from rlt_dist.ops.recurrence.dispatch import Recurrence
from rlt_dist.ops.recurrence.parts import Choice
from rlt_dist.ops.recurrence.problem import LayerMasks, Plan
from rlt_dist.ops.rotary import rotary_tables
from rlt_dist.ops.triton.shapes import Shapes

_CHUNK = 4
_DOCUMENT = 29
"""Tokens, so that some chunks and parts are inside of a document, and some are not."""


def cases(shapes: Shapes) -> Iterator[Case]:
    if shapes.model != "rlt":
        return
    forward = _floor(shapes, plan_of(_shape(shapes, shapes.part)))
    both = _both(forward)
    yield Case("loop_forward", forward, lambda: _made(shapes, gradients=False))
    yield Case("loop_forward_backward", both, lambda: _made(shapes, gradients=True))
    for name, chunk in (("loop_replayed", shapes.chunk), ("loop_of_chunks", _CHUNK)):
        cut = replace(shapes, chunk=min(chunk, shapes.part))
        yield Case(name, _replayed(cut), partial(_made, cut, gradients=True, replays=True))


def _floor(shapes: Shapes, plan: Plan) -> Floor:
    """Forward: every chunk reads the layer's weights and what it sees of the memory."""
    (tokens, lanes), chunks = plan.position.shape, plan.chunks
    heads, key_values = shapes.heads * shapes.width, shapes.kv_heads * shapes.width
    weights = shapes.d * (4 * heads + 2 * key_values + 3 * shapes.inner + 2 * shapes.d)
    first, end = plan.ranges()[1], plan.past + torch.arange(1, tokens + 1)[:, None]
    farthest = torch.full_like(chunks.first, plan.past + tokens)
    farthest.scatter_reduce_(0, chunks.number, first, reduce="amin")
    ends = plan.past + chunks.first + chunks.length
    read = int((ends - farthest)[chunks.length > 0].sum())
    seen = int((end - first).sum())
    return Floor(
        shapes.products.itemsize * (len(chunks) * weights + 2 * key_values * read),
        2 * tokens * lanes * weights + 4 * heads * seen,
    )


def _both(forward: Floor) -> Floor:
    """Backward reads all once more; products of weights' gradients are formed once for all."""
    return Floor(2 * forward.bytes, 3 * forward.operations)


def _replayed(shapes: Shapes) -> Floor:
    """Of two parts in both directions; the first is computed again, all its tokens at once."""
    plan = plan_of(_shape(shapes, 2 * shapes.part))
    plan = replace(plan, position=_documents(plan))
    first, last = (plan.part(slice(start, start + shapes.part)) for start in (0, shapes.part))
    again = _floor(shapes, replace(first, feedback=0))
    done = [_both(_floor(shapes, first)), _both(_floor(shapes, last)), again]
    return Floor(sum(one.bytes for one in done), sum(one.operations for one in done))


def _shape(shapes: Shapes, tokens: int) -> RecurrenceShape:
    """A layer over so many tokens, behind a full memory."""
    config = RltConfig(
        d_model=shapes.d,
        heads=shapes.heads,
        kv_heads=shapes.kv_heads,
        d_head=shapes.width,
        ffn=shapes.inner,
        encoder_layers=1,
        decoder_layers=1,
        window=shapes.window,
        memory_len=shapes.memory,
        feedback=shapes.chunk,
    )
    return RecurrenceShape(config, shapes.lanes, tokens, shapes.memory)


def _made(shapes: Shapes, gradients: bool, replays: bool = False) -> Made:
    part: Choice = shapes.part if replays else "none"
    shape = _shape(shapes, 2 * shapes.part if replays else shapes.part)
    plan, operands = plan_of(shape), operands_of(shape)
    if replays:
        plan = _broken(plan, shape.config)
    is_narrow = shapes.dtype == "bf16"
    autocast = partial(torch.autocast, operands.e.device.type, torch.bfloat16)

    def run(backend: Literal["triton", "python"], tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        leaves = [x.detach().requires_grad_(gradients) for x in tensors]
        dtype = leaves[0].dtype
        here = replace(plan, cos=plan.cos.to(dtype), sin=plan.sin.to(dtype))
        narrow = is_narrow and dtype != torch.float64
        with torch.set_grad_enabled(gradients), autocast(enabled=narrow):
            s, windows = Recurrence(backend, part).run(here, operands.like(leaves))
        if not gradients:
            return s, *windows
        return s.detach(), *torch.autograd.grad(s, leaves, torch.ones_like(s))

    return Made(operands.flat(), lambda *x: run("triton", x), lambda *x: run("python", x))


def _broken(plan: Plan, config: RltConfig) -> Plan:
    """With other documents, and dropout."""
    position = _documents(plan)
    tables = rotary_tables(position, config.head_width, config.rotary_base, torch.float32)
    keep = (torch.rand(3, *position.shape, config.d_model) < 0.9) / 0.9
    return replace(plan, position=position, cos=tables[0], sin=tables[1], masks=[LayerMasks(*keep)])


def _documents(plan: Plan) -> Tensor:
    """Positions [T, B] in documents that start at other tokens of each lane."""
    tokens, lanes = plan.position.shape
    start = torch.arange(tokens) % _DOCUMENT == torch.arange(lanes)[:, None] % _DOCUMENT
    position, _ = segment_positions(start, torch.full((lanes,), plan.past))
    return position.T
