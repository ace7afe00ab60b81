"""The GRU on one rank, which has all of it: what each kind of work multiplies.

Products are those of `torch.nn.GRU` on a CPU: by layer, the three gates' halves of all inputs, then
token by token those of the state.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rlt_dist.config.model import GruConfig
from rlt_dist.costs.effort import (
    Effort,
    Product,
    both_gradients,
    first_gradients,
    linear,
    second_gradients,
    times,
)
from rlt_dist.costs.head import softmax_products
from rlt_dist.costs.sizes import Numbers, Pass
from rlt_dist.parallel.schedule.instructions import Kind, Work


@dataclass(frozen=True)
class RecurrentRank:
    """What a rank does of one micro-batch.

    Attributes:
        own: the segment.
        numbers: bytes of one.
    """

    config: GruConfig
    vocabulary: int
    own: Pass
    numbers: Numbers

    def works(self) -> Iterator[Work]:
        """All that is done, forward and backward, in some order."""
        return (Work(kind, 0) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.HEAD))

    def alike(self) -> Iterator[tuple[Work, int]]:
        """The same, each once."""
        return ((work, 1) for work in self.works())

    def effort(self, work: Work) -> Effort:
        """What some of that work takes."""
        made = {Kind.FORWARD: self.forward, Kind.BACKWARD: self.backward, Kind.HEAD: self.head}
        return Effort(tuple(made[work.kind]()))

    def forward(self) -> list[Product]:
        """All layers."""
        inputs, states = self._layer()
        return list(times(self.config.layers, [inputs, states]))

    def backward(self) -> list[Product]:
        """Their gradients; the state that was carried in has none."""
        inputs, states = self._layer()
        later = states._replace(repeats=self.own.tokens - 1)
        layer = [
            *both_gradients([inputs]),
            *first_gradients([later]),
            *second_gradients([states]),
        ]
        return list(times(self.config.layers, layer))

    def head(self) -> list[Product]:
        """Logits and their gradients."""
        logits = softmax_products(self.own.scored, self.config.d_model, self.vocabulary)
        return [*logits, *both_gradients(logits)]

    def _layer(self) -> tuple[Product, Product]:
        """The inputs' products, and the states'."""
        d = self.config.d_model
        states = linear(self.own.lanes, d, 3 * d)._replace(repeats=self.own.tokens)
        return linear(self.own.rows, d, 3 * d), states
