"""Weight and memory gradients: one large product each, from what backward left on the tape."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlt_dist.ops.recurrence.arithmetic import by_lane
from rlt_dist.ops.recurrence.problem import FeedbackInputs, LayerWeights, Memory, Operands
from rlt_dist.ops.recurrence.tape import LayerTape, Tape


class WeightSums(NamedTuple):
    """Gradients of weights, which micro-batches may share.

    Attributes:
        layers: by layer.
        merge: of `FeedbackInputs.weight`; None where there is no merge.
    """

    layers: Sequence[LayerWeights]
    merge: Tensor | None


def zero_weights(operands: Operands) -> WeightSums:
    """Where the weight gradients of all that have the operands' weights are added up."""
    layers = [LayerWeights(*map(torch.zeros_like, weights)) for weights in operands.weights]
    return WeightSums(layers, operands.fed and torch.zeros_like(operands.fed.weight))


def zero_gradients(operands: Operands, weights: WeightSums) -> Operands:
    """Where all gradients are added up, those of weights in `weights`."""
    fed = operands.fed
    if fed is not None and weights.merge is not None:
        fed = FeedbackInputs(*map(torch.zeros_like, fed))._replace(weight=weights.merge)
    return Operands(
        torch.zeros_like(operands.e),
        fed,
        [Memory(*map(torch.zeros_like, memory)) for memory in operands.memories],
        [torch.zeros_like(window) for window in operands.windows],
        weights.layers,
    )


# What the tokens of a tape give, after backward has gone through every chunk of it. Not here is
# what they give to the tokens before them (`Tape.gradient_before`).


def add_inputs(tape: Tape, sums: Operands, tokens: slice) -> None:
    """Add to the gradients of e, of its half of the gate, of s* and of the memories."""
    sums.e[tokens] = tape.feedback.de[:-1]
    if sums.fed is not None:
        sums.fed.gate_e[tokens] = tape.feedback.dgate_e[:-1]
        sums.fed.initial.add_(tape.feedback.dinitial)
    for group, layer in zip(tape.plan.groups, tape.layers, strict=True):
        _add_memory(layer, sums.memories[group], tape.plan.shape.kv_heads)


def add_weights(tape: Tape, sums: WeightSums) -> None:
    """Add to the gradients of weights."""
    if sums.merge is not None and tape.feedback.inputs is not None:
        _add_outer(sums.merge, tape.feedback.dfed, tape.feedback.r)
    for layer, weights in zip(tape.layers, sums.layers, strict=True):
        _add_layer(layer, weights)


def _add_layer(tape: LayerTape, sums: LayerWeights) -> None:
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


def _add_outer(total: Tensor, dy: Tensor, x: Tensor) -> None:
    """Add the gradient of `product` with respect to its weight: the sum over rows of dy x^T."""
    total.addmm_(dy.flatten(0, -2).T, x.flatten(0, -2))
