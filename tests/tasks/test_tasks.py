"""Tasks: labels are what an evaluation by other means finds; programs follow from the seed."""

from itertools import combinations, permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.data.prepare.labelled import UNSCORED
from rlt_dist.tasks.catalogue import TASKS
from rlt_dist.tasks.task import END, FIRST, last_only
from rlt_dist.util.errors import UserError

Map = dict[int, int]

SAME = {i: i for i in range(5)}
SWAPS = [SAME] + [SAME | {a: b, b: a} for a, b in combinations(range(5), 2)]
ALL = [dict(enumerate(images)) for images in permutations(range(5))]
SEEDS = st.integers(0, 1 << 32)


def drawn(task: str, count: int, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    tokens, labels = TASKS[task]().programs(count, length, np.random.default_rng(seed))
    assert tokens.shape == labels.shape
    vocabulary = TASKS[task]().tokenizer.vocabulary
    assert tokens.min() >= FIRST
    assert tokens.max() < vocabulary
    assert labels.max() < vocabulary
    return tokens, labels


@settings(max_examples=20)
@given(length=st.integers(1, 40), seed=SEEDS)
def test_parity_and_five_states_are_followed(length: int, seed: int) -> None:
    tokens, labels = drawn("parity", 3, length, seed)
    for program, found in zip(tokens - FIRST, labels - FIRST, strict=True):
        assert found.tolist() == [int(program[: i + 1].sum()) % 2 for i in range(length)]
    tokens, labels = drawn("five_state", 3, length, seed)
    swap, rotate = {0: 1, 1: 0, 2: 2, 3: 3, 4: 4}, {i: (i + 1) % 5 for i in range(5)}
    for program, found in zip(tokens - FIRST, labels - FIRST, strict=True):
        state, states = 0, []
        for operation in program.tolist():
            state = rotate[state] if operation else swap[state]
            states.append(state)
        assert found.tolist() == states


@pytest.mark.parametrize(("task", "operations"), [("s5_swaps", SWAPS), ("s5", ALL)])
@settings(max_examples=10)
@given(length=st.integers(1, 30), seed=SEEDS)
def test_permutations_are_composed(
    task: str, operations: list[Map], length: int, seed: int
) -> None:
    tokens, labels = drawn(task, 2, length, seed)
    for program, found in zip(tokens - FIRST, labels - FIRST, strict=True):
        reached = SAME
        for operation, label in zip(program.tolist(), found.tolist(), strict=True):
            reached = {i: operations[operation][image] for i, image in reached.items()}
            assert ALL[label] == reached


@pytest.mark.parametrize("task", ["mod5", "mod5_brackets"])
@settings(max_examples=40)
@given(half=st.integers(0, 25), seed=SEEDS)
def test_expressions_are_worth_what_python_finds(task: str, half: int, seed: int) -> None:
    tokens, labels = drawn(task, 4, 2 * half + 1, seed)
    symbols = TASKS[task]().symbols
    for program, found in zip(tokens - FIRST, labels, strict=True):
        text = "".join(symbols[symbol] for symbol in program)
        assert len(text) == 2 * half + 1
        assert found[-1] - FIRST == eval(text) % 5
        assert (found[:-1] == UNSCORED).all()


def test_brackets_are_nested() -> None:
    tokens, _ = drawn("mod5_brackets", 200, 31, 0)
    symbols = TASKS["mod5_brackets"]().symbols
    texts = ["".join(symbols[symbol] for symbol in program) for program in tokens - FIRST]
    assert sum("((" in text for text in texts) > 50
    assert sum("(" not in text for text in texts) < 50


@settings(max_examples=20)
@given(length=st.integers(1, 40), seed=SEEDS)
def test_sums_are_what_python_finds(length: int, seed: int) -> None:
    task = TASKS["addition"]()
    tokens, labels = drawn("addition", 4, length, seed)
    for program, found in zip(tokens, labels, strict=True):
        asked, answer = np.split(program - FIRST, [task.prompt(length)])
        text = "".join(task.symbols[symbol] for symbol in asked)
        a, b = text.removesuffix("=").split("+")
        assert len(a) == len(b) == length
        digits = f"{int(a) + int(b):0{length + 1}}"
        assert [task.symbols[symbol] for symbol in answer] == list(digits)
        behind = found[task.prompt(length) - 1 :]
        assert behind.tolist() == [*(FIRST + int(digit) for digit in digits), END]
        assert (found[: task.prompt(length) - 1] == UNSCORED).all()


@pytest.mark.parametrize("task", TASKS)
def test_programs_follow_from_the_seed(task: str) -> None:
    one, again, other = (drawn(task, 20, 7, seed) for seed in (1, 1, 2))
    assert np.array_equal(one, again)
    assert not np.array_equal(one[0], other[0])


@pytest.mark.parametrize(
    ("task", "states", "operations"),
    [("parity", 2, 2), ("five_state", 5, 2), ("s5_swaps", 120, 11), ("s5", 120, 120)],
)
def test_operations_and_states_reached_are_balanced(
    task: str, states: int, operations: int
) -> None:
    count = 500 * states
    tokens, labels = drawn(task, count, 48, 0)
    reached = np.bincount(labels[:, -1] - FIRST, minlength=states)
    asked = np.bincount(tokens[:, 0] - FIRST, minlength=operations)
    assert len(reached) == states
    assert len(asked) == operations
    for found in (reached, asked):
        expected = count / len(found)
        # Of a binomial, five standard deviations.
        assert (abs(found - expected) < 5 * expected**0.5).all()


def test_the_last_label_alone_is_kept() -> None:
    _, labels = drawn("parity", 5, 9, 0)
    kept = last_only(labels)
    assert (kept[:, -1] == labels[:, -1]).all()
    assert (kept[:, :-1] == UNSCORED).all()


@pytest.mark.parametrize(("task", "length"), [("mod5", 4), ("mod5_brackets", 6), ("s5", 0)])
def test_a_length_that_no_program_has_is_refused(task: str, length: int) -> None:
    with pytest.raises(UserError, match=f"a program of length {length}"):
        drawn(task, 1, length, 0)
