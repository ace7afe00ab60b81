"""The loop in Triton kernels and cuBLAS products, recorded as CUDA graphs.

What a step does is what `steps.py` and `feedback.py` say; here it is cut otherwise, into launches.
Before each sublayer stands one that adds what the sublayer before has given and normalises the sum;
then a product, the sublayer's own, a product. Everything is read from and written to the tape where
the chunk's slots are, or goes through workspaces, so that one recording serves all chunks of as
many tokens. The residual stream and the tape are float32; products are formed in the type that
autocast asked for when the pass began, from weights that are brought to it once.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from rlt_dist.ops.precision import product_dtype
from rlt_dist.ops.recurrence.graphs import At, Step, Steps
from rlt_dist.ops.recurrence.loop import Pass
from rlt_dist.ops.recurrence.problem import LayerWeights, Operands, padded
from rlt_dist.ops.recurrence.tape import LayerTape, Tape
from rlt_dist.ops.seam import WHOLE
from rlt_dist.ops.triton import feed_forward, memory, merge, window


class _Weights(NamedTuple):
    """In the type of products."""

    layers: list[LayerWeights]
    merge: Tensor | None


class TritonLoop:
    """The loop on CUDA, or, where triton interprets its kernels, on a CPU."""

    def __init__(self, operands: Operands) -> None:
        """Weights are brought to a type of products when a pass first has it."""
        self._operands = operands
        self._in: dict[torch.dtype, _Weights] = {}

    def precision(self, x: Tensor) -> torch.dtype:
        """Autocast's, where it is on."""
        return product_dtype(x)

    def forward(self, tape: Tape) -> Pass:
        """Fill the tape."""
        return _steps(tape, _Forward(tape, self._weights(tape)))

    def backward(self, tape: Tape) -> Pass:
        """Fill its gradients, those of activations only."""
        steps = _steps(tape, _Backward(tape, self._weights(tape)))
        return lambda chunks: steps(reversed(chunks))

    def _weights(self, tape: Tape) -> _Weights:
        dtype = product_dtype(tape.feedback.e)
        if dtype not in self._in:
            fed, layers = self._operands.fed, self._operands.weights
            self._in[dtype] = _Weights(
                [LayerWeights(*(x.detach().to(dtype) for x in weights)) for weights in layers],
                None if fed is None else fed.weight.detach().to(dtype),
            )
        return self._in[dtype]


def _steps(tape: Tape, step: Step) -> Steps:
    """Sums over processes are not recorded: whether they can be is for their library to say."""
    return Steps(tape.plan.chunks, step, record=tape.plan.seam is WHOLE)


class _Sight:
    """What tokens see, on the device and by slot, [T + 1, B, ...]; and chunks by number.

    Attributes:
        tables: cosine and sine of each token's position.
        nearest: int32, the first of its window that a token sees.
        readings: by layer, its memory in the type of products.
        facts: int32 [3, K, B], as `merge` reads them.
        entries: how many of the memory a chunk of so many tokens sees at most.
    """

    def __init__(self, tape: Tape, dtype: torch.dtype) -> None:
        plan, chunks = tape.plan, tape.plan.chunks
        self.tables = padded(plan.cos.float()), padded(plan.sin.float())
        nearest, first = plan.ranges()
        token = torch.arange(len(first), device=first.device)[:, None]
        last = (plan.past + token).expand_as(first)
        self.nearest = padded(nearest).to(torch.int32)
        # Padding sees the newest entry alone: with the oldest, its block would read all between.
        first, last = (torch.cat((x, last[-1:])).to(torch.int32) for x in (first, last))
        of_group = dict(zip(plan.groups, (layer.memory for layer in tape.layers), strict=True))
        read = {
            group: memory.Reading(k.to(dtype), v.to(dtype), first, last)
            for group, (k, v) in of_group.items()
        }
        self.readings = [read[group] for group in plan.groups]
        self.facts = torch.stack((chunks.first, chunks.fresh, chunks.start)).to(torch.int32)
        self._known, self._reach = plan.past + chunks.tokens, plan.reach

    def entries(self, tokens: int) -> int:
        return self._known if self._reach is None else min(self._known, self._reach + tokens)


class _Room(NamedTuple):
    """Workspaces of a step, [C B, ...], which layers and both directions' sublayers share.

    Attributes:
        x: [C B, d] float32, the residual stream, or its gradient.
        normed, out: [C B, d], what a sublayer is given and gives, or the gradients of these.
        qkv, heads, more_heads, inner, hidden: [C B, (H + 2 KV) w | H w | H w | 2 f | f].
        added: [C B, d] float32, what is merged with e.
        state, fed: [B, d | 2 d'].
        d_score: [C B, H, W] float32.
        partial: what programs that share the memory out leave for one another.
    """

    x: Tensor
    normed: Tensor
    out: Tensor
    qkv: Tensor
    heads: Tensor
    more_heads: Tensor
    inner: Tensor
    hidden: Tensor
    added: Tensor
    state: Tensor
    fed: Tensor
    d_score: Tensor
    partial: memory.Partial


class _Step:
    """What both directions have: the tape, weights, and workspaces by the tokens of a chunk."""

    def __init__(self, tape: Tape, weights: _Weights) -> None:
        self._tape, self._weights, self._plan = tape, weights, tape.plan
        self._dtype = weights.layers[0].qkv.dtype
        self._sight = _Sight(tape, self._dtype)
        self._rooms: dict[int, _Room] = {}

    def _room(self, at: At) -> _Room:
        tokens = len(at.slots)
        if tokens not in self._rooms:
            self._rooms[tokens] = self._make_room(tokens)
        return self._rooms[tokens]

    def _make_room(self, tokens: int) -> _Room:
        shape, e, weights = self._plan.shape, self._tape.feedback.e, self._weights.layers[0]
        lanes, d = e.shape[1:]
        rows, queries = tokens * lanes, shape.heads * shape.head_width
        seen = self._sight.entries(tokens)
        blocks = memory.blocks(tokens, lanes, shape.heads, shape.kv_heads, seen)

        def room(*size: int, dtype: torch.dtype = self._dtype) -> Tensor:
            return e.new_empty(size, dtype=dtype)

        columns = 0 if self._weights.merge is None else len(self._weights.merge)
        return _Room(
            x=room(rows, d, dtype=torch.float32),
            normed=room(rows, d),
            out=room(rows, d),
            qkv=room(rows, len(weights.qkv)),
            heads=room(rows, queries),
            more_heads=room(rows, queries),
            inner=room(rows, len(weights.gate_up)),
            hidden=room(rows, weights.down.shape[1]),
            added=room(rows, d, dtype=torch.float32),
            state=room(lanes, d),
            fed=room(lanes, columns),
            d_score=room(rows, shape.heads, shape.window, dtype=torch.float32),
            partial=memory.Partial.room(blocks, rows, shape.heads, shape.head_width, e),
        )

    def _own_start(self) -> int:
        """The first column that the merge forms here."""
        own = self._tape.feedback.own
        return 0 if own is None else own.start


class _Forward(_Step):
    def __call__(self, at: At) -> None:
        """Fill a chunk's part of the tape."""
        room, fed, eps = self._room(at), self._tape.feedback, self._plan.shape.eps
        sublayers = {
            "attn": self._attention,
            "cross": self._cross_attention,
            "ffn": self._feed_forward,
        }
        source, out, mask = fed.e, self._merged(at, room), None
        for j, layer in enumerate(self._tape.layers):
            for name, sublayer in sublayers.items():
                norm = (room.normed, layer.kept[f"{name}_input"], layer.kept[f"{name}_scale"])
                feed_forward.residual_norm(at.slots, source, out, mask, room.x, norm, eps)
                sublayer(j, layer, at, room)
                source, out = room.x, self._plan.seam.total(room.out)
                mask = getattr(layer.masks, name)
        feed_forward.residual_norm(at.slots, source, out, mask, room.x, fed.y)

    def _merged(self, at: At, room: _Room) -> Tensor | None:
        """What is added to e."""
        tape, weight, sight = self._tape.feedback, self._weights.merge, self._sight
        if tape.inputs is None or weight is None:
            return None
        states, kept = (tape.s, tape.initial, tape.boundary), (tape.r, tape.r_scale)
        merge.boundary_norm(at.chunk, sight.facts, *states, room.state, kept, tape.eps)
        torch.mm(room.state, weight.T, out=room.fed)
        halves = (tape.gate_e, room.fed, tape.fed, room.added)
        merge.merge(at.slots, at.chunk, *halves, self._own_start(), tape.alpha)
        return room.added if tape.own is None else tape.seam.total(room.added)

    def _attention(self, j: int, layer: LayerTape, at: At, room: _Room) -> None:
        weights, kept = self._weights.layers[j], layer.kept
        torch.mm(room.normed, weights.qkv.T, out=room.qkv)
        sight, taped = (self._sight.tables, self._sight.nearest), (kept["query"], kept["weight"])
        window.window_forward(at.slots, room.qkv, *sight, layer.entries, taped, room.heads)
        torch.mm(room.heads, weights.o.T, out=room.out)

    def _cross_attention(self, j: int, layer: LayerTape, at: At, room: _Room) -> None:
        weights, tables, reading = self._weights.layers[j], self._sight.tables, self._sight.readings
        torch.mm(room.normed, weights.cross_q.T, out=room.more_heads)
        memory.memory_forward(
            *(at.slots, room.more_heads, tables, reading[j], room.partial, room.heads),
            _crossing(layer),
        )
        torch.mm(room.heads, weights.cross_o.T, out=room.out)

    def _feed_forward(self, j: int, layer: LayerTape, at: At, room: _Room) -> None:
        weights = self._weights.layers[j]
        torch.mm(room.normed, weights.gate_up.T, out=room.inner)
        feed_forward.swiglu(at.slots, room.inner, layer.kept["gate_up"], room.hidden)
        torch.mm(room.hidden, weights.down.T, out=room.out)


class _Backward(_Step):
    def __call__(self, at: At) -> None:
        """Fill a chunk's part of the gradients."""
        room, fed = self._room(at), self._tape.feedback
        sublayers = {
            "attn": self._attention,
            "cross": self._cross_attention,
            "ffn": self._feed_forward,
        }
        source, norm = fed.dy, None
        for j, layer in reversed(list(enumerate(self._tape.layers))):
            for name, sublayer in reversed(sublayers.items()):
                mask, d_out = getattr(layer.masks, name), (room.out, layer.kept[f"d_{name}"])
                feed_forward.residual_norm_backward(at.slots, source, norm, mask, room.x, d_out)
                sublayer(j, layer, at, room)
                kept = (layer.kept[f"{name}_input"], layer.kept[f"{name}_scale"])
                source, norm = room.x, (self._plan.seam.total(room.normed), *kept)
        feed_forward.residual_norm_backward(at.slots, source, norm, None, room.x, fed.de)
        self._merged(at, room)

    def _merged(self, at: At, room: _Room) -> None:
        tape, weight, facts = self._tape.feedback, self._weights.merge, self._sight.facts
        if tape.inputs is None or weight is None:
            return
        own = (room.x, tape.gate_e, tape.fed, tape.dgate_e, room.fed, tape.dfed)
        merge.merge_backward(at.slots, at.chunk, *own, self._own_start(), tape.alpha)
        torch.mm(room.fed, weight, out=room.state)
        kept, sums = (tape.r, tape.r_scale), (tape.ds, tape.dinitial, tape.dboundary)
        dr = tape.seam.total(room.state)
        merge.boundary_norm_backward(at.chunk, facts, dr, kept, *sums)

    def _attention(self, j: int, layer: LayerTape, at: At, room: _Room) -> None:
        weights, kept = self._weights.layers[j], layer.kept
        torch.mm(room.out, weights.o, out=room.heads)
        window.window_backward(
            *(at.slots, room.heads, self._sight.tables, layer.entries),
            (kept["query"], kept["weight"]),
            *(room.d_score, layer.dentries, room.qkv, (kept["attended"], kept["d_qkv"])),
        )
        torch.mm(room.qkv, weights.qkv, out=room.normed)

    def _cross_attention(self, j: int, layer: LayerTape, at: At, room: _Room) -> None:
        weights, tables, reading = self._weights.layers[j], self._sight.tables, self._sight.readings
        kept = layer.kept
        torch.mm(room.out, weights.cross_o, out=room.heads)
        memory.memory_backward(
            *(at.slots, room.heads, tables, reading[j], room.partial, _crossing(layer)),
            room.more_heads,
            (kept["cross_weight"], kept["d_score"], kept["d_crossed"], kept["d_cross_q"]),
        )
        torch.mm(room.more_heads, weights.cross_q, out=room.normed)

    def _feed_forward(self, j: int, layer: LayerTape, at: At, room: _Room) -> None:
        weights, kept = self._weights.layers[j], layer.kept
        torch.mm(room.out, weights.down, out=room.hidden)
        taped = (kept["gate_up"], room.inner, kept["d_gate_up"])
        feed_forward.swiglu_backward(at.slots, room.hidden, *taped)
        torch.mm(room.inner, weights.gate_up, out=room.normed)


def _crossing(layer: LayerTape) -> tuple[Tensor, Tensor, Tensor]:
    """What forward keeps of the attention to the memory."""
    return layer.kept["cross_query"], layer.kept["crossed"], layer.kept["cross_log"]
