"""What a backend is given: a plan, which has no gradient, and operands, which have."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlt_dist.ops.reach import additive, reach_mask
from rlt_dist.ops.recurrence.chunks import Chunks, Slots, plan_chunks
from rlt_dist.ops.seam import WHOLE, Seam


@dataclass(frozen=True)
class Shape:
    """Sizes of decoder[i:j]; heads are those of this process."""

    heads: int
    kv_heads: int
    head_width: int
    window: int
    eps: float


class LayerMasks(NamedTuple):
    """Scaled dropout masks [T, B, d] of a layer's three sublayers; None: nothing drops."""

    attn: Tensor | None = None
    cross: Tensor | None = None
    ffn: Tensor | None = None


class Sight(NamedTuple):
    """Where a chunk's tokens stand and what they may see.

    Attributes:
        cos, sin: [C, B, 1, w / 2], rotary tables.
        window: additive mask [C, B, 1, 1, W] over the window's slots, oldest first.
        memory: additive mask [B, 1, C, 1, M] over the memory's entries.
    """

    cos: Tensor
    sin: Tensor
    window: Tensor
    memory: Tensor


@dataclass(frozen=True)
class Plan:
    """Everything of a segment that has no gradient.

    Attributes:
        shape: sizes.
        position: int64 [T, B], index of each token within its document.
        cos, sin: [T, B, 1, w / 2], rotary tables of those positions.
        feedback: tokens of a chunk, which run together; 0: RLT-0, all of them.
        past: memory entries in front of the segment's own.
        carried: window entries that were carried in; the slots in front of them are empty.
        reach: farthest distance that cross-attention sees; None: the whole document.
        groups: for each layer, which memory it reads.
        masks: for each layer, its dropout masks.
        alpha: weight of the fed-back state; RLT-0 has none.
        seam: over which processes heads, inner columns and the merge's columns are cut.
    """

    shape: Shape
    position: Tensor
    cos: Tensor
    sin: Tensor
    feedback: int
    past: int
    carried: int
    reach: int | None
    groups: Sequence[int]
    masks: Sequence[LayerMasks]
    alpha: float
    seam: Seam = WHOLE

    @cached_property
    def chunks(self) -> Chunks:
        """Which tokens run together."""
        return plan_chunks(self.position, self.feedback)

    def part(self, tokens: slice) -> "Plan":
        """The plan of some tokens, for which those before them are the past."""
        return replace(
            self,
            position=self.position[tokens],
            cos=self.cos[tokens],
            sin=self.sin[tokens],
            past=self.past + tokens.start,
            carried=min(self.carried + tokens.start, self.shape.window - 1),
            masks=[LayerMasks(*(m if m is None else m[tokens] for m in ms)) for ms in self.masks],
        )

    def sight(self, at: Slots) -> Sight:
        """What the tokens of a chunk see."""
        cos, sin, window, memory = (at.get(table) for table in self._tables)
        return Sight(cos, sin, window[:, :, None, None], memory.transpose(0, 1)[:, None, :, None])

    def ranges(self) -> tuple[Tensor, Tensor]:
        """The same as ranges, int64 [T, B]: the first window slot and the first memory entry seen.

        What a token sees ends with its own: slot W - 1, entry past + t.
        """
        newest = self.shape.window - 1
        token = torch.arange(len(self.position), device=self.position.device)[:, None]
        window = newest - torch.minimum(self.position, (self.carried + token).clamp(max=newest))
        farthest = self.position if self.reach is None else self.position.clamp(max=self.reach)
        return window, (self.past + token - farthest).clamp(min=0)

    @cached_property
    def seen(self) -> list[slice]:
        """For each chunk, the memory entries outside of which none of its tokens sees any."""
        farthest = torch.full_like(self.chunks.first, self.past)
        farthest.scatter_reduce_(0, self.chunks.number, self.ranges()[1], reduce="amin")
        end = torch.where(self.chunks.length > 0, self.chunks.first + self.chunks.length, 0)
        starts, ends = farthest.amin(dim=1).tolist(), end.amax(dim=1).tolist()
        return [slice(a, self.past + b) for a, b in zip(starts, ends, strict=True)]

    @cached_property
    def _tables(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        slot = torch.arange(self.shape.window, device=self.position.device)
        near = slot >= self.ranges()[0][:, :, None]
        seen = reach_mask(self.position.T, self.past, self.reach).transpose(0, 1)
        masks = [additive(allowed, self.cos.dtype) for allowed in (near, seen)]
        return padded(self.cos), padded(self.sin), padded(masks[0]), padded(masks[1])


class Memory(NamedTuple):
    """Keys and values [B, KV, M, w] that cross-attention reads, oldest first."""

    k: Tensor
    v: Tensor

    def part(self, entries: slice) -> "Memory":
        """Some of the entries, [B, KV, m, w]."""
        return Memory(self.k[:, :, entries], self.v[:, :, entries])


class LayerWeights(NamedTuple):
    """Weights of one decoder layer, [out, in], with the norms and 1 / sqrt(w) folded in.

    H, KV and f count what is this process's: the products by o, cross_o and down are its part of
    a sum over the seam.

    RMSNorm(x) W^T = (x / rms(x)) (W diag(norm))^T: inside the core a norm has no weight, and its
    gradient follows from the folded weight's by the chain rule outside.
    """

    qkv: Tensor
    """[(H + 2 KV) w, d]: queries, keys, values of the window's attention."""
    o: Tensor
    """[d, H w]"""
    cross_q: Tensor
    """[H w, d]"""
    cross_o: Tensor
    """[d, H w]"""
    gate_up: Tensor
    """[2 f, d]: gate, then up."""
    down: Tensor
    """[d, f]"""


class FeedbackInputs(NamedTuple):
    """What the merge u = e + alpha sigmoid(gate_e + W_g r) (W_s r), r = h / rms(h), is made of.

    Attributes:
        gate_e: [T, B, d'], the encoder's half of the gate, bias included; d' of the d columns that
            the merge adds to e are formed by this process.
        weight: [2 d', d], W_g above W_s, the state norm's weight folded in.
        initial: [B, d], the learned state that documents start from.
        s: [B, d], the output of the token before the segment.
        boundary: [B, d], the boundary state of a chunk that runs on from the segment before.
    """

    gate_e: Tensor
    weight: Tensor
    initial: Tensor
    s: Tensor
    boundary: Tensor


class FedBack(NamedTuple):
    """s and boundary [B, d] of `FeedbackInputs`."""

    s: Tensor
    boundary: Tensor


class Border(NamedTuple):
    """What a token needs of those before it, or the gradient of that.

    Attributes:
        windows: by layer, [W - 1, B, 2, KV, w], as in `Operands`.
        fed: None where there is no feedback, or nothing has a gradient.
    """

    windows: Sequence[Tensor]
    fed: FedBack | None = None


class Operands(NamedTuple):
    """Everything that has a gradient.

    Attributes:
        e: [T, B, d], encoder outputs.
        fed: the feedback; None: RLT-0.
        memories: by group.
        windows: by layer, [W - 1, B, 2, KV, w], keys and values carried in, oldest first.
        weights: by layer.
    """

    e: Tensor
    fed: FeedbackInputs | None
    memories: Sequence[Memory]
    windows: Sequence[Tensor]
    weights: Sequence[LayerWeights]

    def part(self, tokens: slice, border: Border) -> "Operands":
        """Those of some tokens; memories keep the entries of later ones, which nobody sees."""
        fed = self.fed
        if fed is not None and border.fed is not None:
            s, boundary = border.fed
            fed = fed._replace(gate_e=fed.gate_e[tokens], s=s, boundary=boundary)
        return self._replace(e=self.e[tokens], fed=fed, windows=border.windows)

    def detached(self) -> "Operands":
        """The same without autograd."""
        return self.like([tensor.detach() for tensor in self.flat()])

    def with_contiguous_memories(self) -> "Operands":
        """Memories as they are best read, made so once for all layers and tokens."""
        memories = [Memory(k.contiguous(), v.contiguous()) for k, v in self.memories]
        return self._replace(memories=memories)

    def before(self) -> Border:
        """What the first token needs of those before it."""
        return Border(self.windows, self.fed and FedBack(self.fed.s, self.fed.boundary))

    def flat(self) -> list[Tensor]:
        """All tensors in one order, as autograd wants them."""
        parts: list[Sequence[Tensor]] = [[self.e], self.fed or (), *self.memories, self.windows]
        return [tensor for part in [*parts, *self.weights] for tensor in part]

    def like(self, tensors: Sequence[Any]) -> "Operands":
        """The inverse of `flat`, for tensors that stand for this one's."""
        left = iter(tensors)

        def take(kind: Any) -> Any:
            return kind(*(next(left) for _ in kind._fields))

        return Operands(
            next(left),
            None if self.fed is None else take(FeedbackInputs),
            [take(Memory) for _ in self.memories],
            [next(left) for _ in self.windows],
            [take(LayerWeights) for _ in self.weights],
        )


def padded(x: Tensor) -> Tensor:
    """[T, B, ...] with one more slot of zeros, where padding stands."""
    return torch.cat((x, x.new_zeros(1, *x.shape[1:])))
