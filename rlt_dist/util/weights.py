"""Weights that a person gives as decimals, made exact."""

from collections.abc import Sequence
from fractions import Fraction
from math import lcm


def whole_weights(weights: Sequence[float]) -> tuple[int, ...]:
    """Whole numbers in the proportions of decimal ones; zeros stay zeros."""
    exact = [Fraction(str(weight)) for weight in weights]
    common = lcm(*(weight.denominator for weight in exact))
    return tuple(int(weight * common) for weight in exact)
