"""Triton's kernels beside the torch that defines them: right in float64, and how fast."""

from collections.abc import Iterator

from rlt_dist.bench.kernels import attention, cross_entropy, loop, step
from rlt_dist.bench.kernels.case import Case
from rlt_dist.ops.triton.shapes import Shapes


def cases(shapes: Shapes) -> Iterator[Case]:
    """Everything that kernels do for a model of these shapes."""
    yield from attention.cases(shapes)
    yield from step.cases(shapes)
    yield from loop.cases(shapes)
    yield from cross_entropy.cases(shapes)
