"""What a pass over a segment leaves for its backward: preallocated buffers, time first.

Buffers of tokens have T + 1 slots, the last for padding. The loop in torch and the compiled one use
the same buffers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from rlt_dist.ops.recurrence.chunks import Slots
from rlt_dist.ops.recurrence.problem import (
    Border,
    FedBack,
    LayerMasks,
    Memory,
    Operands,
    Plan,
    Shape,
    padded,
)

_BLANK = ("weight", "cross_weight", "d_score", "cross_log")
"""Zeros at first: what is kept by token and by entry, since what a token does not attend to is
never written; and the log of a softmax's sum, which the loop in Triton alone leaves for itself."""


class Store:
    """Memory for tapes that follow one another: the next takes the place of the one before."""

    def __init__(self) -> None:
        self._flat: dict[tuple[int, str], Tensor] = {}

    def take(self, layer: int, name: str, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A tensor [T + 1, ...] of `like`'s type and place.

        `_BLANK` ones are zeros. Of others only the slot of padding is, which a replay does not
        write and the loop in torch reads.
        """
        flat, size = self._flat.get((layer, name)), prod(shape)
        if flat is None or len(flat) < size:
            flat = self._flat[layer, name] = like.new_empty(size)
        taken = flat[:size].view(shape)
        (taken if name in _BLANK else taken[-1]).zero_()
        return taken


class LayerTape:
    """One layer's buffers.

    Attributes:
        weights, masks, seam: the layer's; masks [T + 1, B, d].
        memory: the entries that tokens may see, the first of `memory_rows`.
        entries: keys and values [W + T, B, 2, KV, w]: W - 1 carried in, then the tokens'.
        dentries: their gradients.
        kept: by name, buffers [T + 1, B, ...]: forward's, and in backward its own.
    """

    dentries: Tensor

    def __init__(self, plan: Plan, operands: Operands, layer: int, store: Store) -> None:
        self.weights, self.seam = operands.weights[layer], plan.seam
        memory, known = operands.memories[plan.groups[layer]], plan.past + plan.chunks.tokens
        self.memory = Memory(memory.k[:, :, :known], memory.v[:, :, :known])
        self.memory_rows = memory.k.shape[2]
        masks = plan.masks[layer]
        self.masks = LayerMasks(*(mask if mask is None else padded(mask) for mask in masks))
        window = operands.windows[layer]
        room = window.new_zeros(plan.chunks.tokens + 1, *window.shape[1:])
        self.entries = torch.cat((window, room))
        self._tokens, self._window = plan.chunks.tokens, plan.shape.window
        seen = self.entries.unfold(0, self._window, 1).movedim(-1, -2)
        self._keys, self._values = seen.unbind(dim=2)
        self._sizes = _sizes(plan, operands, layer)
        self._layer, self._template = layer, operands.e
        self.kept = self._allocate(self._sizes.forward, store)

    def begin_backward(self, dwindow: Tensor, store: Store) -> None:
        """Make room for gradients; `dwindow` is that of the window after the segment."""
        self.dentries = torch.zeros_like(self.entries)
        self.dentries[self._tokens : self._tokens + self._window - 1] = dwindow
        self.kept |= self._allocate(self._sizes.backward, store)

    def get(self, at: Slots, name: str) -> Tensor:
        """A chunk's part [C, B, ...] of a buffer."""
        return at.get(self.kept[name])

    def put(self, at: Slots, **values: Tensor) -> None:
        """Keep values [C, B, ...] of a chunk under their names."""
        for name, value in values.items():
            at.put(self.kept[name], value)

    def whole(self, name: str) -> Tensor:
        """A buffer of all tokens, [T, B, ...]."""
        return self.kept[name][: self._tokens]

    def window_after(self) -> Tensor:
        """The window that the segment leaves behind, [W - 1, B, 2, KV, w]."""
        return self.entries[self._tokens : self._tokens + self._window - 1].clone()

    def dwindow_before(self) -> Tensor:
        """The gradient of the window that was carried in."""
        return self.dentries[: self._window - 1]

    # A token at t sees slots t .. t + W - 1 of `entries`; the last is its own.

    def own(self, entries: Tensor) -> Tensor:
        """The tokens' own entries [T + 1, B, 2, KV, w]."""
        return entries[self._window - 1 :]

    def windows(self, at: Slots) -> tuple[Tensor, Tensor]:
        """Keys and values that each token of a chunk sees, each [C, B, KV, W, w]."""
        return at.get(self._keys), at.get(self._values)

    def add_to_windows(self, at: Slots, dk: Tensor, dv: Tensor) -> None:
        """Add gradients [C, B, KV, W, w] to the entries that each token saw."""
        both = torch.stack((dk, dv), dim=2)
        if at.index is None and at.count == 1:  # RLT-1, all of whose tokens come this way
            self.dentries[at.first : at.first + self._window] += both[0].permute(3, 0, 1, 2, 4)
            return
        for slot in range(self._window):
            entries = self.dentries[slot:]
            at.put(entries, at.get(entries) + both[..., slot, :])

    def _allocate(self, sizes: "Sizes", store: Store) -> dict[str, Tensor]:
        lanes = self._template.shape[1]
        return {
            name: store.take(self._layer, name, (self._tokens + 1, lanes, *size), self._template)
            for name, size in sizes.items()
        }


Sizes = dict[str, tuple[int, ...]]
"""By the name of a buffer, what it holds of a token."""


class BufferSizes(NamedTuple):
    """Attributes:
    forward: what forward keeps.
    backward: what backward adds while it is at a part: gradients, and the activations that cost
        more to keep for a whole segment than to form again from what forward kept.
    """

    forward: Sizes
    backward: Sizes


def buffer_sizes(shape: Shape, d: int, inner: int, memory: int) -> BufferSizes:
    """A layer's buffers. A sublayer's input is kept normalised, with the 1 / rms of it.

    Args:
        inner: f, columns of the feed-forward.
        memory: entries in front of the segment's tokens and theirs.
    """
    queries, keys_values = shape.heads * shape.head_width, 2 * shape.kv_heads * shape.head_width
    heads = (shape.heads, shape.head_width)
    forward: Sizes = {
        "attn_input": (d,),
        "attn_scale": (1,),
        "query": heads,
        "weight": (shape.heads, shape.window),
        "cross_input": (d,),
        "cross_scale": (1,),
        "cross_query": heads,
        "crossed": (queries,),
        "cross_log": (shape.heads,),
        "ffn_input": (d,),
        "ffn_scale": (1,),
        "gate_up": (2 * inner,),
    }
    backward: Sizes = {
        "attended": (queries,),
        "cross_weight": (shape.heads, memory),
        "d_attn": (d,),
        "d_qkv": (queries + keys_values,),
        "d_cross": (d,),
        "d_cross_q": (queries,),
        "d_crossed": heads,
        "d_score": (shape.heads, memory),
        "d_ffn": (d,),
        "d_gate_up": (2 * inner,),
    }
    return BufferSizes(forward, backward)


def numbers_of_token(sizes: BufferSizes) -> tuple[int, int]:
    """Numbers that a lane's token takes on a layer's tape, in forward and, besides, in backward."""
    forward, backward = (sum(map(prod, of_pass.values())) for of_pass in sizes)
    return forward, backward


def bytes_of_token(plan: Plan, operands: Operands) -> tuple[int, int]:
    """Bytes that a token of all lanes takes on a tape, in forward and, besides, in backward."""
    layers = [numbers_of_token(_sizes(plan, operands, j)) for j in range(len(plan.groups))]
    numbers = (sum(of_pass) for of_pass in zip(*layers, strict=True))
    forward, backward = (operands.e.shape[1] * operands.e.element_size() * n for n in numbers)
    return forward, backward


def _sizes(plan: Plan, operands: Operands, layer: int) -> BufferSizes:
    inner = operands.weights[layer].down.shape[1]
    memory = plan.past + plan.chunks.tokens
    return buffer_sizes(plan.shape, operands.e.shape[2], inner, memory)


def bytes_of_border(operands: Operands) -> int:
    """Bytes that are kept at a border between parts."""
    return sum(window.nbytes for window in operands.windows)


class FeedbackTape:
    """The feedback's buffers.

    Attributes:
        e, gate_e: [T + 1, B, d | d'].
        y: [T + 1, B, d], the last layer's outputs.
        s: [T + 2, B, d], outputs that are fed back; slot 0 was carried in, token t stands at t + 1.
        r, r_scale, fed: [K, B, d | 1 | 2 d'], by chunk: h / rms(h), 1 / rms(h), and r's product
            with the weight.
        own: the columns of d that this process forms; None: all.
        dy, ds, de, dgate_e, dfed, dinitial, dboundary: gradients.
    """

    dy: Tensor
    ds: Tensor
    de: Tensor
    dgate_e: Tensor
    dfed: Tensor
    dinitial: Tensor
    dboundary: Tensor

    def __init__(self, plan: Plan, operands: Operands, *, closed: bool = True) -> None:
        """Closed: the outputs here are those that are fed back, y a view of s."""
        self.inputs, self.alpha, self.eps = operands.fed, plan.alpha, plan.shape.eps
        self.seam, self._closed, self._chunks = plan.seam, closed, plan.chunks
        self.e = padded(operands.e)
        columns = plan.seam.own(d := self.e.shape[2])
        self.own = None if len(columns) == d else slice(columns.start, columns.stop)
        if self.inputs is None:
            self.y = torch.zeros_like(self.e)
        else:
            self.s = self.e.new_zeros(len(self.e) + 1, *self.e.shape[1:])
            self.s[0] = self.inputs.s
            self.y = self.s[1:] if closed else torch.zeros_like(self.e)
            self.gate_e = padded(self.inputs.gate_e)
            self.initial = self.inputs.initial.contiguous()
            self.boundary = self.inputs.boundary.contiguous()
            sizes = (d, 1, len(self.inputs.weight))
            chunks, lanes = len(plan.chunks), self.e.shape[1]
            self.r, self.r_scale, self.fed = (self.e.new_zeros(chunks, lanes, n) for n in sizes)

    def begin_backward(self, dy: Tensor | None, after: Border) -> None:
        """Make room for gradients, given those of the outputs [T, B, d] and of what comes after.

        None: those of the outputs are put in chunk by chunk.
        """
        self.de = torch.zeros_like(self.e)
        if self.inputs is None:
            self.dy = torch.zeros_like(self.y)
        else:
            self.ds = torch.zeros_like(self.s)
            self.dy = self.ds[1:] if self._closed else torch.zeros_like(self.y)
        if dy is not None:
            self.dy[:-1] = dy
        if self.inputs is not None:
            self.dgate_e, self.dfed = torch.zeros_like(self.gate_e), torch.zeros_like(self.fed)
            self.dinitial = torch.zeros_like(self.initial)
            self.dboundary = torch.zeros_like(self.boundary)
            if after.fed is not None:
                self.ds[-2] += after.fed.s
                self.hand_back(after.fed.boundary, *self._chunks.last())

    # A chunk's boundary state h is s* at a document's start, else the output before the chunk's
    # first token, else (where the chunk runs on from before the segment) the one carried in.

    def boundary_states(self, first: Tensor, fresh: Tensor, start: Tensor) -> Tensor:
        """h [..., B, d] of chunks, given by the facts [..., B] that `Chunks` has of them."""
        before = self.s[first, torch.arange(first.shape[-1], device=first.device)]
        fresh, start = fresh[..., None], start[..., None]
        return torch.where(fresh, torch.where(start, self.initial, before), self.boundary)

    def hand_back(self, dh: Tensor, first: Tensor, fresh: Tensor, start: Tensor) -> None:
        """Add the gradient [B, d] of a boundary state to what it came from."""
        fresh, start = fresh[:, None], start[:, None]
        self.dinitial += dh * (fresh & start)
        self.dboundary += dh * ~fresh
        self.ds[first, torch.arange(len(first), device=first.device)] += dh * (fresh & ~start)

    def after(self) -> FedBack | None:
        """What the token behind the last one is fed."""
        if self.inputs is None:
            return None
        return FedBack(self.s[-2].clone(), self.boundary_states(*self._chunks.last()))

    def gradient_before(self) -> FedBack | None:
        """The gradient of what the first token was fed."""
        return None if self.inputs is None else FedBack(self.ds[0], self.dboundary)

    def outputs(self) -> Tensor:
        """[T, B, d]"""
        return self.y[:-1]


@dataclass(frozen=True)
class Tape:
    """Everything that a pass over a segment, or over a part of one, keeps."""

    plan: Plan
    layers: Sequence[LayerTape]
    feedback: FeedbackTape

    @classmethod
    def blank(cls, plan: Plan, operands: Operands, store: Store, *, closed: bool = True) -> "Tape":
        """A tape with nothing on it yet; `closed` as in `FeedbackTape`."""
        layers = [LayerTape(plan, operands, layer, store) for layer in range(len(plan.groups))]
        return cls(plan, layers, FeedbackTape(plan, operands, closed=closed))

    def without_feedback(self, u: Tensor) -> "Tape":
        """The same layers, which are given u [T, B, d] for all tokens at once, as in RLT-0."""
        plan = replace(self.plan, feedback=0)
        feedback = FeedbackTape(plan, Operands(u, None, (), (), ()))
        return Tape(plan, self.layers, feedback)

    def after(self) -> Border:
        """What the token behind the last one needs."""
        return Border([layer.window_after() for layer in self.layers], self.feedback.after())

    def begin_backward(self, dy: Tensor | None, after: Border, store: Store) -> None:
        """Make room for gradients, given those of `after` and as in `FeedbackTape`."""
        self.feedback.begin_backward(dy, after)
        for layer, dwindow in zip(self.layers, after.windows, strict=True):
            layer.begin_backward(dwindow, store)

    def gradient_before(self) -> Border:
        """The gradient of what came from before the first token, when backward is through."""
        windows = [layer.dwindow_before() for layer in self.layers]
        return Border(windows, self.feedback.gradient_before())
