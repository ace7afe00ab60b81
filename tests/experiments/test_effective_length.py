"""Relative effective context length on losses made by hand."""

import numpy as np
import pytest

from rlt_dist.experiments.context.effective_length import effective_lengths, relative_gains

# exp of the losses of two models on four tokens, with 10, 20 and 30 tokens of context.
# The group's best is 8 4 2 1, then 4 4 1 1.
LOSSES = {
    "a": np.log([[16, 4, 2, 2], [4, 8, 2, 4], [4, 4, 1, 1]]),
    "b": np.log([[8, 8, 2, 1], [8, 4, 1, 1], [2, 4, 1, 1]]),
}
QUARTER = 1 - 2**-0.25
"""The gain where one of four tokens is half as perplexing."""


def test_only_what_is_better_than_the_groups_best_counts() -> None:
    gains = relative_gains(LOSSES, 1.0)
    # From 10 to 20, a halves its first token (8 -> 4), and its fall from 16 does not count, nor
    # that it is worse on the second; b halves its third. From 20 to 30, what a gains on the second
    # (8 -> 4) b had before.
    assert gains["a"] == pytest.approx([QUARTER, 0], abs=1e-12)
    assert gains["b"] == pytest.approx([QUARTER, QUARTER], abs=1e-12)


def test_the_hardest_tokens_are_those_of_the_groups_best() -> None:
    gains = relative_gains(LOSSES, 0.5)  # the first two, with 10 and with 20
    assert gains["a"] == pytest.approx([1 - 2**-0.5, 0], abs=1e-12)
    assert gains["b"] == pytest.approx([0, 1 - 2**-0.5], abs=1e-12)


def test_the_hardest_tokens_are_chosen_anew_for_each_context() -> None:
    losses = {"a": np.array([[3.0, 1.0], [0.5, 1.0], [0.5, 0.2]])}
    expected = [1 - np.exp(-2.5), 1 - np.exp(-0.8)]
    assert relative_gains(losses, 0.5)["a"] == pytest.approx(expected)


def test_the_length_is_the_first_from_which_more_context_gains_too_little() -> None:
    whole = effective_lengths(LOSSES, (10, 20, 30), 1.0)
    assert (whole["a"].length, whole["a"].open_ended) == (20, False)
    assert (whole["b"].length, whole["b"].open_ended) == (30, True)
    half = effective_lengths(LOSSES, (10, 20, 30), 0.5)
    assert (half["a"].length, half["a"].open_ended) == (20, False)
    assert (half["b"].length, half["b"].open_ended) == (10, False)  # what comes later is too late


@pytest.mark.parametrize(("gain", "length"), [(0.0101, 20), (0.0099, 10)])
def test_a_gain_of_a_hundredth_is_enough(gain: float, length: int) -> None:
    losses = {"a": np.array([[2.0], [2.0 + np.log1p(-gain)]])}
    assert effective_lengths(losses, (10, 20), 1.0)["a"].length == length


def test_a_model_that_is_worse_with_more_context_gains_nothing() -> None:
    losses = {"a": np.array([[1.0, 2.0], [3.0, 4.0]])}
    found = effective_lengths(losses, (10, 20), 1.0)["a"]
    assert (found.length, found.gains.tolist()) == (10, [0.0])
