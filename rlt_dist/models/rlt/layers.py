"""Layers of the Recurrent Looped Transformer: pre-norm residual blocks without biases."""

from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from rlt_dist.config.model import RltConfig
from rlt_dist.models.dropout import Dropout
from rlt_dist.models.modules import unfilled
from rlt_dist.ops.attention import attend_within
from rlt_dist.ops.norm import norm_linear
from rlt_dist.ops.reach import Reach
from rlt_dist.ops.recurrence.problem import LayerWeights
from rlt_dist.ops.rotary import rotate
from rlt_dist.ops.seam import WHOLE, Seam
from rlt_dist.ops.swiglu import swiglu_linear

Tables = tuple[Tensor, Tensor]


class KeyValue(NamedTuple):
    """Keys (rotated at their own positions) and values, each [b, K, KV, d_head], newest last."""

    k: Tensor
    v: Tensor


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A projection without bias that is not filled yet."""
    return unfilled(nn.Linear, inputs, outputs, bias=False)


def projections(x: Tensor, norm: nn.RMSNorm, *linears: nn.Linear) -> tuple[Tensor, ...]:
    """What each of the projections makes of norm(x), in the type that autocast asks for."""
    eps = cast(float, norm.eps)
    return norm_linear(x, norm.weight, eps, [linear.weight for linear in linears])


class SelfAttention(nn.Module):
    """q, k, v, o of grouped-query self-attention; used by encoder, decoder, or both when tied.

    Some of the heads may be here: numbers of heads are read off the weights.
    """

    seam: Seam = WHOLE

    def __init__(self, config: RltConfig) -> None:
        super().__init__()
        d, width = config.d_model, config.head_width
        self.q = linear(d, config.heads * width)
        self.k = linear(d, config.key_value_heads * width)
        self.v = linear(d, config.key_value_heads * width)
        self.o = linear(config.heads * width, d)
        self.head_width = width

    def forward(self, x: Tensor, norm: nn.RMSNorm, tables: Tables) -> tuple[Tensor, KeyValue]:
        """Rotated queries [b, T, H, d_head], keys and values [b, T, KV, d_head] of norm(x)."""
        projected = projections(self.seam.enter(x), norm, self.q, self.k, self.v)
        q, k, v = (heads.unflatten(-1, (-1, self.head_width)) for heads in projected)
        k = rotate(k, *tables)
        return rotate(q, *tables), KeyValue(k, v.to(k.dtype))

    def out(self, attended: Tensor) -> Tensor:
        """[b, T, d] of what the heads here attended to, [b, T, H * d_head]."""
        return self.seam.leave(self.o(attended))


class CrossAttention(nn.Module):
    """q and o of a decoder layer's attention to the encoder memory."""

    def __init__(self, config: RltConfig) -> None:
        super().__init__()
        self.q = linear(config.d_model, config.heads * config.head_width)
        self.o = linear(config.heads * config.head_width, config.d_model)
        self.head_width = config.head_width


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate n) * up n) of n = norm(x); some inner columns may be here."""

    seam: Seam = WHOLE

    def __init__(self, config: RltConfig) -> None:
        super().__init__()
        self.gate = linear(config.d_model, config.ffn)
        self.up = linear(config.d_model, config.ffn)
        self.down = linear(config.ffn, config.d_model)

    def forward(self, x: Tensor, norm: nn.RMSNorm) -> Tensor:
        gate, up = projections(self.seam.enter(x), norm, self.gate, self.up)
        return self.seam.leave(swiglu_linear(gate, up, self.down.weight))


@dataclass(frozen=True)
class Segment:
    """What every piece may know of the tokens it is given.

    Attributes:
        position: int64 [b, T], index of each token within its document.
        tables: rotary cosine and sine of those positions, each [b, T, 1, d_head/2].
        dropout: the masks of this step.
    """

    position: Tensor
    tables: Tables
    dropout: Dropout


class EncoderLayer(nn.Module):
    """Causal self-attention, then SwiGLU."""

    def __init__(self, config: RltConfig) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.attn = SelfAttention(config)
        self.ffn_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.ffn = FeedForward(config)

    def forward(
        self, x: Tensor, segment: Segment, past: KeyValue, reach: Reach, layer: int
    ) -> tuple[Tensor, KeyValue]:
        """One layer over a segment.

        Args:
            x: [b, T, d].
            past: the carried entries, [b, P, KV, d_head].
            reach: which of the P + T entries each token sees.
            layer: index of the layer, which names its dropout masks.

        Returns:
            the layer's output [b, T, d], and the carried entries followed by the segment's.
        """
        query, new = self.attn(x, self.attn_norm, segment.tables)
        seen = append(past, new)
        attended = attend_within(query, *seen, reach)
        x = x + segment.dropout(self.attn.out(attended), "encoder.attn", layer)
        x = x + segment.dropout(self.ffn(x, self.ffn_norm), "encoder.ffn", layer)
        return x, seen


class DecoderLayer(nn.Module):
    """Sliding-window self-attention, cross-attention to the encoder memory, SwiGLU.

    Tied layers are given the encoder layer's self-attention and feed-forward; norms and
    cross-attention are always the decoder's own. What they compute is in `ops.recurrence`.
    """

    def __init__(self, config: RltConfig, tied: EncoderLayer | None) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.attn = tied.attn if tied else SelfAttention(config)
        self.cross_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.cross = CrossAttention(config)
        self.ffn_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.ffn = tied.ffn if tied else FeedForward(config)

    def folded(self) -> LayerWeights:
        """The weights as the recurrence core takes them: norms and 1 / sqrt(d_head) folded in."""
        scale = self.cross.head_width**-0.5
        qkv = torch.cat((self.attn.q.weight * scale, self.attn.k.weight, self.attn.v.weight))
        return LayerWeights(
            qkv=qkv * self.attn_norm.weight,
            o=self.attn.o.weight,
            cross_q=self.cross.q.weight * (scale * self.cross_norm.weight),
            cross_o=self.cross.o.weight,
            gate_up=torch.cat((self.ffn.gate.weight, self.ffn.up.weight)) * self.ffn_norm.weight,
            down=self.ffn.down.weight,
        )


def append(past: KeyValue, new: KeyValue) -> KeyValue:
    """Cached entries followed by new ones, along the token dimension."""
    return KeyValue(torch.cat((past.k, new.k), dim=1), torch.cat((past.v, new.v), dim=1))
