"""Transformer-XL's pieces on one rank: what each kind of work multiplies, and sums.

Products are those of `models.transformer_xl` and `ops.relative_function`, in their shapes.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rlt_dist.config.model import TransformerXLConfig
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
from rlt_dist.models.transformer_xl.adaptive import Clusters
from rlt_dist.parallel.plan.cut import own
from rlt_dist.parallel.plan.placement import Placement
from rlt_dist.parallel.schedule.instructions import Kind, Work


@dataclass(frozen=True)
class StackShare:
    """What one rank has of the model.

    Attributes:
        heads, inner: of attention heads, columns of the feed-forward.
        words: columns of each softmax, the head's and the tails'.
        layers: of the stack.
        tensors: ranks that weights are cut over.
    """

    config: TransformerXLConfig
    heads: int
    inner: int
    words: tuple[int, ...]
    layers: int
    first: bool
    last: bool
    tensors: int

    @property
    def narrowed(self) -> bool:
        """Whether later clusters have narrower vectors, which are projected."""
        return self.config.div_val > 1

    @property
    def widths(self) -> list[int]:
        """Of each cluster's vectors."""
        return [self.config.d_model // self.config.div_val**i for i in range(len(self.words))]


def stack_share(
    config: TransformerXLConfig,
    vocabulary: int,
    where: Placement,
    tensor: int = 0,
    tensors: int = 1,
) -> StackShare:
    """The part of tensor rank `tensor` of a stage; rank 0 never has less than another."""
    clusters = Clusters(config.cutoffs, vocabulary)
    words = [len(own(clusters.size(i), tensor, tensors)) for i in range(clusters.tails + 1)]
    if tensor == 0:
        words[0] += clusters.tails
    return StackShare(
        config=config,
        heads=config.heads // tensors,
        inner=len(own(config.d_inner, tensor, tensors)),
        words=tuple(words),
        layers=len(where.layers),
        first=where.first,
        last=where.last,
        tensors=tensors,
    )


# -- products ----------------------------------------------------------------------------------


def embedding(share: StackShare, own: Pass) -> list[Product]:
    """Projections of an adaptive input: every cluster projects every token."""
    if not share.narrowed:
        return []
    return [linear(own.rows, width, share.config.d_model) for width in share.widths]


@dataclass(frozen=True)
class Layer:
    """One layer's products over b T tokens behind P memory positions.

    Attributes:
        plain: those whose factors both have a gradient.
        remembered: keys and values of the memory, which has none unless it is normed here.
        relative: W_R R, where R has none.
    """

    plain: list[Product]
    remembered: Product
    relative: Product

    @property
    def all(self) -> list[Product]:
        """Forward."""
        return [*self.plain, self.remembered, self.relative]

    def backward(self, normed: bool) -> list[Product]:
        """Gradients; `normed`: the memory is normed before it is projected."""
        found = both_gradients(self.plain)
        found += second_gradients([self.remembered, self.relative])
        return [*found, *(first_gradients([self.remembered]) if normed else ())]


def layer_products(share: StackShare, own: Pass) -> Layer:
    """One layer: attention by content and by position with every key, then the feed-forward."""
    config, rows = share.config, own.rows
    d, width, past = config.d_model, config.head_width, own.past(config.memory_len)
    keys, queries, batch = past + own.tokens, share.heads * width, own.lanes * share.heads
    plain = [
        linear(rows, d, 3 * queries),
        Product(share.heads, rows, width, keys),
        Product(batch, own.tokens, width, keys),
        Product(batch, own.tokens, keys, width),
        linear(rows, queries, d),
        linear(rows, d, share.inner),
        linear(rows, share.inner, d),
    ]
    return Layer(plain, linear(own.lanes * past, d, 2 * queries), linear(keys, d, queries))


def chosen(own: Pass) -> tuple[int, ...]:
    """Targets that each softmax chooses for: all by the head, some by each tail."""
    return (own.scored, *own.tails)


def projections(share: StackShare, own: Pass) -> list[Product]:
    """What the softmaxes of an adaptive output are given, [n, width]."""
    if not share.narrowed:
        return []
    d, pairs = share.config.d_model, zip(chosen(own), share.widths, strict=True)
    return [linear(n, d, width) for n, width in pairs]


def softmaxes(share: StackShare, own: Pass) -> list[Product]:
    """Logits of all of them."""
    sizes = zip(chosen(own), share.widths, share.words, strict=True)
    return [product for size in sizes for product in softmax_products(*size)]


# -- work --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StackRank:
    """What a rank does of one micro-batch.

    Attributes:
        own: the segment.
        numbers: bytes of one.
        recompute: layers are run again in backward.
    """

    share: StackShare
    own: Pass
    numbers: Numbers
    recompute: bool

    def works(self) -> Iterator[Work]:
        """All that the stage does, forward and backward, in some order."""
        kinds = [Kind.FORWARD, Kind.BACKWARD]
        kinds += [Kind.EMBED, Kind.EMBED_BACKWARD] if self.share.first else []
        kinds += [Kind.HEAD] if self.share.last else []
        return (Work(kind, 0) for kind in kinds)

    def alike(self) -> Iterator[tuple[Work, int]]:
        """The same, each once."""
        return ((work, 1) for work in self.works())

    def effort(self, work: Work) -> Effort:
        """What some of that work takes."""
        effort: Effort = getattr(self, f"_{work.kind.name.lower()}")()
        return effort if self.share.tensors > 1 else Effort(effort.products)

    def _bytes(self, rows: int, narrow: bool = False) -> int:
        width = self.numbers.narrow if narrow else self.numbers.real
        return rows * self.share.config.d_model * width

    def _embed(self) -> Effort:
        products = tuple(embedding(self.share, self.own))
        return Effort(products, sums(self._bytes(self.own.rows), 1))

    def _embed_backward(self) -> Effort:
        return Effort(tuple(both_gradients(embedding(self.share, self.own))))

    def _forward(self) -> Effort:
        products = times(self.share.layers, layer_products(self.share, self.own).all)
        return Effort(
            products, sums(self._bytes(self.own.rows, narrow=True), 2 * self.share.layers)
        )

    def _backward(self) -> Effort:
        share, config, layers = self.share, self.share.config, self.share.layers
        layer = layer_products(share, self.own)
        products = layer.backward(config.pre_norm)
        messages = sums(self._bytes(self.own.rows), 2 * layers)
        if config.pre_norm:
            remembered = self.own.lanes * self.own.past(config.memory_len)
            messages += sums(self._bytes(remembered), layers)
        if self.recompute:
            # Autograd stops where nothing more is kept: before the last product and its sum.
            ends = config.pre_norm and not config.dropout
            products += again(
                [layer.remembered, layer.relative, *layer.plain[: -1 if ends else None]]
            )
            messages += sums(self._bytes(self.own.rows, narrow=True), (2 - ends) * layers)
        return Effort(times(layers, products), messages)

    def _head(self) -> Effort:
        share = self.share
        products = [*projections(share, self.own), *softmaxes(share, self.own)]
        return Effort((*products, *both_gradients(products)), self._head_sums())

    def _head_sums(self) -> tuple[Transfer, ...]:
        found = sums(self._bytes(self.own.scored), 1)
        for n, words in zip(chosen(self.own), self.share.words, strict=True):
            found += softmax_sums(n, words, self.numbers)
        return found
