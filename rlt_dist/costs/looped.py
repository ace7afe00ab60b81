"""RLT's pieces on one rank: what each kind of work multiplies, and sums over the tensor axis.

Products are those of `models.rlt` and `ops.recurrence`, in their shapes. The decoder runs in steps
of C tokens that see m entries of the memory.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rlt_dist.config.model import RltConfig
from rlt_dist.costs.effort import (
    Effort,
    Product,
    Transfer,
    again,
    both_gradients,
    first_gradients,
    linear,
    second_gradients,
    sums,
    times,
)
from rlt_dist.costs.head import softmax_products, softmax_sums
from rlt_dist.costs.sizes import Numbers, Pass
from rlt_dist.ops.recurrence.parts import Cut
from rlt_dist.parallel.plan.cut import own
from rlt_dist.parallel.plan.placement import Placement
from rlt_dist.parallel.schedule.instructions import Kind, Work


@dataclass(frozen=True)
class LoopedShare:
    """What one rank has of the model.

    Attributes:
        heads, kv_heads, inner, merged, words: of query heads, key/value heads, columns of the
            feed-forward, columns that the merge adds to, ids of the vocabulary.
        encoder, decoder: layers.
        groups: of the memory, that it projects.
        tensors: ranks that weights are cut over.
    """

    config: RltConfig
    heads: int
    kv_heads: int
    inner: int
    merged: int
    words: int
    encoder: int
    decoder: int
    groups: int
    first: bool
    last: bool
    tensors: int


def looped_share(
    config: RltConfig, vocabulary: int, where: Placement, tensor: int = 0, tensors: int = 1
) -> LoopedShare:
    """The part of tensor rank `tensor` of a stage; rank 0 never has less than another."""
    return LoopedShare(
        config=config,
        heads=config.heads // tensors,
        kv_heads=max(1, config.key_value_heads // tensors),
        inner=len(own(config.ffn, tensor, tensors)),
        merged=len(own(config.d_model, tensor, tensors)),
        words=len(own(vocabulary, tensor, tensors)),
        encoder=len(where.encoder),
        decoder=len(where.decoder),
        groups=len({config.memory_group(j) for j in where.decoder}),
        first=where.first,
        last=where.last,
        tensors=tensors,
    )


@dataclass(frozen=True)
class Step:
    """One chunk step: the tokens first .. first + count - 1 of the segment, and its part.

    Where lanes are apart, those of a lane that has most.
    """

    first: int
    count: int
    part: int


def steps_of(parts: list[slice], feedback: int, own: Pass) -> list[Step]:
    """The chunk steps of a segment's parts."""
    chunks = _chunks_apart if own.apart and feedback else _chunks
    return [
        Step(first, end - first, number)
        for number, part in enumerate(parts)
        for first, end in chunks(part, feedback, own.seen)
    ]


def _chunks(part: slice, feedback: int, seen: int) -> Iterator[tuple[int, int]]:
    first = part.start
    while first < part.stop:
        end = first + feedback - (seen + first) % feedback if feedback else part.stop
        yield first, min(end, part.stop)
        first = min(end, part.stop)


def _chunks_apart(part: slice, feedback: int, _: int) -> Iterator[tuple[int, int]]:
    """Of lanes at all places: one is at a border, and one has a single token left before it, whose
    further chunks are the last."""
    tokens = part.stop - part.start
    for first in range(0, tokens + feedback - 1, feedback):
        count = min(feedback, tokens, tokens + feedback - 1 - first)
        start = part.start + min(first, tokens - count)
        yield start, start + count


# -- products ----------------------------------------------------------------------------------


def encoder_layer(share: LoopedShare, own: Pass) -> list[Product]:
    """Forward of one encoder layer over b T tokens."""
    config, rows = share.config, own.rows
    d, width = config.d_model, config.head_width
    queries, keys = share.heads * width, share.kv_heads * width
    return [
        linear(rows, d, queries),
        linear(rows, d, keys),
        linear(rows, d, keys),
        *encoder_attention(share, own),
        linear(rows, queries, d),
        linear(rows, d, share.inner),
        linear(rows, d, share.inner),
        linear(rows, share.inner, d),
    ]


def encoder_attention(share: LoopedShare, own: Pass) -> list[Product]:
    """Scores and what they weigh, of every key, seen or not: fused kernels count so."""
    width, seen = share.config.head_width, own.past(share.config.memory_len) + own.tokens
    batch = own.lanes * share.heads
    return [
        Product(batch, own.tokens, width, seen),
        Product(batch, own.tokens, seen, width),
    ]


def memory(share: LoopedShare, own: Pass) -> list[Product]:
    """The projections of e: keys and values of each group, and the encoder's half of the gate.

    Fed with tokens, the rest of the merge too.
    """
    d, keys = share.config.d_model, share.kv_heads * share.config.head_width
    projections = list(times(2 * share.groups, [linear(own.rows, d, keys)]))
    if share.first and share.config.feedback:
        projections.append(linear(own.rows, d, share.merged))
        if not share.config.chunk:
            projections.append(linear(own.rows, d, 2 * share.merged))
    return projections


def merge(share: LoopedShare, rows: int) -> list[Product]:
    """r's product with the merge's weight, for boundary states of so many chunks and lanes."""
    if not (share.first and share.config.chunk):
        return []
    return [linear(rows, share.config.d_model, 2 * share.merged)]


@dataclass(frozen=True)
class Layer:
    """One decoder layer's products on C tokens of b lanes that see m entries.

    Attributes:
        scores, mixes: over the window; `cross_` over the memory.
    """

    qkv: Product
    scores: Product
    mixes: Product
    o: Product
    cross_q: Product
    cross_scores: Product
    cross_mixes: Product
    cross_o: Product
    gate_up: Product
    down: Product

    @property
    def weighted(self) -> list[Product]:
        """Products with weights."""
        return [self.qkv, self.o, self.cross_q, self.cross_o, self.gate_up, self.down]

    @property
    def windows(self) -> list[Product]:
        """Products with the window's entries."""
        return [self.scores, self.mixes]

    @property
    def memories(self) -> list[Product]:
        """Products with the memory's entries."""
        return [self.cross_scores, self.cross_mixes]

    @property
    def all(self) -> list[Product]:
        """Forward."""
        return [*self.weighted, *self.windows, *self.memories]


def decoder_layer(share: LoopedShare, lanes: int, tokens: int, entries: int) -> Layer:
    """One layer on a step."""
    config, rows = share.config, lanes * tokens
    d, width, kv = config.d_model, config.head_width, share.kv_heads
    queries, sharing = share.heads * width, share.heads // kv
    return Layer(
        qkv=linear(rows, d, queries + 2 * kv * width),
        scores=Product(rows * kv, sharing, width, config.window),
        mixes=Product(rows * kv, sharing, config.window, width),
        o=linear(rows, queries, d),
        cross_q=linear(rows, d, queries),
        cross_scores=Product(lanes * kv, tokens * sharing, width, entries),
        cross_mixes=Product(lanes * kv, tokens * sharing, entries, width),
        cross_o=linear(rows, queries, d),
        gate_up=linear(rows, d, 2 * share.inner),
        down=linear(rows, share.inner, d),
    )


# -- work --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LoopedRank:
    """What a rank does of one micro-batch.

    Attributes:
        own: the segment.
        cut: the parts in which the decoder goes through it.
        numbers: bytes of one.
        recompute: encoder layers are run again in backward.
    """

    share: LoopedShare
    own: Pass
    cut: Cut
    numbers: Numbers
    recompute: bool

    @cached_property
    def parts(self) -> list[slice]:
        """Tokens of each part."""
        return self.cut.slices(self.own.tokens)

    @cached_property
    def steps(self) -> list[Step]:
        """Chunk steps of the segment."""
        return steps_of(self.parts, self.share.config.chunk, self.own)

    @property
    def filled(self) -> float:
        """The share of the steps' rows that have a token: where lanes are apart, shorter ones leave
        some empty."""
        return self.own.tokens / sum(step.count for step in self.steps)

    def works(self) -> Iterator[Work]:
        """All that the stage does, forward and backward, in some order."""
        steps, share = self.steps, self.share
        whole = {"step": 0, "count": len(steps)}
        parts = [
            {"step": numbers[0], "count": len(numbers)}
            for part in range(len(self.parts))
            if (numbers := [i for i, step in enumerate(steps) if step.part == part])
        ]
        kinds = [Kind.ENCODE, Kind.MEMORY, Kind.MEMORY_BACKWARD, Kind.ENCODE_BACKWARD]
        kinds += [Kind.EMBED, Kind.EMBED_BACKWARD] if share.first else []
        kinds += [Kind.HEAD] if share.last else []
        yield from (Work(kind, 0, **whole) for kind in kinds)
        for number in range(len(steps)):
            yield Work(Kind.DECODE, 0, number)
            yield Work(Kind.DECODE_BACKWARD, 0, number)
        if share.first and share.config.chunk:
            yield Work(Kind.CARRY, 0, len(steps))
        for part in parts:
            yield Work(Kind.MEMORY_GRADIENT, 0, **part)
            yield Work(Kind.WEIGHTS, 0, **part)
        yield from (Work(Kind.REPLAY, 0, **part) for part in parts[:-1])

    def alike(self) -> Iterator[tuple[Work, int]]:
        """The same, steps that take as much as one another as one with their number."""
        found: dict[object, tuple[Work, int]] = {}
        for work in self.works():
            key: object = work
            if work.kind in (Kind.DECODE, Kind.DECODE_BACKWARD):
                step = self.steps[work.step]
                key = work.kind, step.count, self.entries(step.first, step.count)
            found[key] = work, found.get(key, (work, 0))[1] + 1
        yield from found.values()

    def effort(self, work: Work) -> Effort:
        """What some of that work takes."""
        effort: Effort = getattr(self, f"_{work.kind.name.lower()}")(work)
        return effort if self.share.tensors > 1 else Effort(effort.products)

    def tokens(self, work: Work) -> tuple[int, int]:
        """The first token and how many, of work on chunk steps: one step, or a part's."""
        step = self.steps[work.step]
        if work.kind in (Kind.DECODE, Kind.DECODE_BACKWARD):
            return step.first, step.count
        part = self.parts[step.part]
        return part.start, part.stop - part.start

    # Bytes of activations [b, T, d], in messages.

    def _bytes(self, rows: int, narrow: bool = False) -> int:
        width = self.numbers.narrow if narrow else self.numbers.real
        return rows * self.share.config.d_model * width

    def _embed(self, _: Work) -> Effort:
        return Effort(sums=sums(self._bytes(self.own.rows), 1))

    def _embed_backward(self, _: Work) -> Effort:
        return Effort()

    def _carry(self, _: Work) -> Effort:
        return Effort()

    def _encode(self, _: Work) -> Effort:
        products = times(self.share.encoder, encoder_layer(self.share, self.own))
        leaving = sums(self._bytes(self.own.rows, narrow=True), 2 * self.share.encoder)
        return Effort(products, leaving)

    def _encode_backward(self, _: Work) -> Effort:
        share, layer = self.share, encoder_layer(self.share, self.own)
        products = [*both_gradients(layer), *again(encoder_attention(share, self.own)[:1])]
        messages = sums(self._bytes(self.own.rows), 2 * share.encoder)
        if self.recompute:
            products += again(layer)
            # Without dropout nothing behind the last sum is kept, and autograd stops before it.
            left = 2 if share.config.dropout else 1
            messages += sums(self._bytes(self.own.rows, narrow=True), left * share.encoder)
        return Effort(times(share.encoder, products), messages)

    def _memory(self, _: Work) -> Effort:
        merges = self._merges_tokens()
        leaving = sums(self._bytes(self.own.rows, narrow=True), merges)
        return Effort(tuple(memory(self.share, self.own)), leaving)

    def _memory_backward(self, _: Work) -> Effort:
        merges = self.share.first and self.share.config.feedback > 0
        entries = (self.share.groups > 0) + merges + self._merges_tokens()
        entered = sums(self._bytes(self.own.rows), entries)
        return Effort(tuple(both_gradients(memory(self.share, self.own))), entered)

    def _merges_tokens(self) -> bool:
        return self.share.first and self.share.config.feedback_from == "token"

    def _decode(self, work: Work) -> Effort:
        step = self.steps[work.step]
        layer = self._layer(step.first, step.count)
        merges = merge(self.share, self.own.lanes)
        messages = self._leaving(step.count, len(merges))
        return Effort((*merges, *times(self.share.decoder, layer.all)), messages)

    def _replay(self, work: Work) -> Effort:
        if self.cut.keep:
            return Effort()
        part = self.parts[self.steps[work.step].part]
        tokens = part.stop - part.start
        layer = self._layer(part.start, tokens)
        merges = merge(self.share, self.own.lanes * work.count)
        products = again([*merges, *times(self.share.decoder, layer.all)])
        return Effort(tuple(products), self._leaving(tokens, len(merges)))

    def _leaving(self, tokens: int, merges: int) -> tuple[Transfer, ...]:
        """Sums of a forward over some tokens: both attentions', and the others'."""
        layers, rows = self.share.decoder, self.own.lanes * tokens
        attended = sums(self._bytes(rows, narrow=True), 2 * layers)
        return attended + sums(self._bytes(rows), layers + merges)

    def _decode_backward(self, work: Work) -> Effort:
        """Activation gradients; what the window gave and the memory's scores are formed again."""
        step, layers = self.steps[work.step], self.share.decoder
        layer = self._layer(step.first, step.count)
        products = [
            *first_gradients(layer.weighted),
            *both_gradients(layer.windows),
            *first_gradients(layer.memories),
            *again([layer.mixes, layer.cross_scores]),
        ]
        merges = list(first_gradients(merge(self.share, self.own.lanes)))
        rows = self.own.lanes * step.count
        messages = sums(self._bytes(rows), 3 * layers)
        messages += sums(self._bytes(self.own.lanes), len(merges))
        return Effort((*merges, *times(layers, products)), messages)

    def _memory_gradient(self, work: Work) -> Effort:
        """Of a part's tokens, for all entries that any of them could see."""
        part = self.parts[self.steps[work.step].part]
        entries = self.own.past(self.share.config.memory_len) + part.stop
        layer = decoder_layer(self.share, self.own.lanes, part.stop - part.start, entries)
        return Effort(times(self.share.decoder, second_gradients(layer.memories)))

    def _weights(self, work: Work) -> Effort:
        part = self.parts[self.steps[work.step].part]
        layer = self._layer(part.start, part.stop - part.start)
        merges = merge(self.share, self.own.lanes * work.count)
        of_layers = times(self.share.decoder, second_gradients(layer.weighted))
        return Effort((*second_gradients(merges), *of_layers))

    def _head(self, _: Work) -> Effort:
        share, n = self.share, self.own.scored
        logits = softmax_products(n, share.config.d_model, share.words)
        messages = sums(self._bytes(n), 1) + softmax_sums(n, share.words, self.numbers)
        return Effort((*logits, *both_gradients(logits)), messages)

    def _layer(self, first: int, tokens: int) -> Layer:
        """A layer on tokens that run together, which see the entries that one of them may."""
        entries = self.entries(first, tokens)
        return decoder_layer(self.share, self.own.lanes, tokens, entries)

    def entries(self, first: int, tokens: int) -> int:
        """Of the memory, that tokens `first` .. `first + tokens - 1` run together may see."""
        reach = self.share.config.memory_len
        before = self.own.past(reach) + first
        return tokens + (before if reach is None else min(before, reach))

    def entries_seen(self, first: int, tokens: int) -> int:
        """Of the memory, that each of these tokens sees, its own among them, summed up."""
        return sum(self.entries(token, 1) for token in range(first, first + tokens))


def reference_decoder(share: LoopedShare, own: Pass) -> list[Product]:
    """The decoder's forward by the reference backend: every token meets every memory entry."""
    entries = own.past(share.config.memory_len) + own.tokens
    products = []
    for step in steps_of([slice(0, own.tokens)], share.config.chunk, own):
        products += merge(share, own.lanes)
        layer = decoder_layer(share, own.lanes, step.count, entries)
        products += times(share.decoder, layer.all)
    return products
