"""The linear softmax that models end in (`ops.cross_entropy`)."""

from rlt_dist.costs.effort import Product, Transfer, linear, sums
from rlt_dist.costs.sizes import Numbers
from rlt_dist.ops.cross_entropy import block_tokens


def softmax_products(n: int, width: int, words: int) -> list[Product]:
    """Logits of n tokens, [n, width] times [width, words]."""
    return [linear(n, width, words)]


def softmax_sums(n: int, words: int, numbers: Numbers) -> tuple[Transfer, ...]:
    """What a vocabulary-parallel softmax exchanges: the block's size, and by block of tokens a
    maximum, then a sum of exponentials, the target's logit and its owners.

    Args:
        words: most that a rank has.
    """
    found = sums(8, 1)
    size = block_tokens(words)
    for first in range(0, n, size):
        rows = min(size, n - first) * numbers.real
        found += sums(rows, 1) + sums(3 * rows, 1)
    return found
