"""What a task is: symbols, and programs of them with what is to be predicted after each."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np

from rlt_dist.data.prepare.labelled import UNSCORED, Labelled
from rlt_dist.data.tokenizers.words import SPECIAL_WORDS, WordsTokenizer
from rlt_dist.util.errors import UserError

END = 0
"""The id of the end-of-text of a task's tokenizer: what follows a whole answer."""

FIRST = SPECIAL_WORDS
"""The id of a task's first symbol; the others follow."""


class Task(ABC):
    """A kind of programs.

    Attributes:
        every: there is something to be predicted after every token; else only at a program's end,
            or in an answer behind it.
        answered: a program ends with an answer that can be decoded, behind its first
            `prompt(length)` tokens.
    """

    every: ClassVar[bool] = False
    answered: ClassVar[bool] = False

    def __init__(self, symbols: Sequence[str]) -> None:
        self.symbols = tuple(symbols)

    @cached_property
    def tokenizer(self) -> WordsTokenizer:
        """One id a symbol, in their order, from `FIRST` on."""
        return WordsTokenizer([symbol.encode() for symbol in self.symbols])

    def tokens(self, length: int) -> int:
        """Of a program of that length: operations, symbols or digits, as the task has it.

        Raises:
            UserError: there is no program of that length.
        """
        if length < 1:
            raise UserError(f"a program of length {length}: lengths are at least 1")
        return length

    @abstractmethod
    def programs(self, count: int, length: int, chance: np.random.Generator) -> Labelled:
        """Draw programs of one length.

        Returns:
            tokens and labels, int64 [count, tokens] each: label i is the id that is to be predicted
            after token i, or `UNSCORED`.

        Raises:
            UserError: there is no program of that length.
        """

    def prompt(self, length: int) -> int:
        """Tokens of a program of that length before its answer."""
        raise NotImplementedError


def last_only(labels: np.ndarray) -> np.ndarray:
    """Labels [count, n] of which all but each program's last are unscored."""
    kept = np.full_like(labels, UNSCORED)
    kept[:, -1] = labels[:, -1]
    return kept
