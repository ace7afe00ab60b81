"""What parts a segment is gone through in, and whether backward computes them again."""

from collections.abc import Callable, Sequence
from math import ceil
from typing import Literal, NamedTuple

import torch

from rlt_dist.ops.recurrence.problem import Operands, Plan
from rlt_dist.ops.recurrence.tape import bytes_of_border, bytes_of_token

Choice = int | Literal["auto", "none"]

_ROWS = 256
"""Tokens of all lanes, at least, in a part where nothing is recomputed. A product over them is a
large one, which also takes at least as many tokens as the weight that it adds to has inputs."""


class Cut(NamedTuple):
    """Attributes:
    length: tokens of a part; the last may be shorter.
    keep: whether forward keeps what backward needs.
    """

    length: int
    keep: bool

    def slices(self, tokens: int) -> list[slice]:
        """The parts of a segment of so many tokens."""
        firsts = range(0, tokens, self.length)
        return [slice(first, min(first + self.length, tokens)) for first in firsts]


def cut(choice: Choice, budget: int, plan: Plan, operands: Operands) -> Cut:
    """The parts of a segment, for `recompute.decoder_chunk` and a budget in bytes.

    Processes that the weights are cut over get the same, whoever has most of them.
    """
    tokens, lanes = plan.position.shape
    short = short_part(lanes, operands.e.shape[2])
    if not torch.is_grad_enabled():
        return Cut(short, keep=False)

    def bytes_of() -> Sequence[int]:
        own = torch.tensor((*bytes_of_token(plan, operands), bytes_of_border(operands)))
        largest: list[int] = plan.seam.largest(own.to(plan.position.device)).tolist()
        return largest

    return training_cut(choice, budget, tokens, short, bytes_of)


def short_part(lanes: int, d: int) -> int:
    """Tokens of a part where nothing is recomputed, for residual streams of width d."""
    return max(1, max(_ROWS, d) // lanes)


def training_cut(
    choice: Choice, budget: int, tokens: int, short: int, bytes_of: Callable[[], Sequence[int]]
) -> Cut:
    """The parts of a segment of so many tokens that has a backward.

    Args:
        bytes_of: for `auto` alone, bytes of a token of all lanes in forward and, besides, in
            backward, and of a border.
    """
    if choice == "none":
        return Cut(short, keep=True)
    if choice != "auto":
        return Cut(choice, keep=choice >= tokens)
    forward, backward, border = bytes_of()
    if tokens * forward + min(tokens, short) * backward <= budget:
        return Cut(short, keep=True)
    return _longest(tokens, forward + backward, border, budget)


def _longest(tokens: int, token: int, border: int, budget: int) -> Cut:
    """The longest parts that fit, given bytes of a token and of a border; else the least bytes."""

    def cost(length: int) -> int:
        return length * token + (ceil(tokens / length) - 1) * border

    fitting = (length for length in range(tokens, 0, -1) if cost(length) <= budget)
    return Cut(next(fitting, None) or min(range(1, tokens + 1), key=cost), keep=False)
