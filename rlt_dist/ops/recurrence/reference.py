"""The reference backend: plain autograd, chunk by chunk. It defines what the others must give."""

import torch
import torch.nn.functional as F
from torch import Tensor

from rlt_dist.ops.noise import masked
from rlt_dist.ops.recurrence.arithmetic import (
    by_lane,
    by_token,
    product,
)
from rlt_dist.ops.recurrence.chunks import Slots
from rlt_dist.ops.recurrence.problem import (
    FeedbackInputs,
    LayerMasks,
    LayerWeights,
    Memory,
    Operands,
    Plan,
    Sight,
    padded,
)
from rlt_dist.ops.rotary import rotate


def run_reference(plan: Plan, operands: Operands) -> tuple[Tensor, list[Tensor]]:
    """Outputs s [T, B, d], and by layer the window after the segment."""
    fed, windows, outputs = operands.fed, list(operands.windows), []
    operands = operands.with_contiguous_memories()
    memories = [operands.memories[group] for group in plan.groups]
    masks = [LayerMasks(*(m if m is None else padded(m) for m in layer)) for layer in plan.masks]
    e, gate_e = padded(operands.e), padded(operands.e if fed is None else fed.gate_e)
    s = operands.e[0] if fed is None else fed.s
    for k, at in enumerate(plan.chunks.slots):
        sight, x = plan.sight(at), at.get(e)
        if fed is not None:
            h = boundary_state(fed, s, plan.chunks.fresh[k], plan.chunks.start[k])
            x = merge(x, at.get(gate_e), h, fed.weight, plan)
        for j, weights in enumerate(operands.weights):
            drop = LayerMasks(*(m if m is None else at.get(m) for m in masks[j]))
            x, seen = self_attention(x, windows[j], weights, sight, plan, drop.attn)
            x = cross_attention(x, memories[j], weights, sight, plan, drop.cross)
            x = feed_forward(x, weights, plan, drop.ffn)
            windows[j] = slide(seen, plan.chunks.length[k], at, plan.shape.window - 1)
        s = last(x, plan.chunks.length[k], at, s)
        outputs.append(x)
    return join(outputs, plan), windows


def boundary_state(fed: FeedbackInputs, before: Tensor, fresh: Tensor, start: Tensor) -> Tensor:
    """h [B, d]: s* at a document's start, else the output `before` the chunk, else the carried."""
    return torch.where(
        fresh[:, None], torch.where(start[:, None], fed.initial, before), fed.boundary
    )


def boundary_after(plan: Plan, fed: FeedbackInputs, s: Tensor) -> Tensor:
    """The boundary state [B, d] of each lane's last chunk, which may run on in the next segment."""
    first, fresh, start = plan.chunks.last()
    before = torch.cat((fed.s[None], s))[first, torch.arange(s.shape[1], device=s.device)]
    return boundary_state(fed, before, fresh, start)


def normalise(x: Tensor, eps: float) -> Tensor:
    """x / rms(x)."""
    return x * (x.square().mean(dim=-1, keepdim=True) + eps).rsqrt()


def merge(e: Tensor, gate_e: Tensor, h: Tensor, weight: Tensor, plan: Plan) -> Tensor:
    """u [C, B, d] of a chunk's encoder outputs e [C, B, d]."""
    gate_h, value = product(sublayer_input(h, plan), weight).chunk(2, dim=-1)
    added = plan.alpha * torch.sigmoid(gate_e + gate_h) * value
    own = plan.seam.own(d := e.shape[-1])
    if len(own) < d:
        added = plan.seam.leave(F.pad(added, (own.start, d - own.stop)))
    return e + added


def sublayer_input(x: Tensor, plan: Plan) -> Tensor:
    """x / rms(x), in front of weights that may be cut."""
    return normalise(plan.seam.enter(x), plan.shape.eps)


def self_attention(
    x: Tensor, window: Tensor, w: LayerWeights, sight: Sight, plan: Plan, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """x plus attention over each token's last W entries; and the entries, old and new."""
    shape = plan.shape
    qkv = product(sublayer_input(x, plan), w.qkv).unflatten(-1, (-1, shape.head_width))
    q, k, v = qkv.split((shape.heads, shape.kv_heads, shape.kv_heads), dim=2)
    q, k = rotate(q, sight.cos, sight.sin), rotate(k, sight.cos, sight.sin)
    seen = torch.cat((window, torch.stack((k, v), dim=2)))
    keys, values = seen.unfold(0, shape.window, 1).movedim(-1, -2).unbind(dim=2)
    query = q.unflatten(2, (shape.kv_heads, -1))
    weight = (query @ keys.transpose(-1, -2) + sight.window).softmax(dim=-1)
    out = plan.seam.leave(product((weight @ values).flatten(2), w.o))
    return x + masked(out, mask), seen


def cross_attention(
    x: Tensor, memory: Memory, w: LayerWeights, sight: Sight, plan: Plan, mask: Tensor | None
) -> Tensor:
    """x plus attention to the encoder memory."""
    shape = plan.shape
    q = product(sublayer_input(x, plan), w.cross_q).unflatten(-1, (-1, shape.head_width))
    query = by_lane(rotate(q, sight.cos, sight.sin), shape.kv_heads)
    score = (query @ memory.k.transpose(-1, -2)).unflatten(2, (len(x), -1)) + sight.memory
    crossed = by_token(score.softmax(dim=-1).flatten(2, 3) @ memory.v, len(x))
    return x + masked(plan.seam.leave(product(crossed.flatten(2), w.cross_o)), mask)


def feed_forward(x: Tensor, w: LayerWeights, plan: Plan, mask: Tensor | None) -> Tensor:
    """x plus down(silu(gate) * up)."""
    gate, up = product(sublayer_input(x, plan), w.gate_up).chunk(2, dim=-1)
    return x + masked(plan.seam.leave(product(F.silu(gate) * up, w.down)), mask)


def slide(seen: Tensor, length: Tensor, at: Slots, keep: int) -> Tensor:
    """The newest `keep` entries of each lane, of which `length` [B] of the chunk's are real."""
    if at.index is None:
        return seen[len(seen) - keep :]
    lanes = torch.arange(len(length), device=length.device)
    return seen[length + torch.arange(keep, device=length.device)[:, None], lanes]


def last(x: Tensor, length: Tensor, at: Slots, before: Tensor) -> Tensor:
    """Output [B, d] of each lane's last real token of a chunk; `before` where it has none."""
    if at.index is None:
        return x[-1]
    lanes = torch.arange(len(length), device=length.device)
    newest = x[(length - 1).clamp(min=0), lanes]
    return torch.where(length[:, None] > 0, newest, before)


def join(outputs: list[Tensor], plan: Plan) -> Tensor:
    """Chunk outputs to [T, B, ...], padding dropped."""
    joined = torch.cat(outputs)
    slots = plan.chunks.slots
    if all(at.index is None for at in slots):
        return joined
    place = torch.zeros_like(padded(plan.position))
    done = 0
    for at in slots:
        at.put(place, done + torch.arange(at.count, device=place.device)[:, None])
        done += at.count
    return joined[place[:-1], torch.arange(place.shape[1], device=place.device)]
