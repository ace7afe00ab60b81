"""The recurrent decoder: its modules and state as a problem for the recurrence core."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import cast

import torch
from torch import Tensor, nn

from rlt_dist.config.model import RltConfig
from rlt_dist.models.rlt.layers import DecoderLayer, KeyValue, Segment
from rlt_dist.models.rlt.pieces import Merge
from rlt_dist.models.state import State
from rlt_dist.ops.reach import newest
from rlt_dist.ops.recurrence.problem import (
    LayerMasks,
    LayerWeights,
    Memory,
    Operands,
    Plan,
    Shape,
)
from rlt_dist.ops.seam import Seam


class Decoder:
    """The decoder layers that are here, with the merge where it is here."""

    def __init__(
        self, config: RltConfig, layers: nn.ModuleDict, merge: Merge | None, seam: Seam
    ) -> None:
        self._config, self._merge, self._seam = config, merge, seam
        self._layers = {int(number): cast(DecoderLayer, layer) for number, layer in layers.items()}

    def folded(self) -> tuple[list[LayerWeights], Tensor | None]:
        """Weights as the core takes them: by layer, and the merge's."""
        layers = [layer.folded() for layer in self._layers.values()]
        return layers, None if self._merge is None else self._merge.folded()

    def problem(
        self,
        e: Tensor,
        memory: Mapping[int, KeyValue],
        segment: Segment,
        state: State,
        folded: tuple[list[LayerWeights], Tensor | None],
    ) -> tuple[Plan, Operands]:
        """What the core is given of a segment.

        Args:
            e: encoder outputs [b, T, d].
            memory: by group, the carried entries followed by the segment's, [b, P + T, KV, d_head].
            folded: what `folded` gave.
        """
        weights, of_merge = folded
        e, fed = e.transpose(0, 1), None
        if self._merge is not None and of_merge is not None:
            fed = self._merge.inputs(e, state, of_merge)
        shape = (len(e), self._config.d_model)
        plan = replace(
            self._plan(segment.position.T, state),
            cos=segment.tables[0].transpose(0, 1),
            sin=segment.tables[1].transpose(0, 1),
            masks=[_masks(segment, j, shape) for j in self._layers],
        )
        memories = [Memory(k.transpose(1, 2), v.transpose(1, 2)) for k, v in memory.values()]
        windows = [_window(state, j, self._config.window - 1) for j in self._layers]
        return plan, Operands(e, fed, memories, windows, weights)

    def sketch(
        self, position: Tensor, state: State, weights: Sequence[LayerWeights]
    ) -> tuple[Plan, Operands]:
        """A problem of the same sizes: for what can be planned before anything is computed.

        Args:
            position: int64 [T, b].
            weights: what `folded` gave of the layers.
        """
        like = weights[0].o
        e = like.new_empty(*position.shape, self._config.d_model, device="meta")
        windows = [_window(state, j, self._config.window - 1) for j in self._layers]
        return self._plan(position, state), Operands(e, None, [], windows, weights)

    def _plan(self, position: Tensor, state: State) -> Plan:
        """The plan, but for rotary tables and masks."""
        groups = [self._config.memory_group(j) for j in self._layers]
        here = sorted(set(groups))
        return Plan(
            shape=self._shape(),
            position=position,
            cos=position.new_empty(0),
            sin=position.new_empty(0),
            feedback=self._config.chunk,
            past=state[f"memory.{groups[0]}.k"].shape[1],
            carried=state[f"decoder.{next(iter(self._layers))}.k"].shape[1],
            reach=self._config.memory_len,
            groups=[here.index(group) for group in groups],
            masks=[],
            alpha=self._config.alpha,
            seam=self._seam,
        )

    def carried(self, plan: Plan, windows: Sequence[Tensor]) -> State:
        """The windows that a segment leaves behind, by layer, as state."""
        filled = min(self._config.window - 1, plan.carried + len(plan.position))
        return {
            f"decoder.{j}.{name}": newest(entries.transpose(0, 1), filled).contiguous()
            for j, window in zip(self._layers, windows, strict=True)
            for name, entries in zip("kv", window.unbind(dim=2), strict=True)
        }

    def _shape(self) -> Shape:
        config, width = self._config, self._config.head_width
        attn = next(iter(self._layers.values())).attn
        heads, kv_heads = len(attn.q.weight) // width, len(attn.k.weight) // width
        return Shape(heads, kv_heads, width, config.window, config.eps)


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
