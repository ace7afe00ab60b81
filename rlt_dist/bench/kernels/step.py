"""The kernels of the recurrent loop, each by itself: one chunk in the middle of documents.

Floors are those of the kernels' own files.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from rlt_dist.bench.kernels.case import Case, Floor, Made
from rlt_dist.ops.rotary import rotary_tables, rotate
from rlt_dist.ops.triton import feed_forward, memory, merge, window
from rlt_dist.ops.triton.shapes import Shapes

_EPS, _ALPHA = 1e-6, 0.1


def cases(shapes: Shapes) -> Iterator[Case]:
    if shapes.model != "rlt":
        return
    floors = _floors(shapes)
    for name, make in _MADE.items():
        yield Case(name, floors[name], partial(_make, make, shapes), graph=True)


def _make(make: Callable[["_Step"], Made], shapes: Shapes) -> Made:
    return make(_Step(shapes))


def _floors(shapes: Shapes) -> dict[str, Floor]:
    p, d, f = shapes.products.itemsize, shapes.d, shapes.inner
    lanes, n, w = shapes.lanes, shapes.lanes * shapes.chunk, shapes.window
    heads, kv = shapes.heads * shapes.width, shapes.kv_heads * shapes.width
    entries = shapes.memory + shapes.chunk
    seen, read = n * heads * (shapes.memory + 1), 2 * lanes * kv * entries * p
    near = (heads + 2 * kv) * p + 8 * kv * w + heads * (4 + p)
    near_backward = heads * (2 * p + 12) + 24 * kv * w + kv * (8 + 2 * p)
    return {
        "memory_forward": Floor(read, 4 * seen),
        "memory_backward": Floor(read + 8 * n * shapes.heads * entries, 6 * seen),
        "window_forward": Floor(n * near),
        "window_backward": Floor(n * near_backward),
        "residual_norm": Floor(n * d * (12 + 2 * p)),
        "residual_norm_backward": Floor(n * d * (16 + 2 * p)),
        "swiglu": Floor(n * f * (8 + 3 * p)),
        "swiglu_backward": Floor(n * f * (16 + 3 * p)),
        "boundary_norm": Floor(lanes * d * (8 + p)),
        "boundary_norm_backward": Floor(lanes * d * (12 + p)),
        "merge": Floor(lanes * d * (8 * shapes.chunk + 8 + 2 * p)),
        "merge_backward": Floor(lanes * d * (12 * shapes.chunk + 16 + 2 * p)),
    }


class _Step:
    """A chunk of C tokens in slots 0 .. C - 1 of tapes [C + 1, B, ...], and room for N = C B rows.

    A token sees the `memory` entries before its own, and W of the window.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.shapes, self.tokens, self.lanes = shapes, shapes.chunk, shapes.lanes
        self.rows, self.dtype = self.tokens * self.lanes, shapes.products
        token = torch.arange(self.tokens + 1)[:, None].repeat(1, self.lanes)
        self.index, self.first = token[:-1].contiguous(), token.to(torch.int32)
        self.last = self.first + shapes.memory
        position = token + shapes.memory
        self.tables = rotary_tables(position, shapes.width, 10000.0, torch.float32)
        self.chunk = torch.zeros(1, dtype=torch.int64)
        facts = torch.zeros(3, 1, self.lanes, dtype=torch.int32)
        facts[1] = 1  # it begins a chunk, not a document
        self.facts = facts

    def tape(self, *size: int) -> Tensor:
        return torch.zeros(self.tokens + 1, self.lanes, *size)

    def room(self, *size: int) -> Tensor:
        return torch.empty(self.rows, *size, dtype=self.dtype)

    def values(self, *size: int) -> Tensor:
        return torch.randn(size).to(self.dtype)

    def taped(self, tape: Tensor, like: Tensor) -> Tensor:
        """[N, ...] of a tape, in the type of another tensor."""
        return tape[:-1].flatten(0, 1).to(like.dtype)

    def rotated(self, x: Tensor) -> Tensor:
        """x [N, heads w] as [C, B, heads, w], under the tokens' rotary."""
        cos, sin = (table[:-1].to(x.dtype) for table in self.tables)
        return rotate(x.view(self.tokens, self.lanes, -1, self.shapes.width), cos, sin)


def _pull(compute: Callable[[Tensor], Tensor], at: Tensor, gradient: Tensor) -> tuple[Tensor, ...]:
    """The gradient of `at`, given that of what is computed of it."""
    leaf = at.detach().requires_grad_()
    return torch.autograd.grad(compute(leaf), leaf, gradient)


def _attend(step: _Step, query: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """[N, H w]: query [C, B, H, w], k and v [C or 1, B, KV, M, w], seen bool [C, M]."""
    group = step.shapes.heads // step.shapes.kv_heads
    k, v = (x.repeat_interleave(group, dim=2) for x in (k, v))
    score = (k @ query[..., None])[..., 0].masked_fill(~seen[:, None, None], -torch.inf)
    out: Tensor = (score.softmax(-1)[..., None, :] @ v)[..., 0, :]
    return out.reshape(step.rows, -1)


def _memory(step: _Step, backward: bool) -> Made:
    shapes, width = step.shapes, step.shapes.width
    heads, entries = shapes.heads * width, shapes.memory + step.tokens
    size = (step.lanes, shapes.kv_heads, entries, width)
    query, (k, v) = step.values(step.rows, heads) * width**-0.5, step.values(2, *size)
    blocks = memory.blocks(step.tokens, step.lanes, shapes.heads, shapes.kv_heads, entries)
    parts = memory.Partial.room(blocks, step.rows, shapes.heads, width, torch.empty(0))
    by_head = (shapes.heads, width)
    kept = step.tape(*by_head), step.tape(*by_head), step.tape(shapes.heads)
    crossed, dq = step.room(heads), step.room(heads)
    weights = step.tape(shapes.heads, entries), step.tape(shapes.heads, entries)
    gradients = (*weights, step.tape(*by_head), step.tape(heads))
    key = torch.arange(entries)
    seen = (key >= step.first[:-1, :1]) & (key <= step.last[:-1, :1])

    def forward(query: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        reading = memory.Reading(k, v, step.first, step.last)
        memory.memory_forward(step.index, query, step.tables, reading, parts, crossed, kept)
        return (crossed,)

    def plain(query: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor]:
        return (_attend(step, step.rotated(query), k[None], v[None], seen),)

    if not backward:
        return Made((query, k, v), forward, plain)
    forward(query, k, v)

    def pulled(gradient: Tensor) -> tuple[Tensor]:
        reading = memory.Reading(k, v, step.first, step.last)
        memory.memory_backward(
            step.index, gradient, step.tables, reading, parts, kept, dq, gradients
        )
        return (dq,)

    def plain_pulled(gradient: Tensor) -> tuple[Tensor, ...]:
        q, *known = (x.to(gradient.dtype) for x in (query, k, v))
        return _pull(lambda q: plain(q, *known)[0], q, gradient)

    return Made((step.values(step.rows, heads),), pulled, plain_pulled)


def _window(step: _Step, backward: bool) -> Made:
    shapes, w = step.shapes, step.shapes.window
    heads, kv = shapes.heads * shapes.width, shapes.kv_heads * shapes.width
    entries = torch.randn(w + step.tokens, step.lanes, 2, shapes.kv_heads, shapes.width)
    qkv = step.values(step.rows, heads + 2 * kv)
    qkv[:, :heads] *= shapes.width**-0.5
    nearest = torch.zeros_like(step.first)
    kept = step.tape(shapes.heads, shapes.width), step.tape(shapes.heads, w)
    attended, d_qkv = step.room(heads), step.room(heads + 2 * kv)
    d_score, dentries = torch.empty(step.rows, shapes.heads, w), torch.zeros_like(entries)
    tape = step.tape(heads), step.tape(heads + 2 * kv)

    def forward(qkv: Tensor) -> tuple[Tensor]:
        window.window_forward(step.index, qkv, step.tables, nearest, entries, kept, attended)
        return (attended,)

    def plain(qkv: Tensor) -> tuple[Tensor]:
        q, k, v = qkv.split((heads, kv, kv), dim=1)
        own = torch.stack((step.rotated(k), v.view(step.tokens, step.lanes, -1, shapes.width)), 2)
        both = torch.cat((entries[: w - 1].to(qkv.dtype), own)).unfold(0, w, 1).movedim(-1, -2)
        seen = torch.ones(step.tokens, w, dtype=torch.bool, device=qkv.device)
        return (_attend(step, step.rotated(q), both[:, :, 0], both[:, :, 1], seen),)

    if not backward:
        return Made((qkv,), forward, plain)
    forward(qkv)

    def pulled(gradient: Tensor) -> tuple[Tensor]:
        window.window_backward(
            *(step.index, gradient, step.tables, entries, kept, d_score, dentries, d_qkv, tape)
        )
        return (d_qkv,)

    def plain_pulled(gradient: Tensor) -> tuple[Tensor, ...]:
        return _pull(lambda x: plain(x)[0], qkv.to(gradient.dtype), gradient)

    return Made((step.values(step.rows, heads),), pulled, plain_pulled)


def _normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, x.shape[-1:], eps=_EPS)


def _residual_norm(step: _Step) -> Made:
    d = step.shapes.d
    x, normed = torch.empty(step.rows, d), step.room(d)
    norm = normed, step.tape(d), step.tape(1)

    def kernel(source: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        feed_forward.residual_norm(step.index, source, out, None, x, norm, _EPS)
        return x, normed

    def plain(source: Tensor, out: Tensor) -> tuple[Tensor, ...]:
        return source + out, _normed(source + out)

    return Made((torch.randn(step.rows, d), step.values(step.rows, d)), kernel, plain)


def _residual_norm_backward(step: _Step) -> Made:
    d = step.shapes.d
    x = torch.randn(step.tokens + 1, step.lanes, d)
    dx, d_out = torch.empty(step.rows, d), step.room(d)
    scale = (x.square().mean(-1, keepdim=True) + _EPS).rsqrt()
    kept, tape = (x * scale, scale), step.tape(d)

    def kernel(source: Tensor, dn: Tensor) -> tuple[Tensor, ...]:
        norm = dn, *kept
        feed_forward.residual_norm_backward(step.index, source, norm, None, dx, (d_out, tape))
        return dx, d_out

    def plain(source: Tensor, dn: Tensor) -> tuple[Tensor, ...]:
        (of_norm,) = _pull(_normed, step.taped(x, dn), dn)
        return source + of_norm, source + of_norm

    return Made((torch.randn(step.rows, d), step.values(step.rows, d)), kernel, plain)


def _gated(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def _swiglu(step: _Step) -> Made:
    f = step.shapes.inner
    hidden, tape = step.room(f), step.tape(2 * f)

    def kernel(gate_up: Tensor) -> tuple[Tensor]:
        feed_forward.swiglu(step.index, gate_up, tape, hidden)
        return (hidden,)

    return Made((step.values(step.rows, 2 * f),), kernel, lambda x: (_gated(x),))


def _swiglu_backward(step: _Step) -> Made:
    f = step.shapes.inner
    gate_up, d_gate_up = torch.randn(step.tokens + 1, step.lanes, 2 * f), step.room(2 * f)
    tape = step.tape(2 * f)

    def kernel(gradient: Tensor) -> tuple[Tensor]:
        feed_forward.swiglu_backward(step.index, gradient, gate_up, d_gate_up, tape)
        return (d_gate_up,)

    def plain(gradient: Tensor) -> tuple[Tensor, ...]:
        return _pull(_gated, step.taped(gate_up, gradient), gradient)

    return Made((step.values(step.rows, f),), kernel, plain)


def _boundary_norm(step: _Step) -> Made:
    d, other = step.shapes.d, torch.randn(step.lanes, step.shapes.d)
    r = torch.empty(step.lanes, d, dtype=step.dtype)
    tape = torch.empty(1, step.lanes, d), torch.empty(1, step.lanes, 1)

    def kernel(s: Tensor) -> tuple[Tensor]:
        merge.boundary_norm(step.chunk, step.facts, s, other, other, r, tape, _EPS)
        return (r,)

    return Made((torch.randn(step.tokens + 2, step.lanes, d),), kernel, lambda s: (_normed(s[0]),))


def _boundary_norm_backward(step: _Step) -> Made:
    d = step.shapes.d
    h, ds = torch.randn(step.lanes, d), torch.zeros(step.tokens + 2, step.lanes, d)
    scale = (h.square().mean(-1, keepdim=True) + _EPS).rsqrt()
    others = torch.zeros(2, step.lanes, d)
    kept = (h * scale)[None], scale[None]

    def kernel(dr: Tensor) -> tuple[Tensor]:
        merge.boundary_norm_backward(step.chunk, step.facts, dr, kept, ds, others[0], others[1])
        return (ds[0],)

    def plain(dr: Tensor) -> tuple[Tensor, ...]:
        return _pull(_normed, h.to(dr.dtype), dr)

    return Made((step.values(step.lanes, d),), kernel, plain)


def _merge(step: _Step, backward: bool) -> Made:
    d = step.shapes.d
    gate_e, fed = torch.randn(step.tokens + 1, step.lanes, d), step.values(step.lanes, 2 * d)
    added, fed_tape = torch.empty(step.rows, d), fed.float()[None]
    dgate_e, dfed, dfed_tape = step.tape(d), torch.empty_like(fed), torch.empty_like(fed_tape)

    def plain(gate_e: Tensor, fed: Tensor) -> Tensor:
        gate, value = fed.chunk(2, dim=-1)
        return (_ALPHA * torch.sigmoid(gate_e + gate) * value).flatten(0, 1)

    def kernel(fed: Tensor) -> tuple[Tensor]:
        merge.merge(step.index, step.chunk, gate_e, fed, fed_tape, added, 0, _ALPHA)
        return (added,)

    def pulled(du: Tensor) -> tuple[Tensor, ...]:
        own = du, gate_e, fed_tape, dgate_e, dfed, dfed_tape
        merge.merge_backward(step.index, step.chunk, *own, 0, _ALPHA)
        return dgate_e[:-1], dfed

    def plain_pulled(du: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.to(du.dtype).requires_grad_() for x in (gate_e[:-1], fed)]
        return torch.autograd.grad(plain(*leaves), leaves, du)

    if backward:
        return Made((torch.randn(step.rows, d),), pulled, plain_pulled)
    return Made((fed,), kernel, lambda fed: (plain(gate_e[:-1].to(fed.dtype), fed),))


_MADE: dict[str, Callable[[_Step], Made]] = {
    "memory_forward": lambda step: _memory(step, backward=False),
    "memory_backward": lambda step: _memory(step, backward=True),
    "window_forward": lambda step: _window(step, backward=False),
    "window_backward": lambda step: _window(step, backward=True),
    "residual_norm": _residual_norm,
    "residual_norm_backward": _residual_norm_backward,
    "swiglu": _swiglu,
    "swiglu_backward": _swiglu_backward,
    "boundary_norm": _boundary_norm,
    "boundary_norm_backward": _boundary_norm_backward,
    "merge": lambda step: _merge(step, backward=False),
    "merge_backward": lambda step: _merge(step, backward=True),
}
