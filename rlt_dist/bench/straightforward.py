"""Transformer-XL as one writes it down from the paper: what the project's own is compared with."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, einsum

from rlt_dist.models.modules import present
from rlt_dist.models.state import State
from rlt_dist.models.transformer_xl.layers import Layer, RelativeAttention
from rlt_dist.models.transformer_xl.model import TransformerXL
from rlt_dist.ops.noise import Noise


class StraightforwardXL(TransformerXL):
    """Dai et al., "Transformer-XL", ACL 2019, equations of section 3.3, one line each.

    It has the parameters of `TransformerXL` and none of its code paths: memory and segment are
    concatenated and projected at once, position scores are shifted by padding and reshaping, and
    the loss is taken from the logits of all tokens. Post-norm and a plain softmax only; neither
    dropout, nor same_length, nor documents that start inside a segment.
    """

    def forward(
        self, tokens: Tensor, document_start: Tensor, state: State, noise: Noise | None = None
    ) -> tuple[Tensor, State]:
        """Last hidden states [b, T, d] of tokens int64 [b, T], and the state after them."""
        del document_start, noise
        h = present(self.word_emb)(tokens)
        keys = state["memory.0"].shape[1] + tokens.shape[1]
        relative = sinusoids(keys, self.config.d_model).to(h)
        newer = torch.ones(tokens.shape[1], keys, dtype=torch.bool).triu(1 + keys - tokens.shape[1])
        carried = {name: state[name] + tokens.shape[1] for name in ("position", "tokens")}
        for n, layer in enumerate(self.layers.values()):
            memory = state[f"memory.{n}"]
            carried[f"memory.{n}"] = torch.cat((memory, h), dim=1)[:, -self.config.memory_len :]
            h = self._layer(cast(Layer, layer), h, memory, relative, newer)
        return h, carried

    def loss(self, output: Tensor, targets: Tensor) -> Tensor:
        """The sum of -log p(target) for outputs [n, d] and targets int64 [n]."""
        bias = present(self.crit).out_layers.get_parameter("0.bias")
        logits = F.linear(output, present(self.word_emb).tables()[0], bias)
        return F.cross_entropy(logits, targets, reduction="sum")

    def _layer(
        self, layer: Layer, h: Tensor, memory: Tensor, relative: Tensor, newer: Tensor
    ) -> Tensor:
        attention, feed = layer.dec_attn, layer.pos_ff
        h = attention.layer_norm(h + self._attention(attention, h, memory, relative, newer))
        inner = F.relu(feed.CoreNet["0"](h))
        return feed.layer_norm(h + feed.CoreNet["3"](inner))

    def _attention(
        self, layer: RelativeAttention, h: Tensor, memory: Tensor, relative: Tensor, newer: Tensor
    ) -> Tensor:
        """b: lane, i: query, j: key or distance, n: head, d: width of a head."""
        heads = (self.config.heads, self.config.head_width)
        qkv = layer.qkv_net(torch.cat((memory, h), dim=1))
        q, k, v = (x.unflatten(-1, heads) for x in qkv.chunk(3, dim=-1))
        q = q[:, -h.shape[1] :]
        r = layer.r_net(relative).unflatten(-1, heads)
        content = einsum("bind,bjnd->bnij", q + self.r_w_bias, k)
        position = shift(einsum("bind,jnd->bnij", q + self.r_r_bias, r))
        score = (content + position) / self.config.head_width**0.5
        weight = score.masked_fill(newer, -torch.inf).softmax(dim=-1)
        return layer.o_net(einsum("bnij,bjnd->bind", weight, v).flatten(2))


def sinusoids(count: int, width: int) -> Tensor:
    """R of distances count - 1 .. 0, [count, width], in float64."""
    frequency = 1 / 10000 ** (torch.arange(0, width, 2, dtype=torch.float64) / width)
    angle = torch.outer(torch.arange(count - 1, -1, -1, dtype=torch.float64), frequency)
    return torch.cat((angle.sin(), angle.cos()), dim=-1)


def shift(x: Tensor) -> Tensor:
    """Move row i of [b, n, i, j] to the left until its distance 0 stands at key i (appendix B)."""
    b, n, i, j = x.shape
    return F.pad(x, (1, 0)).view(b, n, j + 1, i)[:, :, 1:].reshape(b, n, i, j)
