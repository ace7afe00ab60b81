"""Matrix products alone, as torch runs them: the floor under everything that is batched.

A product y = x W^T stands for three of its size in a step of training: itself, dx = dy W, and
dW = dy^T x. The same holds for attention's q K^T (dq, dK), and for P V (dP, dV).
"""

from collections.abc import Iterable
from typing import Literal, NamedTuple

import torch
from torch import Tensor


class Product(NamedTuple):
    """[rows, inner] times [inner, columns], `batch` times over.

    Attributes:
        layout: which operand lies transposed in memory (t) and which does not (n), as in BLAS.
    """

    batch: int
    rows: int
    inner: int
    columns: int
    layout: Literal["nn", "nt", "tn"]

    @property
    def flops(self) -> int:
        """A multiplication and an addition each."""
        return 2 * self.batch * self.rows * self.inner * self.columns


def forward(rows: int, inputs: int, outputs: int, batch: int = 1) -> Product:
    """x [rows, inputs] W^T, W [outputs, inputs]."""
    return Product(batch, rows, inputs, outputs, "nt")


def towards_input(rows: int, inputs: int, outputs: int, batch: int = 1) -> Product:
    """dy [rows, outputs] W."""
    return Product(batch, rows, outputs, inputs, "nn")


def towards_weight(rows: int, inputs: int, outputs: int, batch: int = 1) -> Product:
    """dy^T x."""
    return Product(batch, outputs, rows, inputs, "tn")


def linear(rows: int, inputs: int, outputs: int) -> list[Product]:
    """A projection in a step of training."""
    return [kind(rows, inputs, outputs) for kind in (forward, towards_input, towards_weight)]


def attention(heads: int, queries: int, keys: int, width: int) -> list[Product]:
    """Attention in a step of training, `heads` counted over all lanes: every key of every query.

    q K^T with its two gradients, and P V [queries, keys] x [keys, width] with its two.
    """
    scores = [
        kind(queries, width, keys, heads) for kind in (forward, towards_input, towards_weight)
    ]
    values = [
        Product(heads, queries, keys, width, "nn"),
        Product(heads, queries, width, keys, "nt"),
        Product(heads, keys, queries, width, "tn"),
    ]
    return scores + values


class Products:
    """A step that runs products one after the other into memory that is already there."""

    def __init__(self, products: Iterable[Product]) -> None:
        """Equal products share their operands: layers come one after the other."""
        self._order = list(products)
        self._operands = {product: _operands(product) for product in set(self._order)}

    def __call__(self) -> None:
        for product in self._order:
            x, y, out = self._operands[product]
            if product.batch == 1:
                torch.mm(x, y, out=out)
            else:
                torch.bmm(x, y, out=out)


def _operands(product: Product) -> tuple[Tensor, Tensor, Tensor]:
    def matrix(rows: int, columns: int, layout: str) -> Tensor:
        shape = (rows, columns) if layout == "n" else (columns, rows)
        whole = torch.randn(product.batch, *shape)
        return whole if layout == "n" else whole.transpose(1, 2)

    x = matrix(product.rows, product.inner, product.layout[0])
    y = matrix(product.inner, product.columns, product.layout[1])
    out = x.new_zeros(product.batch, product.rows, product.columns)
    return (x[0], y[0], out[0]) if product.batch == 1 else (x, y, out)
