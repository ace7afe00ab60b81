"""What a piece of work takes: matrix products and messages."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from rlt_dist.mesh.axes import Group


class Purpose(StrEnum):
    """What a product is formed for."""

    FORWARD = "forward"
    INPUTS = "input gradients"
    """Gradients of activations."""
    WEIGHTS = "weight gradients"
    AGAIN = "recomputation"
    """Formed in backward though forward had formed it."""


class Product(NamedTuple):
    """`batch` products of matrices, [m, k] times [k, n].

    Attributes:
        weight: the second factor is a weight.
        repeats: how often it is formed, in equal layers for instance.
    """

    batch: int
    m: int
    k: int
    n: int
    weight: bool = False
    purpose: Purpose = Purpose.FORWARD
    repeats: int = 1

    @property
    def flops(self) -> int:
        """A multiplication and an addition count 2, as torch.utils.flop_counter counts them."""
        return 2 * self.repeats * self.batch * self.m * self.k * self.n

    @property
    def numbers(self) -> int:
        """How many are read and written, each factor and result once."""
        return self.repeats * self.batch * (self.m * self.k + self.k * self.n + self.m * self.n)


class Transfer(NamedTuple):
    """A rank's part in a message.

    Attributes:
        kind: all_reduce, all_to_all, all_gather or send.
        bytes: that the rank hands over in one call: what is sent of its own, for all others.
        calls: how many of them.
    """

    group: Group
    kind: str
    bytes: int
    calls: int = 1

    @property
    def axis(self) -> str:
        """The axis that it goes along."""
        return self.group if isinstance(self.group, str) else "pipeline"

    def on_wire(self, ranks: int) -> int:
        """Bytes that leave the rank in all calls, `ranks` taking part.

        An all-reduce as a ring: reduce-scatter and all-gather (Patarasuk, Yuan, "Bandwidth optimal
        all-reduce algorithms for clusters of workstations", JPDC 2009).
        """
        whole = self.bytes * self.calls
        match self.kind:
            case "all_reduce":
                return 2 * whole * (ranks - 1) // ranks
            case "all_to_all":
                return whole * (ranks - 1) // ranks
            case "all_gather":
                return whole * (ranks - 1)
        return whole


@dataclass(frozen=True)
class Effort:
    """Attributes:
    products: what is multiplied.
    sums: all-reduces over the tensor axis.
    """

    products: tuple[Product, ...] = ()
    sums: tuple[Transfer, ...] = ()

    @property
    def flops(self) -> int:
        """Of all products."""
        return sum(product.flops for product in self.products)


def linear(rows: int, inputs: int, outputs: int) -> Product:
    """[rows, inputs] times a weight."""
    return Product(1, rows, inputs, outputs, weight=True)


def again(products: Iterable[Product]) -> Iterator[Product]:
    """The same once more, in backward."""
    return (product._replace(purpose=Purpose.AGAIN) for product in products)


def first_gradients(products: Iterable[Product]) -> Iterator[Product]:
    """Gradients of products' first factors, dz y^T."""
    for x in products:
        yield x._replace(k=x.n, n=x.k, weight=x.weight, purpose=Purpose.INPUTS)


def second_gradients(products: Iterable[Product]) -> Iterator[Product]:
    """Gradients of products' second factors, x^T dz."""
    for x in products:
        purpose = Purpose.WEIGHTS if x.weight else Purpose.INPUTS
        yield x._replace(m=x.k, k=x.m, weight=False, purpose=purpose)


def both_gradients(products: Iterable[Product]) -> list[Product]:
    """What backward forms of products whose factors both have a gradient."""
    products = list(products)
    return [*first_gradients(products), *second_gradients(products)]


def times(count: int, products: Iterable[Product]) -> tuple[Product, ...]:
    """Products of so many equal layers."""
    return tuple(product._replace(repeats=count * product.repeats) for product in products)


def sums(bytes_: int, calls: int) -> tuple[Transfer, ...]:
    """All-reduces of so many bytes each over the tensor axis."""
    return (Transfer("tensor", "all_reduce", bytes_, calls),) if calls else ()
