"""Weight and memory gradients: one large product each, from what backward left on the tape."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rlt_dist.ops.recurrence.arithmetic import by_lane
from rlt_dist.ops.recurrence.problem import FeedbackInputs, LayerWeights, Memory, Operands
from rlt_dist.ops.recurrence.tape import FeedbackTape, LayerTape, Tape


def zero_gradients(operands: Operands) -> Operands:
    """Where `add_gradients` adds up."""
    return operands.like([torch.zeros_like(tensor) for tensor in operands.flat()])


def add_gradients(tape: Tape, sums: Operands, tokens: slice) -> None:
    """Add what the tokens of a tape give, after backward has gone through every chunk of it.

    Not here is what they give to the tokens before them (`Tape.gradient_before`).
    """
    sums.e[tokens] = tape.feedback.de[:-1]
    if sums.fed is not None:
        _add_feedback(tape.feedback, sums.fed, tokens)
    for group, layer, weights in zip(tape.plan.groups, tape.layers, sums.weights, strict=True):
        _add_memory(layer, sums.memories[group], tape.plan.shape.kv_heads)
        _add_weights(layer, weights)


def _add_weights(tape: LayerTape, sums: LayerWeights) -> None:
    whole = tape.whole
    gate, up = whole("gate_up").chunk(2, dim=-1)
    _add_outer(sums.qkv, whole("d_qkv"), whole("attn_input"))
    _add_outer(sums.o, whole("d_attn"), whole("attended"))
    _add_outer(sums.cross_q, whole("d_cross_q"), whole("cross_input"))
    _add_outer(sums.cross_o, whole("d_cross"), whole("crossed"))
    _add_outer(sums.gate_up, whole("d_gate_up"), whole("ffn_input"))
    _add_outer(sums.down, whole("d_ffn"), F.silu(gate) * up)


def _add_memory(tape: LayerTape, sums: Memory, kv_heads: int) -> None:
    """Layers that read the same memory add to the same sums."""

    def grouped(name: str) -> Tensor:
        return by_lane(tape.whole(name), kv_heads).flatten(0, 1)

    entries = tape.memory.k.shape[2]
    k, v = (total[:, :, :entries].flatten(0, 1) for total in sums)
    k.baddbmm_(grouped("d_score").transpose(-1, -2), grouped("cross_query"))
    v.baddbmm_(grouped("cross_weight").transpose(-1, -2), grouped("d_crossed"))


def _add_feedback(tape: FeedbackTape, sums: FeedbackInputs, tokens: slice) -> None:
    sums.gate_e[tokens] = tape.dgate_e[:-1]
    _add_outer(sums.weight, tape.dfed, tape.r)
    sums.initial.add_(tape.dinitial)


def _add_outer(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add the gradient of `product` with respect to its weight: the sum over rows of dy x^T."""
    total.addmm_(dy.flatten(0, -2).T, x.flatten(0, -2))
