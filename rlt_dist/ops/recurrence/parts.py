"""How long the parts of a segment are that backward computes again."""

from math import ceil
from typing import Literal

import torch

from rlt_dist.ops.recurrence.problem import Operands, Plan
from rlt_dist.ops.recurrence.tape import bytes_of_border, bytes_of_token

Choice = int | Literal["auto", "none"]

_WITHOUT_BACKWARD = 64
"""Tokens of a part where nothing is kept: enough that what is done once a part costs nothing."""


def part_length(choice: Choice, budget: int, plan: Plan, operands: Operands) -> int:
    """Tokens of a part; all of the segment's where everything is kept for backward."""
    tokens = len(plan.position)
    if not torch.is_grad_enabled():
        return min(tokens, _WITHOUT_BACKWARD)
    if choice == "none":
        return tokens
    if choice != "auto":
        return min(choice, tokens)
    return _longest(tokens, bytes_of_token(plan, operands), bytes_of_border(operands), budget)


def _longest(tokens: int, token: int, border: int, budget: int) -> int:
    """The longest parts that fit, given bytes of a token and of a border; else the smallest sum."""

    def cost(length: int) -> int:
        return length * token + (ceil(tokens / length) - 1) * border

    fitting = (length for length in range(tokens, 0, -1) if cost(length) <= budget)
    return next(fitting, None) or min(range(1, tokens + 1), key=cost)
