"""What a pass over a segment leaves for its backward: preallocated buffers, time first.

Buffers of tokens have T + 1 slots, the last for padding. They start as zeros, so what padding holds
and what no token attends to stay zero. The loop in torch and the compiled one use the same buffers.
"""

import torch
from torch import Tensor

from rlt_dist.ops.recurrence.chunks import Slots
from rlt_dist.ops.recurrence.problem import (
    LayerMasks,
    Memory,
    Operands,
    Plan,
    padded,
)


class LayerTape:
    """One layer's buffers.

    Attributes:
        weights, memory, masks: the layer's; masks [T + 1, B, d].
        entries: keys and values [W + T, B, 2, KV, w]: W - 1 carried in, then the tokens'.
        dentries: their gradients.
        kept: by name, activations [T + 1, B, ...] and, in backward, gradients.
    """

    dentries: Tensor

    def __init__(self, plan: Plan, operands: Operands, layer: int) -> None:
        self.weights = operands.weights[layer]
        memory = operands.memories[plan.groups[layer]]
        self.memory = Memory(memory.k.contiguous(), memory.v.contiguous())
        masks = plan.masks[layer]
        self.masks = LayerMasks(*(mask if mask is None else padded(mask) for mask in masks))
        window = operands.windows[layer]
        room = window.new_zeros(plan.chunks.tokens + 1, *window.shape[1:])
        self.entries = torch.cat((window, room))
        self._tokens, self._window = plan.chunks.tokens, plan.shape.window
        self._sizes = _sizes(plan, operands, layer)
        self._template = operands.e
        self.kept = self._allocate(forward=True)

    def begin_backward(self, dwindow: Tensor) -> None:
        """Make room for gradients; `dwindow` is that of the window after the segment."""
        self.dentries = torch.zeros_like(self.entries)
        self.dentries[self._tokens : self._tokens + self._window - 1] = dwindow
        self.kept |= self._allocate(forward=False)

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
        seen = self.entries.unfold(0, self._window, 1)
        k, v = at.get(seen).movedim(-1, -2).unbind(dim=2)
        return k, v

    def add_to_windows(self, at: Slots, dk: Tensor, dv: Tensor) -> None:
        """Add gradients [C, B, KV, W, w] to the entries that each token saw."""
        both = torch.stack((dk, dv), dim=2)
        for slot in range(self._window):
            entries = self.dentries[slot:]
            at.put(entries, at.get(entries) + both[..., slot, :])

    def _allocate(self, *, forward: bool) -> dict[str, Tensor]:
        lanes = self._template.shape[1]
        return {
            name: self._template.new_zeros(self._tokens + 1, lanes, *size)
            for name, size in self._sizes.items()
            if name.startswith("d_") != forward
        }


def _sizes(plan: Plan, operands: Operands, layer: int) -> dict[str, tuple[int, ...]]:
    """What is kept of a token: activations, and gradients under names that begin with d_."""
    shape, weights = plan.shape, operands.weights[layer]
    d, queries, memory = (
        operands.e.shape[2],
        shape.heads * shape.head_width,
        operands.memories[0].k.shape[2],
    )
    heads = (shape.heads, shape.head_width)
    return {
        "x0": (d,),
        "query": heads,
        "weight": (shape.heads, shape.window),
        "attended": (queries,),
        "x1": (d,),
        "cross_query": heads,
        "cross_weight": (shape.heads, memory),
        "crossed": (queries,),
        "x2": (d,),
        "gate_up": (len(weights.gate_up),),
        "d_attn": (d,),
        "d_qkv": (len(weights.qkv),),
        "d_cross": (d,),
        "d_cross_q": (queries,),
        "d_crossed": heads,
        "d_score": (shape.heads, memory),
        "d_ffn": (d,),
        "d_gate_up": (len(weights.gate_up),),
    }


class FeedbackTape:
    """The feedback's buffers.

    Attributes:
        e, gate_e: [T + 1, B, d].
        s: [T + 2, B, d]; slot 0 was carried in, token t stands at t + 1.
        r, fed: [K, B, d] and [K, B, 2 d]: by chunk, h / rms(h) and its product with the weight.
        ds, de, dgate_e, dfed, dinitial, dboundary: gradients.
    """

    ds: Tensor
    de: Tensor
    dgate_e: Tensor
    dfed: Tensor
    dinitial: Tensor
    dboundary: Tensor

    def __init__(self, plan: Plan, operands: Operands) -> None:
        self.inputs, self.alpha, self.eps = operands.fed, plan.alpha, plan.shape.eps
        self.e = padded(operands.e)
        self.s = self.e.new_zeros(len(self.e) + 1, *self.e.shape[1:])
        if self.inputs is not None:
            self.s[0] = self.inputs.s
            self.gate_e = padded(self.inputs.gate_e)
            self.initial = self.inputs.initial.contiguous()
            self.boundary = self.inputs.boundary.contiguous()
            chunks, (lanes, d) = len(plan.chunks), self.e.shape[1:]
            self.r = self.e.new_zeros(chunks, lanes, d)
            self.fed = self.e.new_zeros(chunks, lanes, 2 * d)

    def begin_backward(self, ds: Tensor) -> None:
        """Make room for gradients; `ds` [T, B, d] is that of the outputs."""
        self.ds, self.de = torch.zeros_like(self.s), torch.zeros_like(self.e)
        self.ds[1:-1] = ds
        if self.inputs is not None:
            self.dgate_e, self.dfed = torch.zeros_like(self.e), torch.zeros_like(self.fed)
            self.dinitial = torch.zeros_like(self.initial)
            self.dboundary = torch.zeros_like(self.boundary)

    def outputs(self) -> Tensor:
        """[T, B, d]"""
        return self.s[1:-1]


class Tape:
    """Everything that a pass over a segment keeps."""

    def __init__(self, plan: Plan, operands: Operands) -> None:
        self.plan = plan
        self.layers = [LayerTape(plan, operands, layer) for layer in range(len(plan.groups))]
        self.feedback = FeedbackTape(plan, operands)
