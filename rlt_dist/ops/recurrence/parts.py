"""What parts a segment is gone through in, and whether backward computes them again."""

from math import ceil
from typing import Literal, NamedTuple

import torch

from rlt_dist.ops.recurrence.problem import Operands, Plan
from rlt_dist.ops.recurrence.tape import bytes_of_border, bytes_of_token

Choice = int | Literal["auto", "none"]

_SHORT = 32
"""Tokens of a part where nothing is recomputed: so many that a product over them is a large one."""


class Cut(NamedTuple):
    """Attributes:
    length: tokens of a part; the last may be shorter.
    keep: whether forward keeps what backward needs.
    """

    length: int
    keep: bool


def cut(choice: Choice, budget: int, plan: Plan, operands: Operands) -> Cut:
    """The parts of a segment, for `recompute.decoder_chunk` and a budget in bytes."""
    if not torch.is_grad_enabled():
        return Cut(_SHORT, keep=False)
    if choice == "none":
        return Cut(_SHORT, keep=True)
    if choice != "auto":
        return Cut(choice, keep=choice >= len(plan.position))
    return _longest(len(plan.position), plan, operands, budget)


def _longest(tokens: int, plan: Plan, operands: Operands, budget: int) -> Cut:
    """Everything kept if it fits, else the longest parts that fit, else the smallest sum."""
    forward, backward = bytes_of_token(plan, operands)
    if tokens * forward + min(tokens, _SHORT) * backward <= budget:
        return Cut(_SHORT, keep=True)

    def cost(length: int) -> int:
        borders = ceil(tokens / length) - 1
        return length * (forward + backward) + borders * bytes_of_border(operands)

    fitting = (length for length in range(tokens, 0, -1) if cost(length) <= budget)
    return Cut(next(fitting, None) or min(range(1, tokens + 1), key=cost), keep=False)
