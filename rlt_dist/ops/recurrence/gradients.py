"""Weight and memory gradients: one large product each, from what backward left on the tape."""

import torch.nn.functional as F
from torch import Tensor

from rlt_dist.ops.recurrence.arithmetic import by_lane, normalise, outer
from rlt_dist.ops.recurrence.problem import FeedbackInputs, LayerWeights, Memory, Operands, Shape
from rlt_dist.ops.recurrence.tape import FeedbackTape, LayerTape, Tape


def gradients(tape: Tape) -> Operands:
    """Gradients of all operands, after backward has gone through every chunk."""
    shape = tape.plan.shape
    return Operands(
        e=tape.feedback.de[:-1],
        fed=_feedback_gradients(tape.feedback),
        memories=_memory_gradients(tape),
        windows=[layer.dwindow_before() for layer in tape.layers],
        weights=[_weight_gradients(layer, shape) for layer in tape.layers],
    )


def _weight_gradients(tape: LayerTape, shape: Shape) -> LayerWeights:
    whole = tape.whole
    gate, up = whole("gate_up").chunk(2, dim=-1)
    return LayerWeights(
        qkv=outer(whole("d_qkv"), normalise(whole("x0"), shape.eps)),
        o=outer(whole("d_attn"), whole("attended")),
        cross_q=outer(whole("d_cross_q"), normalise(whole("x1"), shape.eps)),
        cross_o=outer(whole("d_cross"), whole("crossed")),
        gate_up=outer(whole("d_gate_up"), normalise(whole("x2"), shape.eps)),
        down=outer(whole("d_ffn"), F.silu(gate) * up),
    )


def _memory_gradients(tape: Tape) -> list[Memory]:
    """Each group's gradient: the sum over the layers that read it."""
    sums: dict[int, Memory] = {}
    for group, layer in zip(tape.plan.groups, tape.layers, strict=True):
        new = _memory_gradient(layer, tape.plan.shape.kv_heads)
        old = sums.get(group)
        sums[group] = new if old is None else Memory(old.k + new.k, old.v + new.v)
    return [sums[group] for group in sorted(sums)]


def _memory_gradient(tape: LayerTape, kv_heads: int) -> Memory:
    def grouped(name: str) -> Tensor:
        return by_lane(tape.whole(name), kv_heads)

    return Memory(
        grouped("d_score").transpose(-1, -2) @ grouped("cross_query"),
        grouped("cross_weight").transpose(-1, -2) @ grouped("d_crossed"),
    )


def _feedback_gradients(tape: FeedbackTape) -> FeedbackInputs | None:
    if tape.inputs is None:
        return None
    return FeedbackInputs(
        tape.dgate_e[:-1], outer(tape.dfed, tape.r), tape.dinitial, tape.ds[0], tape.dboundary
    )
