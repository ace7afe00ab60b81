"""Pieces of the Recurrent Looped Transformer around its layers: memory, merge, head."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlt_dist.config.model import RltConfig
from rlt_dist.models.rlt.layers import KeyValue, Tables, linear
from rlt_dist.models.state import State
from rlt_dist.ops.recurrence.problem import FeedbackInputs
from rlt_dist.ops.rotary import rotate


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
    """The global memory: n = RMSNorm(e); k = rotary(W_K n), v = W_V n for each group."""

    def __init__(self, config: RltConfig) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.d_model, eps=config.eps)
        for group in range(config.memory_groups):
            self.add_module(str(group), MemoryGroup(config))

    def forward(self, e: Tensor, tables: Tables, group: int) -> KeyValue:
        """Entries [b, T, KV, d_head] of one group for the encoder output e [b, T, d]."""
        return self.get_submodule(str(group))(self.norm(e), tables)


class Merge(nn.Module):
    """u = e + alpha * sigmoid(W_gate [e ; r] + b_gate) * (W_state r), r = RMSNorm(h)."""

    def __init__(self, config: RltConfig) -> None:
        super().__init__()
        d = config.d_model
        self.state_norm = nn.RMSNorm(d, eps=config.eps)
        self.gate = nn.utils.skip_init(nn.Linear, 2 * d, d)
        self.state = linear(d, d)
        self.initial_state = nn.Parameter(torch.empty(d))

    def inputs(self, e: Tensor, state: State) -> FeedbackInputs:
        """What the recurrence core needs of it, for encoder outputs e [T, b, d].

        The encoder's half of the gate does not depend on h, so it is formed for all tokens here.
        """
        of_e, of_r = self.gate.weight.chunk(2, dim=1)
        s = state["s"]
        return FeedbackInputs(
            gate_e=F.linear(e, of_e, self.gate.bias).to(e.dtype),
            weight=torch.cat((of_r, self.state.weight)) * self.state_norm.weight,
            initial=self.initial_state.expand_as(s),
            s=s,
            # Only RLT-2's chunks run on across segments; RLT-1 never reads a boundary state.
            boundary=state.get("boundary", s),
        )
