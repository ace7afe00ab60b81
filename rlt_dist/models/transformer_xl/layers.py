"""Layers of Transformer-XL: relative attention over memory and segment, then a feed-forward.

Dai et al., "Transformer-XL", ACL 2019. Modules carry the names of the authors' checkpoints.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlt_dist.config.model import TransformerXLConfig
from rlt_dist.models.dropout import Dropout
from rlt_dist.ops.relative import attend_relative


def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """A projection on the default device (`meta` included); `models.initial` fills it."""
    device = torch.get_default_device()
    return nn.utils.skip_init(nn.Linear, inputs, outputs, bias=bias, device=device)


@dataclass(frozen=True)
class Segment:
    """What every layer sees of a segment of T tokens behind P memory positions.

    Attributes:
        allowed: bool [b, T, P + T], the keys that each token may attend to.
        relative: [P + T, d], R of distances 0 .. P + T - 1 after dropout.
        biases: u and v, each [H, d_head], shared by all layers.
        dropout: the masks of activations in this step.
        dropatt: the masks of attention weights in this step.
    """

    allowed: Tensor
    relative: Tensor
    biases: tuple[Tensor, Tensor]
    dropout: Dropout
    dropatt: Dropout


class RelativeAttention(nn.Module):
    """h + o(attention), normalised after the sum, or before the projections with `pre_norm`."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        width = config.heads * config.head_width
        self.qkv_net = linear(config.d_model, 3 * width, bias=False)
        self.r_net = linear(config.d_model, width, bias=False)
        self.o_net = linear(width, config.d_model, bias=False)
        self.layer_norm = nn.LayerNorm(config.d_model)
        self.head_width, self.pre_norm = config.head_width, config.pre_norm

    def forward(self, x: Tensor, memory: Tensor, segment: Segment, layer: int) -> Tensor:
        """x [b, T, d] behind memory [b, P, d], both of the layer's inputs, to [b, T, d]."""
        seen = torch.cat((memory, x), dim=1)
        if self.pre_norm:
            seen = self.layer_norm(seen)
        query, key, value = self._project(seen, x.shape[1])
        attended = attend_relative(
            query,
            key,
            value,
            self._heads(self.r_net(segment.relative)),
            segment.biases,
            segment.allowed,
            self._keep(query, key, segment.dropatt, layer),
        )
        x = x + segment.dropout(self.o_net(attended), "attn", layer)
        return x if self.pre_norm else self.layer_norm(x)

    def _project(self, seen: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
        """Keys and values of everything seen, queries of its newest `length` tokens only."""
        q, k, v = self.qkv_net.weight.chunk(3)
        queries = seen[:, seen.shape[1] - length :]
        return (
            self._heads(F.linear(queries, q)),
            self._heads(F.linear(seen, k)),
            self._heads(F.linear(seen, v)),
        )

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width))

    @staticmethod
    def _keep(query: Tensor, key: Tensor, dropatt: Dropout, layer: int) -> Tensor | None:
        """Keep-mask [b, H, T, P + T] of the attention weights, the distance last.

        It is drawn with the distance first: a mask's bits are numbered along its shape, so more
        memory adds masks for farther distances and leaves those of nearer ones as they were.
        """
        length, heads = query.shape[1:3]
        mask = dropatt.mask("attn.weights", layer, (key.shape[1], heads, length))
        return None if mask is None else mask.permute(0, 2, 3, 1)


class FeedForward(nn.Module):
    """x + W2 relu(W1 x + b1) + b2, normalised after the sum, or before W1 with `pre_norm`."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        # Numbered as in the authors' checkpoints, where 1, 2 and 4 are ReLU and dropout.
        self.CoreNet = nn.ModuleDict(
            {
                "0": linear(config.d_model, config.d_inner, bias=True),
                "3": linear(config.d_inner, config.d_model, bias=True),
            }
        )
        self.layer_norm = nn.LayerNorm(config.d_model)
        self.pre_norm = config.pre_norm

    def forward(self, x: Tensor, dropout: Dropout, layer: int) -> Tensor:
        """x [b, T, d] to [b, T, d]."""
        normed = self.layer_norm(x) if self.pre_norm else x
        inner = dropout(F.relu(self.CoreNet["0"](normed)), "ffn.inner", layer)
        x = x + dropout(self.CoreNet["3"](inner), "ffn", layer)
        return x if self.pre_norm else self.layer_norm(x)


class Layer(nn.Module):
    """Relative attention, then the feed-forward."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.dec_attn = RelativeAttention(config)
        self.pos_ff = FeedForward(config)

    def forward(self, x: Tensor, memory: Tensor, segment: Segment, layer: int) -> Tensor:
        """One layer over a segment.

        Args:
            x: [b, T, d].
            memory: [b, P, d], what this layer was given before the segment, newest last.
            layer: index of the layer, which names its dropout masks.

        Returns:
            [b, T, d].
        """
        x = self.dec_attn(x, memory, segment, layer)
        return self.pos_ff(x, segment.dropout, layer)
