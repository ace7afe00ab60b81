"""Arithmetic: what an expression is worth modulo 5, and the sum of two numbers digit by digit."""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np

from rlt_dist.data.prepare.labelled import UNSCORED, Labelled
from rlt_dist.tasks.task import END, FIRST, Task
from rlt_dist.util.errors import UserError

MODULUS = 5
_PLUS, _MINUS, _TIMES, _OPEN, _CLOSE = range(MODULUS, MODULUS + 5)
_OPERATORS = range(_PLUS, _OPEN)


class Modular(Task):
    """An expression of the digits 0 to 4, + - and *, with the usual precedence.

    The label is its value modulo 5, after its last symbol. Lengths are symbols, and odd.
    """

    def __init__(self, *, brackets: bool) -> None:
        """`brackets`: expressions in brackets stand in it, too, nested."""
        self._brackets = brackets
        super().__init__("01234+-*()" if brackets else "01234+-*")

    def tokens(self, length: int) -> int:
        if length % 2 == 0:
            raise UserError(f"a program of length {length}: lengths of this task are odd")
        return super().tokens(length)

    def programs(self, count: int, length: int, chance: np.random.Generator) -> Labelled:
        length = self.tokens(length)
        if self._brackets:
            drawn = np.array([_nested(length, chance) for _ in range(count)])
        else:
            drawn = chance.integers(MODULUS, size=(count, length))
            drawn[:, 1::2] = chance.integers(_PLUS, _OPEN, size=(count, length // 2))
        labels = np.full_like(drawn, UNSCORED)
        labels[:, -1] = [FIRST + value(symbols) for symbols in drawn.tolist()]
        return FIRST + drawn, labels


def value(symbols: Iterable[int]) -> int:
    """What an expression is worth modulo 5; symbols by their place in `01234+-*()`.

    Read once, from left to right: what is summed up, the term in progress and the operator before
    the next number, and of each open bracket those around it.
    """
    around: list[tuple[int, int, int]] = []
    total, term, operator = 0, 0, _PLUS
    for symbol in symbols:
        number = symbol
        if symbol == _OPEN:
            around.append((total, term, operator))
            total, term, operator = 0, 0, _PLUS
            continue
        if symbol in _OPERATORS:
            operator = symbol
            continue
        if symbol == _CLOSE:
            number = total + term
            total, term, operator = around.pop()
        if operator == _TIMES:
            term = term * number % MODULUS
        else:
            total, term = total + term, number if operator == _PLUS else -number
    return (total + term) % MODULUS


def _nested(length: int, chance: np.random.Generator) -> list[int]:
    """Draw an expression of so many symbols: half of those that can be are in brackets."""
    if length == 1:
        return [int(chance.integers(MODULUS))]
    if length >= 5 and chance.random() < 0.5:
        return [_OPEN, *_nested(length - 2, chance), _CLOSE]
    left = 1 + 2 * int(chance.integers(length // 2))
    operator = int(chance.integers(_PLUS, _OPEN))
    return [*_nested(left, chance), operator, *_nested(length - 1 - left, chance)]


class Addition(Task):
    """`a+b=c`, highest digits first, then an end: a and b of as many digits as the length is.

    The answer has one digit more, which may be 0, so that nothing tells a number's length but its
    digits. Labels are the answer's digits and its end.
    """

    answered: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__("0123456789+=")

    def tokens(self, length: int) -> int:
        return 3 * super().tokens(length) + 3

    def programs(self, count: int, length: int, chance: np.random.Generator) -> Labelled:
        a, b = chance.integers(10, size=(2, count, length))
        answer, carry = np.empty((count, length + 1), np.int64), np.zeros(count, np.int64)
        for place in reversed(range(length)):
            carry, answer[:, place + 1] = divmod(a[:, place] + b[:, place] + carry, 10)
        answer[:, 0] = carry
        plus, equals = np.full((count, 1), 10), np.full((count, 1), 11)
        tokens = FIRST + np.concatenate((a, plus, b, equals, answer), axis=1)
        labels = np.full_like(tokens, UNSCORED)
        labels[:, self.prompt(length) - 1 : -1] = FIRST + answer
        labels[:, -1] = END
        return tokens, labels

    def prompt(self, length: int) -> int:
        return 2 * length + 2
