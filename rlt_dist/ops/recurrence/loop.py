"""Passes over a tape, chunk by chunk: what a loop is, and the one in torch."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

import torch

from rlt_dist.ops.precision import product_dtype
from rlt_dist.ops.recurrence.feedback import enter, enter_backward
from rlt_dist.ops.recurrence.problem import Operands
from rlt_dist.ops.recurrence.steps import layer_backward, layer_forward, view_of
from rlt_dist.ops.recurrence.tape import Tape

Pass = Callable[[range], None]
"""Goes through some of a tape's chunks: forward from the first of the range to its last, backward
from its last to its first. In how many calls a tape is gone through changes no bit."""


class Loop(Protocol):
    """Passes over tapes, with one set of weights."""

    def precision(self, x: torch.Tensor) -> torch.dtype:
        """The type that it forms products with x in, here and now."""

    def forward(self, tape: Tape) -> Pass:
        """Fill the tape."""

    def backward(self, tape: Tape) -> Pass:
        """Fill its gradients, those of activations only."""


MakeLoop = Callable[[Operands], Loop]
"""A loop with the weights of some operands, which may run any others that have the same."""

_FEW = 1 << 24
"""Multiplications of a product on which a second thread is woken later than the first is done."""


class PythonLoop:
    """The loop in torch."""

    def __init__(self, operands: Operands) -> None:
        """A tape has all that it needs of the operands."""

    def precision(self, x: torch.Tensor) -> torch.dtype:
        """Autocast's, where it is on."""
        return product_dtype(x)

    def forward(self, tape: Tape) -> Pass:
        """Fill the tape."""
        plan, small = tape.plan, _is_small(tape)

        def run(chunks: range) -> None:
            with _threads_for(small):
                for k in chunks:
                    at = plan.chunks.slots[k]
                    view, x = view_of(plan, k, at), enter(tape.feedback, plan.chunks, k, at)
                    for layer in tape.layers:
                        x = layer_forward(x, layer, at, view, plan.shape)
                    at.put(tape.feedback.y, x)

        return run

    def backward(self, tape: Tape) -> Pass:
        """Fill its gradients, those of activations only."""
        plan, small = tape.plan, _is_small(tape)

        def run(chunks: range) -> None:
            with _threads_for(small):
                for k in reversed(chunks):
                    at = plan.chunks.slots[k]
                    view, dy = view_of(plan, k, at), at.get(tape.feedback.dy)
                    for layer in reversed(tape.layers):
                        dy = layer_backward(dy, layer, at, view, plan.shape)
                    enter_backward(tape.feedback, plan.chunks, k, at, dy)

        return run


def _is_small(tape: Tape) -> bool:
    """Whether a chunk's products are better formed by one thread."""
    rows = max(at.count for at in tape.plan.chunks.slots) * tape.feedback.e.shape[1]
    return rows * tape.layers[0].weights.gate_up.numel() < _FEW


@contextmanager
def _threads_for(small: bool) -> Iterator[None]:
    """One thread where a chunk's products are small, else as many as there were."""
    before = torch.get_num_threads()
    if small:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
