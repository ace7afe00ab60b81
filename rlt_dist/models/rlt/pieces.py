"""Pieces of the Recurrent Looped Transformer around its layers: memory, merge, head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlt_dist.config.model import RltConfig
from rlt_dist.models.modules import unfilled
from rlt_dist.models.rlt.layers import KeyValue, Tables, linear
from rlt_dist.models.state import State
from rlt_dist.ops.recurrence.problem import FeedbackInputs
from rlt_dist.ops.rotary import rotate
from rlt_dist.ops.seam import WHOLE, Seam


class MemoryGroup(nn.Module):
    """One group's key and value projections of the encoder output."""

    def __init__(self, config: RltConfig) -> None:
        super().__init__()
        self.k = linear(config.d_model, config.key_value_heads * config.head_width)
        self.v = linear(config.d_model, config.key_value_heads * config.head_width)
        self.head_width = config.head_width

    def forward(self, normed: Tensor, tables: Tables) -> KeyValue:
        k = rotate(self.k(normed).unflatten(-1, (-1, self.head_width)), *tables)
        return KeyValue(k, self.v(normed).unflatten(-1, (-1, self.head_width)).to(k.dtype))


class Memory(nn.Module):
    """The global memory: n = RMSNorm(e); k = rotary(W_K n, t), v = W_V n for each group."""

    seam: Seam = WHOLE

    def __init__(self, config: RltConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.d_model, eps=config.eps)
        for group in range(config.memory_groups):
            self.add_module(str(group), MemoryGroup(config))

    def groups(self) -> dict[int, MemoryGroup]:
        """By number, the groups that are here."""
        return {
            int(name): module
            for name, module in self.named_children()
            if isinstance(module, MemoryGroup)
        }

    def forward(self, e: Tensor, tables: Tables) -> dict[int, KeyValue]:
        """By group, entries [b, T, KV, d_head] for the encoder output e [b, T, d]."""
        normed = self.norm(self.seam.enter(e))
        return {group: module(normed, tables) for group, module in self.groups().items()}


class Merge(nn.Module):
    """u = e + alpha * sigmoid(W_gate [e ; r] + b_gate) * (W_state r), r = RMSNorm(h).

    Some of its columns may be here: rows of both weights and of the bias.
    """

    seam: Seam = WHOLE

    def __init__(self, config: RltConfig) -> None:
        super().__init__()
        d, self.alpha = config.d_model, config.alpha
        self.state_norm = nn.RMSNorm(d, eps=config.eps)
        self.gate = unfilled(nn.Linear, 2 * d, d)
        self.state = linear(d, d)
        self.initial_state = nn.Parameter(torch.empty(d))

    def folded(self) -> Tensor:
        """The weight that reads r, W_g above W_s, with the norm folded in: [2 d, d]."""
        of_r = self.gate.weight.chunk(2, dim=1)[1]
        return torch.cat((of_r, self.state.weight)) * self.state_norm.weight

    def tokens(self, e: Tensor, before: Tensor, started: Tensor) -> Tensor:
        """u [b, T, d] of all tokens at once, with the embedding of the token before each for h.

        Args:
            e: encoder outputs, [b, T, d].
            before: embeddings, [b, T, d].
            started: bool [b, T], True where a document starts, from `initial_state`.
        """
        h = torch.where(started[..., None], self.initial_state, before)
        r, own = self.state_norm(self.seam.enter(h)), self.seam.own(e.shape[-1])
        gate = torch.sigmoid(self.gate(torch.cat((self.seam.enter(e), r), dim=-1)))
        added = F.pad(self.alpha * gate * self.state(r), (own.start, e.shape[-1] - own.stop))
        return e + self.seam.leave(added)

    def inputs(self, e: Tensor, state: State, folded: Tensor) -> FeedbackInputs:
        """What the recurrence core needs of it, for encoder outputs e [T, b, d].

        The encoder's half of the gate does not depend on h, so it is formed for all tokens here.
        """
        of_e, s = self.gate.weight.chunk(2, dim=1)[0], state["s"]
        return FeedbackInputs(
            gate_e=F.linear(self.seam.enter(e), of_e, self.gate.bias).to(e.dtype),
            weight=folded,
            initial=self.initial_state.expand_as(s),
            s=s,
            # Only RLT-2's chunks run on across segments; RLT-1 never reads a boundary state.
            boundary=state.get("boundary", s),
        )
