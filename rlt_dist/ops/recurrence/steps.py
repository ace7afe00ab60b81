"""One decoder layer on one chunk of tokens: each sublayer forward, and backward beside it.

C tokens of B lanes go through together, x [C, B, d]. Backward steps form activation gradients only;
what weight gradients need is left on the tape, so that each is one large product afterwards.

A process that has some of the heads and inner columns forms a part of a sublayer's output, and of
the gradient of its normalised input; the seam adds the parts up.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from rlt_dist.ops.noise import masked
from rlt_dist.ops.recurrence.arithmetic import (
    by_lane,
    by_token,
    normalise,
    normalise_backward,
    product,
    product_backward,
    rotate,
    silu_backward,
    softmax_backward,
)
from rlt_dist.ops.recurrence.chunks import Slots
from rlt_dist.ops.recurrence.problem import Memory, Plan, Shape
from rlt_dist.ops.recurrence.tape import LayerTape


class View(NamedTuple):
    """A chunk's `Sight`, as the steps read it for all layers.

    Attributes:
        cos, sin: [C, B, 1, w], tables for `arithmetic.rotate`.
        window: additive mask [C, B, 1, 1, W] over the window's slots.
        entries: the memory entries outside of which no token sees any, m of them.
        memory: additive mask [B, 1, C, 1, m] over those.
    """

    cos: Tensor
    sin: Tensor
    window: Tensor
    entries: slice
    memory: Tensor


def view_of(plan: Plan, k: int, at: Slots) -> View:
    """What chunk k's tokens see."""
    sight, entries = plan.sight(at), plan.seen[k]
    cos, sin = torch.cat((sight.cos,) * 2, dim=-1), torch.cat((-sight.sin, sight.sin), dim=-1)
    return View(cos, sin, sight.window, entries, sight.memory[..., entries])


def mask_of(mask: Tensor | None, at: Slots) -> Tensor | None:
    """A chunk's part of a dropout mask."""
    return None if mask is None else at.get(mask)


# -- attention over the window -----------------------------------------------------------------


def self_attention(x: Tensor, tape: LayerTape, at: Slots, view: View, shape: Shape) -> Tensor:
    """x plus attention over each token's last W entries, its own included."""
    n, scale = normalise(x, shape.eps)
    qkv = product(n, tape.weights.qkv).unflatten(-1, (-1, shape.head_width))
    qk = qkv[:, :, : shape.heads + shape.kv_heads]
    qk.copy_(rotate(qk, view.cos, view.sin))
    q, entry = qkv[:, :, : shape.heads], qkv[:, :, shape.heads :]
    at.put(tape.own(tape.entries), entry.unflatten(2, (2, -1)))
    keys, values = tape.windows(at)
    grouped = q.unflatten(2, (shape.kv_heads, -1))
    weight = (grouped @ keys.transpose(-1, -2) + view.window).softmax(dim=-1)
    attended = (weight @ values).flatten(2)
    tape.put(at, attn_input=n, attn_scale=scale, query=q, weight=weight.flatten(2, 3))
    out = tape.seam.total(product(attended, tape.weights.o))
    return x + masked(out, mask_of(tape.masks.attn, at))


def self_attention_backward(
    dy: Tensor, tape: LayerTape, at: Slots, view: View, shape: Shape
) -> Tensor:
    """The gradient with respect to `self_attention`'s x. Later tokens must have gone before."""
    groups = (shape.kv_heads, -1)
    query = tape.get(at, "query").unflatten(2, groups)
    weight = tape.get(at, "weight").unflatten(2, groups)
    d_attn = masked(dy, mask_of(tape.masks.attn, at))
    d_attended = product_backward(d_attn, tape.weights.o).view_as(query)
    keys, values = tape.windows(at)
    d_score = softmax_backward(d_attended @ values.transpose(-1, -2), weight)
    d_keys, d_values = d_score.transpose(-1, -2) @ query, weight.transpose(-1, -2) @ d_attended
    tape.add_to_windows(at, d_keys, d_values)
    d_entry = at.get(tape.own(tape.dentries)).flatten(2, 3)
    d_qkv = torch.cat(((d_score @ keys).flatten(2, 3), d_entry), dim=2)
    d_qk = d_qkv[:, :, : shape.heads + shape.kv_heads]
    d_qk.copy_(rotate(d_qk, view.cos, view.sin, -1))
    d_qkv = d_qkv.flatten(2)
    tape.put(at, attended=(weight @ values).flatten(2), d_attn=d_attn, d_qkv=d_qkv)
    d_n = tape.seam.total(product_backward(d_qkv, tape.weights.qkv))
    return normalise_backward(dy, d_n, tape.get(at, "attn_input"), tape.get(at, "attn_scale"))


# -- attention to the encoder memory -----------------------------------------------------------


def cross_attention(x: Tensor, tape: LayerTape, at: Slots, view: View, shape: Shape) -> Tensor:
    """x plus attention to the encoder memory."""
    n, scale = normalise(x, shape.eps)
    q = product(n, tape.weights.cross_q)
    q = rotate(q.unflatten(-1, (-1, shape.head_width)), view.cos, view.sin)
    memory = tape.memory.part(view.entries)
    weight = _cross_weight(q, memory, view, shape)
    crossed = by_token(weight @ memory.v, len(x)).flatten(2)
    tape.put(at, cross_input=n, cross_scale=scale, cross_query=q, crossed=crossed)
    out = tape.seam.total(product(crossed, tape.weights.cross_o))
    return x + masked(out, mask_of(tape.masks.cross, at))


def _cross_weight(q: Tensor, memory: Memory, view: View, shape: Shape) -> Tensor:
    """[B, KV, C R, m] of queries [C, B, H, w]; what a token may not see has weight zero."""
    score = by_lane(q, shape.kv_heads) @ memory.k.transpose(-1, -2)
    score = score.unflatten(2, (len(q), -1)) + view.memory
    return score.softmax(dim=-1).flatten(2, 3)


def cross_attention_backward(
    dy: Tensor, tape: LayerTape, at: Slots, view: View, shape: Shape
) -> Tensor:
    """The gradient with respect to `cross_attention`'s x."""
    memory = tape.memory.part(view.entries)
    weight = _cross_weight(tape.get(at, "cross_query"), memory, view, shape)
    d_cross = masked(dy, mask_of(tape.masks.cross, at))
    d_crossed = product_backward(d_cross, tape.weights.cross_o)
    d_crossed = d_crossed.unflatten(-1, (-1, shape.head_width))
    d_weight = by_lane(d_crossed, shape.kv_heads) @ memory.v.transpose(-1, -2)
    d_score = softmax_backward(d_weight, weight)
    dq = by_token(d_score @ memory.k, len(dy))
    d_cross_q = rotate(dq, view.cos, view.sin, -1).flatten(2)
    for name, by_entry in {"cross_weight": weight, "d_score": d_score}.items():
        at.put(tape.kept[name][..., view.entries], by_token(by_entry, len(dy)))
    tape.put(at, d_cross=d_cross, d_crossed=d_crossed, d_cross_q=d_cross_q)
    d_n = tape.seam.total(product_backward(d_cross_q, tape.weights.cross_q))
    return normalise_backward(dy, d_n, tape.get(at, "cross_input"), tape.get(at, "cross_scale"))


# -- feed-forward ------------------------------------------------------------------------------


def feed_forward(x: Tensor, tape: LayerTape, at: Slots, shape: Shape) -> Tensor:
    """x plus down(silu(gate) * up)."""
    n, scale = normalise(x, shape.eps)
    gate_up = product(n, tape.weights.gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    tape.put(at, ffn_input=n, ffn_scale=scale, gate_up=gate_up)
    out = tape.seam.total(product(F.silu(gate) * up, tape.weights.down))
    return x + masked(out, mask_of(tape.masks.ffn, at))


def feed_forward_backward(dy: Tensor, tape: LayerTape, at: Slots) -> Tensor:
    """The gradient with respect to `feed_forward`'s x."""
    gate, up = tape.get(at, "gate_up").chunk(2, dim=-1)
    d_ffn = masked(dy, mask_of(tape.masks.ffn, at))
    d_hidden = product_backward(d_ffn, tape.weights.down)
    d_gate = silu_backward(d_hidden * up, gate)
    d_gate_up = torch.cat((d_gate, d_hidden * F.silu(gate)), dim=-1)
    tape.put(at, d_ffn=d_ffn, d_gate_up=d_gate_up)
    d_n = tape.seam.total(product_backward(d_gate_up, tape.weights.gate_up))
    return normalise_backward(dy, d_n, tape.get(at, "ffn_input"), tape.get(at, "ffn_scale"))


# -- the layer ---------------------------------------------------------------------------------


def layer_forward(x: Tensor, tape: LayerTape, at: Slots, view: View, shape: Shape) -> Tensor:
    """One layer, [C, B, d] to [C, B, d]."""
    x = self_attention(x, tape, at, view, shape)
    x = cross_attention(x, tape, at, view, shape)
    return feed_forward(x, tape, at, shape)


def layer_backward(dy: Tensor, tape: LayerTape, at: Slots, view: View, shape: Shape) -> Tensor:
    """The gradient with respect to `layer_forward`'s x."""
    dy = feed_forward_backward(dy, tape, at)
    dy = cross_attention_backward(dy, tape, at, view, shape)
    return self_attention_backward(dy, tape, at, view, shape)
