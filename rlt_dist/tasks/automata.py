"""State tracking: each token is an operation, and the label after it is the state reached.

The tasks of arXiv 2610.07591 and of Liu et al., "Transformers Learn Shortcuts to Automata" (2023).
"""

from collections.abc import Sequence
from itertools import combinations, permutations
from typing import ClassVar

import numpy as np

from rlt_dist.data.prepare.labelled import Labelled
from rlt_dist.tasks.task import FIRST, Task

Permutation = tuple[int, ...]


class Automaton(Task):
    """Operations drawn uniformly, from state 0 on; states and operations share their symbols.

    Attributes:
        transitions: int64 [operations, states], the state that an operation leads to from each.
    """

    every: ClassVar[bool] = True

    def __init__(self, transitions: Sequence[Sequence[int]]) -> None:
        self.transitions = np.array(transitions, np.int64)
        super().__init__([str(number) for number in range(max(self.transitions.shape))])

    def programs(self, count: int, length: int, chance: np.random.Generator) -> Labelled:
        size = (count, self.tokens(length))
        operations = chance.integers(len(self.transitions), size=size)
        states, state = np.empty_like(operations), np.zeros(count, np.int64)
        for place in range(length):
            state = self.transitions[operations[:, place], state]
            states[:, place] = state
        return FIRST + operations, FIRST + states


def parity() -> Automaton:
    """Operation 1 flips a bit, 0 keeps it."""
    return Automaton([(0, 1), (1, 0)])


def five_state() -> Automaton:
    """Operation 0 swaps states 0 and 1, operation 1 rotates all five."""
    return Automaton([(1, 0, 2, 3, 4), (1, 2, 3, 4, 0)])


def s5_by_swaps() -> Automaton:
    """The permutation of five things that swaps lead to, from the identity on.

    Operation 0 changes nothing, 1 to 10 swap two places.
    """
    swaps = []
    for one, other in combinations(range(5), 2):
        swap = list(range(5))
        swap[one], swap[other] = other, one
        swaps.append(tuple(swap))
    return _composing([tuple(range(5)), *swaps])


def s5() -> Automaton:
    """The permutation of five things that any of all 120 lead to, from the identity on."""
    return _composing(_elements())


def _elements() -> list[Permutation]:
    """All permutations of five things in lexicographic order, the identity first."""
    return list(permutations(range(5)))


def _composing(operations: Sequence[Permutation]) -> Automaton:
    """States are permutations, and operation p leads from q to q first and then p: p[q[i]]."""
    elements = _elements()
    number = {element: place for place, element in enumerate(elements)}
    return Automaton([[number[tuple(p[i] for i in q)] for q in elements] for p in operations])
