"""The recurrent decoder: chunk by chunk, the last output fed back into the next chunk."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from rlt_dist.config.model import RltConfig
from rlt_dist.models.rlt.chunks import Chunk, ChunkPlan, advance, last_output, plan_chunks
from rlt_dist.models.rlt.layers import ChunkView, KeyValue, LayerMasks, Segment
from rlt_dist.models.rlt.pieces import Merge
from rlt_dist.models.state import State
from rlt_dist.ops.reach import newest, reach_mask


class Feedback:
    """The recurrent output s, and the boundary state h that a running chunk's merges share."""

    def __init__(self, merge: Merge, state: State) -> None:
        self.merge = merge
        self.s = state["s"]
        # Only RLT-2's chunks run on across segments; RLT-1 never reads a boundary state.
        self.boundary = state.get("boundary", self.s)

    def enter(self, e: Tensor, chunk: Chunk) -> Tensor:
        """u [b, C, d] for a chunk's encoder outputs e [b, C, d]."""
        initial = self.merge.initial_state.expand_as(self.s)
        previous = torch.where(chunk.start[:, None], initial, self.s)
        h = torch.where(chunk.fresh[:, None], previous, self.boundary)
        self.boundary = torch.where((chunk.length > 0)[:, None], h, self.boundary)
        return self.merge(e, h)

    def leave(self, output: Tensor, chunk: Chunk) -> None:
        """Take the output of each row's last token from [b, C, d]."""
        self.s = last_output(output, chunk, self.s)

    def carried(self, state: State) -> State:
        """Its part of the state after the segment."""
        ends = {"s": self.s, "boundary": self.boundary}
        return {name: tensor for name, tensor in ends.items() if name in state}


def decode(
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
        merge: None for RLT-0, which has no feedback.
        e: encoder outputs [b, T, d].
        memory: each group's carried entries followed by the segment's, [b, P + T, KV, d_head].

    Returns:
        decoder outputs s [b, T, d], and the decoder's part of the state after the segment.
    """
    plan = plan_chunks(segment.position, config.feedback)
    feedback = Feedback(merge, state) if merge is not None else None
    windows = [
        KeyValue(state[f"decoder.{j}.k"], state[f"decoder.{j}.v"]) for j in range(len(layers))
    ]
    views = _views(config, plan, segment, e.shape, windows[0].k.shape[1], memory[0].k.shape[1])
    outputs = []
    for chunk, x, view in zip(plan.chunks, plan.split(e), views, strict=True):
        x = feedback.enter(x, chunk) if feedback else x
        for j, layer in enumerate(layers):
            group = memory[j * config.memory_groups // config.decoder_layers]
            x, seen = layer(x, view, windows[j], group, j)
            windows[j] = _slide(windows[j], seen, chunk, config.window - 1)
        if feedback:
            feedback.leave(x, chunk)
        outputs.append(x)
    carried = feedback.carried(state) if feedback else {}
    # Padding widens a window that is still filling; how far must not depend on other rows.
    keep = min(config.window - 1, state["decoder.0.k"].shape[1] + e.shape[1])
    for j, window in enumerate(windows):
        carried |= {
            f"decoder.{j}.k": newest(window.k, keep),
            f"decoder.{j}.v": newest(window.v, keep),
        }
    return plan.join(outputs), carried


def _slide(window: KeyValue, seen: KeyValue, chunk: Chunk, keep: int) -> KeyValue:
    """The window after a chunk, from the entries before it followed by the chunk's."""
    past = window.k.shape[1]
    return KeyValue(advance(seen.k, past, chunk, keep), advance(seen.v, past, chunk, keep))


def _views(
    config: RltConfig,
    plan: ChunkPlan,
    segment: Segment,
    shape: torch.Size,
    window_past: int,
    memory_entries: int,
) -> Iterator[ChunkView]:
    """What the layers see of each chunk; `shape` is that of the encoder outputs."""
    cos, sin = segment.tables
    past = memory_entries - shape[1]
    memory_allowed = plan.split(reach_mask(segment.position, past, config.memory_len))
    tables = zip(plan.split(cos), plan.split(sin), strict=True)
    masks = _dropout_masks(config, plan, segment, shape)
    parts = zip(plan.split(segment.position), memory_allowed, tables, masks, strict=True)
    for position, memory, table, mask in parts:
        window = reach_mask(position, window_past, config.window - 1)
        yield ChunkView(table, window, memory, mask)
        window_past = min(config.window - 1, window_past + position.shape[1])


def _dropout_masks(
    config: RltConfig, plan: ChunkPlan, segment: Segment, shape: torch.Size
) -> list[list[LayerMasks]]:
    """Masks by chunk and layer, drawn for the whole segment and then cut."""

    def cut(site: str, layer: int) -> list[Tensor] | list[None]:
        mask = segment.dropout.mask(f"decoder.{site}", layer, tuple(shape[1:]))
        return [None] * len(plan.chunks) if mask is None else plan.split(mask)

    by_layer = [
        [
            LayerMasks(*sites)
            for sites in zip(cut("attn", j), cut("cross", j), cut("ffn", j), strict=True)
        ]
        for j in range(config.decoder_layers)
    ]
    return [list(layers) for layers in zip(*by_layer, strict=True)]
