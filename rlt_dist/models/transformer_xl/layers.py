"""Layers of Transformer-XL: relative attention over memory and segment, then a feed-forward.

Dai et al., "Transformer-XL", ACL 2019. Modules carry the names of the authors' checkpoints.

At a cut seam a process has some heads and some inner columns: `qkv_net` has the rows of its heads'
queries, then of their keys, then of their values, and u, v and `r_net` are of its heads. Layer
norms and `CoreNet.3.bias` are whole, stand outside the seam, and so get whole gradients.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlt_dist.config.model import TransformerXLConfig
from rlt_dist.models.dropout import Dropout
from rlt_dist.models.modules import unfilled
from rlt_dist.ops.noise import WeightMask
from rlt_dist.ops.reach import Reach
from rlt_dist.ops.relative_function import attend_relative_within, heads_first
from rlt_dist.ops.seam import WHOLE, Seam


def linear(inputs: int, outputs: int, bias: bool) -> nn.Linear:
    """A projection that is not filled yet."""
    return unfilled(nn.Linear, inputs, outputs, bias=bias)


class KeyValue(NamedTuple):
    """Keys, which need no position of their own, and values, each [b, K, H, d_head]."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True)
class Segment:
    """What every layer sees of a segment of T tokens behind P memory positions.

    Attributes:
        reach: which of the P + T keys each token may attend to.
        biases: u and v, each [H, d_head], shared by all layers.
        relative: R of distances P + T - 1 .. 0, [P + T, d], which all layers share; or W_R R of
            each layer, [P + T, H * d_head], made before by one whose weights stand still.
        dropout: the masks of activations in this step.
        dropatt: the masks of attention weights in this step.
    """

    reach: Reach
    biases: tuple[Tensor, Tensor]
    relative: Tensor | list[Tensor]
    dropout: Dropout
    dropatt: Dropout


class RelativeAttention(nn.Module):
    """h + o(attention), normalised after the sum, or before the projections with `pre_norm`."""

    seam: Seam = WHOLE

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        width = config.heads * config.head_width
        self.qkv_net = linear(config.d_model, 3 * width, bias=False)
        self.r_net = linear(config.d_model, width, bias=False)
        self.o_net = linear(width, config.d_model, bias=False)
        self.layer_norm = nn.LayerNorm(config.d_model)
        self.heads, self.head_width = config.heads, config.head_width
        self.pre_norm = config.pre_norm

    def forward(
        self, x: Tensor, memory: Tensor | KeyValue, segment: Segment, layer: int
    ) -> tuple[Tensor, KeyValue]:
        """x [b, T, d] behind P memory positions to [b, T, d], and the keys of both together."""
        past = memory if isinstance(memory, KeyValue) else self._key_value(memory)
        query, key, value = self._heads(self.qkv_net(self._inputs(x))).chunk(3, dim=2)
        seen = KeyValue(join(past.k, key), join(past.v, value))
        relative, dropped = self._relative(segment, layer), self._dropped(segment, layer)
        attended = attend_relative_within(
            query, *seen, relative, segment.biases, segment.reach, dropped
        )
        summed = self.seam.leave(self.o_net(attended))
        x = x + segment.dropout(summed, "attn", layer)
        return x if self.pre_norm else self.layer_norm(x), seen

    def _inputs(self, x: Tensor) -> Tensor:
        """What the projections are given, inside the seam."""
        return self.seam.enter(self.layer_norm(x) if self.pre_norm else x)

    def _key_value(self, memory: Tensor) -> KeyValue:
        """Keys and values of what the layer was given before, [b, P, d]."""
        weight = self.qkv_net.weight[len(self.qkv_net.weight) // 3 :]
        return KeyValue(*self._heads(F.linear(self._inputs(memory), weight)).chunk(2, dim=2))

    def _relative(self, segment: Segment, layer: int) -> Tensor:
        """W_R R, [P + T, H, d_head]."""
        made = segment.relative
        return self._heads(made[layer] if isinstance(made, list) else self.r_net(made))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_width))

    def _dropped(self, segment: Segment, layer: int) -> WeightMask | None:
        """Which attention weights are dropped; a mask of all heads is drawn, alike on any cut."""
        own = self.seam.own(self.heads)
        return segment.dropatt.weights("attn.weights", layer, own, self.heads)


class FeedForward(nn.Module):
    """x + W2 relu(W1 x + b1) + b2, normalised after the sum, or before W1 with `pre_norm`."""

    seam: Seam = WHOLE

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
        self.inner, self.pre_norm = config.d_inner, config.pre_norm

    def forward(self, x: Tensor, dropout: Dropout, layer: int) -> Tensor:
        """x [b, T, d] to [b, T, d]."""
        normed = self.seam.enter(self.layer_norm(x) if self.pre_norm else x)
        # Tokens in one dimension: autograd would copy a view that is changed in place.
        inner = F.relu(self.CoreNet["0"](normed.flatten(0, 1)), inplace=True)
        inner = inner.unflatten(0, x.shape[:2])
        inner = dropout.columns(inner, "ffn.inner", layer, self.inner, self.seam)
        x = x + dropout(self._outputs(inner), "ffn", layer)
        return x if self.pre_norm else self.layer_norm(x)

    def _outputs(self, inner: Tensor) -> Tensor:
        """W2 inner + b2; the bias belongs to the sum over the seam, and so is added once."""
        if self.seam is WHOLE:
            return self.CoreNet["3"](inner)
        product = F.linear(inner, self.CoreNet.get_parameter("3.weight"))
        return self.seam.leave(product) + self.CoreNet.get_parameter("3.bias")


class Layer(nn.Module):
    """Relative attention, then the feed-forward."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.dec_attn = RelativeAttention(config)
        self.pos_ff = FeedForward(config)

    def forward(
        self, x: Tensor, memory: Tensor | KeyValue, segment: Segment, layer: int
    ) -> tuple[Tensor, KeyValue]:
        """One layer over a segment.

        Args:
            x: [b, T, d].
            memory: what this layer was given before the segment, newest last: [b, P, d], or the
                keys and values of it.
            layer: index of the layer, which names its dropout masks.

        Returns:
            [b, T, d], and keys and values of memory and segment together.
        """
        x, seen = self.dec_attn(x, memory, segment, layer)
        return self.pos_ff(x, segment.dropout, layer), seen


def join(past: Tensor, new: Tensor) -> Tensor:
    """Past and new keys or values, [b, P + T, H, d_head], in the new ones' type.

    They are laid out heads first, as the attention's products read them: joining them is the copy
    that this layout needs in any case.
    """
    joint = torch.cat((heads_first(past).to(new.dtype), heads_first(new)), dim=2)
    return joint.permute(1, 2, 0, 3)
