"""The feedback around the layers on one chunk: what it is fed, and where gradients go back to."""

import torch
from torch import Tensor

from rlt_dist.ops.recurrence.arithmetic import (
    normalise,
    normalise_backward,
    product,
    product_backward,
)
from rlt_dist.ops.recurrence.chunks import Chunks, Slots
from rlt_dist.ops.recurrence.tape import FeedbackTape


def enter(tape: FeedbackTape, chunks: Chunks, k: int, at: Slots) -> Tensor:
    """u [C, B, d] of chunk k."""
    e = at.get(tape.e)
    if tape.inputs is None or tape.alpha is None:
        return e
    tape.r[k] = normalise(_boundary_state(tape, chunks, k), tape.eps)
    tape.fed[k] = product(tape.r[k], tape.inputs.weight)
    gate_h, value = tape.fed[k].chunk(2, dim=-1)
    return e + tape.alpha * torch.sigmoid(at.get(tape.gate_e) + gate_h) * value


def enter_backward(tape: FeedbackTape, chunks: Chunks, k: int, at: Slots, du: Tensor) -> None:
    """Pass the gradient of u on to e, to the gate, and to the state that was fed back."""
    at.put(tape.de, du)
    if tape.inputs is None or tape.alpha is None:
        return
    gate_h, value = tape.fed[k].chunk(2, dim=-1)
    gate = torch.sigmoid(at.get(tape.gate_e) + gate_h)
    d_value = tape.alpha * du * gate
    d_gate = d_value * value * (1 - gate)
    at.put(tape.dgate_e, d_gate)
    tape.dfed[k] = torch.cat((d_gate.sum(dim=0), d_value.sum(dim=0)), dim=-1)
    dr = product_backward(tape.dfed[k], tape.inputs.weight)
    dh = normalise_backward(dr, _boundary_state(tape, chunks, k), tape.eps)
    fresh, start = chunks.fresh[k, :, None], chunks.start[k, :, None]
    tape.dinitial += dh * (fresh & start)
    tape.dboundary += dh * ~fresh
    tape.ds[chunks.first[k], _lanes(dh)] += dh * (fresh & ~start)


def _boundary_state(tape: FeedbackTape, chunks: Chunks, k: int) -> Tensor:
    """h [B, d]: s* at a document's start, else the output before the chunk, else the carried."""
    before = tape.s[chunks.first[k], _lanes(tape.initial)]
    fresh, start = chunks.fresh[k, :, None], chunks.start[k, :, None]
    return torch.where(fresh, torch.where(start, tape.initial, before), tape.boundary)


def _lanes(x: Tensor) -> Tensor:
    return torch.arange(len(x), device=x.device)
