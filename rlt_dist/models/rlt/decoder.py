"""The recurrent decoder: its modules and state as a problem for the recurrence core."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from rlt_dist.config.model import RltConfig
from rlt_dist.models.rlt.layers import DecoderLayer, KeyValue, Segment
from rlt_dist.models.rlt.pieces import Merge
from rlt_dist.models.state import State
from rlt_dist.ops.reach import newest
from rlt_dist.ops.recurrence.dispatch import Recurrence
from rlt_dist.ops.recurrence.problem import (
    LayerMasks,
    Memory,
    Operands,
    Plan,
    Shape,
)
from rlt_dist.ops.recurrence.reference import boundary_after


def decode(
    recurrence: Recurrence,
    config: RltConfig,
    layers: nn.ModuleList,
    merge: Merge | None,
    e: Tensor,
    memory: Sequence[KeyValue],
    segment: Segment,
    state: State,
) -> tuple[Tensor, State]:
    """Run the decoder over a segment.

    Args:
        recurrence: how it is computed.
        merge: None for RLT-0, which has no feedback.
        e: encoder outputs [b, T, d].
        memory: each group's carried entries followed by the segment's, [b, P + T, KV, d_head].

    Returns:
        decoder outputs s [b, T, d], and the decoder's part of the state after the segment.
    """
    carried_in = state["decoder.0.k"].shape[1]
    plan = _plan(config, segment, memory, carried_in, e.shape)
    operands = Operands(
        e=e.transpose(0, 1),
        fed=None if merge is None else merge.inputs(e.transpose(0, 1), state),
        memories=[Memory(k.transpose(1, 2), v.transpose(1, 2)) for k, v in memory],
        windows=[_window(state, j, config.window - 1) for j in range(len(layers))],
        weights=[cast(DecoderLayer, layer).folded() for layer in layers],
    )
    s, windows = recurrence.run(plan, operands)
    filled = min(config.window - 1, plan.carried + e.shape[1])
    carried = {
        f"decoder.{j}.{name}": newest(entries.transpose(0, 1), filled).contiguous()
        for j, window in enumerate(windows)
        for name, entries in zip("kv", window.unbind(dim=2), strict=True)
    }
    if operands.fed is not None:
        carried["s"] = s[-1]
        if "boundary" in state:
            carried["boundary"] = boundary_after(plan, operands.fed, s)
    return s.transpose(0, 1), carried


def _plan(
    config: RltConfig,
    segment: Segment,
    memory: Sequence[KeyValue],
    carried: int,
    shape: torch.Size,
) -> Plan:
    """What has no gradient; `carried` counts window entries, `shape` is the encoder outputs'."""
    position = segment.position.T
    cos, sin = (table.transpose(0, 1) for table in segment.tables)
    layers = range(config.decoder_layers)
    return Plan(
        shape=Shape(
            config.heads, config.key_value_heads, config.head_width, config.window, config.eps
        ),
        position=position,
        cos=cos,
        sin=sin,
        feedback=config.feedback,
        past=memory[0].k.shape[1] - shape[1],
        carried=carried,
        reach=config.memory_len,
        groups=[j * config.memory_groups // config.decoder_layers for j in layers],
        masks=[_masks(segment, j, tuple(shape[1:])) for j in layers],
        alpha=config.alpha,
    )


def _masks(segment: Segment, layer: int, shape: tuple[int, ...]) -> LayerMasks:
    """Dropout masks of a layer, drawn whole: a mask never depends on how chunks are cut."""
    masks = [segment.dropout.mask(f"decoder.{site}", layer, shape) for site in LayerMasks._fields]
    return LayerMasks(*(mask if mask is None else mask.transpose(0, 1) for mask in masks))


def _window(state: State, layer: int, slots: int) -> Tensor:
    """The entries carried in, [W - 1, b, 2, KV, d_head]: zeros in front while it still fills."""
    k, v = state[f"decoder.{layer}.k"], state[f"decoder.{layer}.v"]
    entries = torch.stack((k, v), dim=2).transpose(0, 1)
    empty = entries.new_zeros(slots - len(entries), *entries.shape[1:])
    return torch.cat((empty, entries))
