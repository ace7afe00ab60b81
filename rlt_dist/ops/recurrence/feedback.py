"""The feedback around the layers: what chunks are fed, and where gradients go back to."""

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
    if tape.inputs is None:
        return e
    h = tape.boundary_states(chunks.first[k], chunks.fresh[k], chunks.start[k])
    tape.r[k], tape.r_scale[k] = normalise(h, tape.eps)
    tape.fed[k] = product(tape.r[k], tape.inputs.weight)
    return _merge(tape, e, at.get(tape.gate_e), tape.fed[k])


def enter_known(tape: FeedbackTape, chunks: Chunks, s: Tensor) -> Tensor:
    """u [T, B, d] of all tokens at once, for fed-back s [T, B, d] that an earlier pass found."""
    if tape.inputs is None:
        return tape.e[:-1]
    tape.s[1:-1] = s
    h = tape.boundary_states(chunks.first, chunks.fresh, chunks.start)
    tape.r[:], tape.r_scale[:] = normalise(h, tape.eps)
    tape.fed[:] = product(tape.r, tape.inputs.weight)
    fed = tape.fed[chunks.number, torch.arange(s.shape[1], device=s.device)]
    return _merge(tape, tape.e[:-1], tape.gate_e[:-1], fed)


def enter_backward(tape: FeedbackTape, chunks: Chunks, k: int, at: Slots, du: Tensor) -> None:
    """Pass the gradient of chunk k's u on to e, to the gate, and to the state that was fed back."""
    at.put(tape.de, du)
    if tape.inputs is None:
        return
    gate_h, value = tape.fed[k].chunk(2, dim=-1)
    gate = torch.sigmoid(at.get(tape.gate_e) + gate_h)
    own = du if tape.own is None else du[..., tape.own]
    d_value = tape.alpha * own * gate
    d_gate = d_value * value * (1 - gate)
    at.put(tape.dgate_e, d_gate)
    tape.dfed[k] = torch.cat((d_gate.sum(dim=0), d_value.sum(dim=0)), dim=-1)
    dr = tape.seam.total(product_backward(tape.dfed[k], tape.inputs.weight))
    dh = normalise_backward(torch.zeros_like(dr), dr, tape.r[k], tape.r_scale[k])
    tape.hand_back(dh, chunks.first[k], chunks.fresh[k], chunks.start[k])


def _merge(tape: FeedbackTape, e: Tensor, gate_e: Tensor, fed: Tensor) -> Tensor:
    gate_h, value = fed.chunk(2, dim=-1)
    added = tape.alpha * torch.sigmoid(gate_e + gate_h) * value
    if tape.own is None:
        return e + added
    columns = torch.zeros_like(e)
    columns[..., tape.own] = added
    return e + tape.seam.total(columns)
