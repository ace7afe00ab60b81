"""Layers of the Recurrent Looped Transformer: pre-norm residual blocks without biases."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlt_dist.config.model import RltConfig
from rlt_dist.models.dropout import Dropout, masked
from rlt_dist.ops.attention import attend
from rlt_dist.ops.rotary import rotate

Tables = tuple[Tensor, Tensor]


class KeyValue(NamedTuple):
    """Keys (rotated at their own positions) and values, each [b, K, KV, d_head], newest last."""

    k: Tensor
    v: Tensor


def linear(inputs: int, outputs: int) -> nn.Linear:
    """A projection without bias; `models.initial` fills it."""
    return nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False)


class SelfAttention(nn.Module):
    """q, k, v, o of grouped-query self-attention; used by encoder, decoder, or both when tied."""

    def __init__(self, config: RltConfig) -> None:
        super().__init__()
        d, width = config.d_model, config.head_width
        self.q = linear(d, config.heads * width)
        self.k = linear(d, config.key_value_heads * width)
        self.v = linear(d, config.key_value_heads * width)
        self.o = linear(config.heads * width, d)
        self.head_width = width

    def query(self, x: Tensor, tables: Tables) -> Tensor:
        """Rotated queries [b, T, H, d_head]."""
        return rotate(self.q(x).unflatten(-1, (-1, self.head_width)), tables)

    def key_value(self, x: Tensor, tables: Tables) -> KeyValue:
        """Rotated keys and values of x's tokens, [b, T, KV, d_head]."""
        k = rotate(self.k(x).unflatten(-1, (-1, self.head_width)), tables)
        return KeyValue(k, self.v(x).unflatten(-1, (-1, self.head_width)).to(k.dtype))


class CrossAttention(nn.Module):
    """q and o of a decoder layer's attention to the encoder memory."""

    def __init__(self, config: RltConfig) -> None:
        super().__init__()
        self.q = linear(config.d_model, config.heads * config.head_width)
        self.o = linear(config.heads * config.head_width, config.d_model)
        self.head_width = config.head_width

    def query(self, x: Tensor, tables: Tables) -> Tensor:
        """Rotated queries [b, T, H, d_head]."""
        return rotate(self.q(x).unflatten(-1, (-1, self.head_width)), tables)


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate x) * up x)."""

    def __init__(self, config: RltConfig) -> None:
        super().__init__()
        self.gate = linear(config.d_model, config.ffn)
        self.up = linear(config.d_model, config.ffn)
        self.down = linear(config.ffn, config.d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


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
        self, x: Tensor, segment: Segment, past: KeyValue, allowed: Tensor, layer: int
    ) -> tuple[Tensor, KeyValue]:
        """One layer over a segment.

        Args:
            x: [b, T, d].
            past: the carried entries, [b, P, KV, d_head].
            allowed: bool [b, T, P + T].
            layer: index of the layer, which names its dropout masks.

        Returns:
            the layer's output [b, T, d], and the carried entries followed by the segment's.
        """
        normed = self.attn_norm(x)
        seen = append(past, self.attn.key_value(normed, segment.tables))
        attended = attend(self.attn.query(normed, segment.tables), *seen, allowed)
        x = x + segment.dropout(self.attn.o(attended), "encoder.attn", layer)
        x = x + segment.dropout(self.ffn(self.ffn_norm(x)), "encoder.ffn", layer)
        return x, seen


class LayerMasks(NamedTuple):
    """Dropout masks [b, C, d] of one decoder layer's three sublayers; None: nothing drops."""

    attn: Tensor | None
    cross: Tensor | None
    ffn: Tensor | None


@dataclass(frozen=True)
class ChunkView:
    """What every decoder layer sees of a chunk of C tokens.

    Attributes:
        tables: rotary cosine and sine, each [b, C, 1, d_head/2].
        window_allowed: bool [b, C, window entries + C].
        memory_allowed: bool [b, C, memory entries].
        masks: dropout masks, one triple a layer.
    """

    tables: Tables
    window_allowed: Tensor
    memory_allowed: Tensor
    masks: list[LayerMasks]


class DecoderLayer(nn.Module):
    """Sliding-window self-attention, cross-attention to the encoder memory, SwiGLU.

    Tied layers are given the encoder layer's self-attention and feed-forward; norms and
    cross-attention are always the decoder's own.
    """

    def __init__(self, config: RltConfig, tied: EncoderLayer | None) -> None:
        super().__init__()
        self.attn_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.attn = tied.attn if tied else SelfAttention(config)
        self.cross_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.cross = CrossAttention(config)
        self.ffn_norm = nn.RMSNorm(config.d_model, eps=config.eps)
        self.ffn = tied.ffn if tied else FeedForward(config)

    def forward(
        self, x: Tensor, view: ChunkView, window: KeyValue, memory: KeyValue, layer: int
    ) -> tuple[Tensor, KeyValue]:
        """x [b, C, d] to the layer's output, and the window entries followed by the chunk's."""
        masks = view.masks[layer]
        normed = self.attn_norm(x)
        seen = append(window, self.attn.key_value(normed, view.tables))
        attended = attend(self.attn.query(normed, view.tables), *seen, view.window_allowed)
        x = x + masked(self.attn.o(attended), masks.attn)
        query = self.cross.query(self.cross_norm(x), view.tables)
        x = x + masked(self.cross.o(attend(query, *memory, view.memory_allowed)), masks.cross)
        x = x + masked(self.ffn(self.ffn_norm(x)), masks.ffn)
        return x, seen


def append(past: KeyValue, new: KeyValue) -> KeyValue:
    """Cached entries followed by new ones, along the token dimension."""
    return KeyValue(torch.cat((past.k, new.k), dim=1), torch.cat((past.v, new.v), dim=1))
