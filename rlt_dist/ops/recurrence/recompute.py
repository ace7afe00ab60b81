"""A segment in parts: backward forms a part's weight gradients before it goes to the next.

So gradients of activations are there for one part at a time, and activations too where parts are
recomputed: then forward keeps outputs and borders only. Once it has run, every fed-back state is
known, and a part is recomputed in one batched pass over all its tokens, as in RLT-0.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlt_dist.ops.recurrence.feedback import enter_known
from rlt_dist.ops.recurrence.gradients import add_gradients, zero_gradients
from rlt_dist.ops.recurrence.parts import Cut
from rlt_dist.ops.recurrence.problem import Border, Operands, Plan
from rlt_dist.ops.recurrence.tape import Store, Tape

_RESIDUAL = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.2}
"""By the type of products: the largest error, relative to the largest output, of a recomputation.

Rounding gives a thousandth of it; what was recomputed with other weights or inputs is far beyond.
"""


class Loop(Protocol):
    """Passes over tapes, chunk by chunk, with the weights of one segment."""

    def precision(self, x: Tensor) -> torch.dtype:
        """The type that it forms products with x in, here and now."""

    def forward(self, tape: Tape) -> None:
        """Fill the tape."""

    def backward(self, tape: Tape) -> None:
        """Fill its gradients, those of activations only."""


@dataclass
class Part:
    """Consecutive tokens of a segment.

    Attributes:
        plan, operands: what they are given.
        precision: type that their products are formed in.
        tape: None where it is recomputed.
    """

    tokens: slice
    plan: Plan
    operands: Operands
    precision: torch.dtype
    tape: Tape | None = None


def forward(
    loop: Loop, cut: Cut, plan: Plan, operands: Operands
) -> tuple[Tensor, Border, list[Part]]:
    """Outputs s [T, B, d], what the segment leaves behind, and its parts."""
    s, before, store, parts = torch.empty_like(operands.e), operands.before(), Store(), []
    precision = loop.precision(s)
    for first in range(0, len(s), cut.length):
        tokens = slice(first, min(first + cut.length, len(s)))
        given = operands.part(tokens, before)
        part = Part(tokens, plan.part(tokens), given, precision)
        tape = Tape.blank(part.plan, given, Store() if cut.keep else store)
        loop.forward(tape)
        s[tokens] = tape.feedback.outputs()
        before = tape.after()
        part.tape = tape if cut.keep else None
        parts.append(part)
    return s, before, parts


def backward(
    loop: Loop,
    parts: Sequence[Part],
    operands: Operands,
    s: Tensor,
    ds: Tensor,
    dwindows: Sequence[Tensor],
) -> Operands:
    """Gradients of the operands, from those of the outputs s and of the windows left behind."""
    sums, store, nothing = zero_gradients(operands), Store(), torch.zeros_like(s[0])
    after = Border(dwindows, nothing, nothing)
    for part in reversed(parts):
        tape = part.tape or _replay(loop, part, s[part.tokens], store)
        tape.begin_backward(ds[part.tokens], after, store)
        loop.backward(tape)
        add_gradients(tape, sums, part.tokens)
        after, part.tape = tape.gradient_before(), None
    fed = sums.fed and sums.fed._replace(s=after.s, boundary=after.boundary)
    return sums._replace(windows=after.windows, fed=fed)


def _replay(loop: Loop, part: Part, s: Tensor, store: Store) -> Tape:
    """The tape of a part whose outputs s [C, B, d] are known.

    Raises:
        RuntimeError: the outputs that the recomputation gives are others.
    """
    tape = Tape.blank(part.plan, part.operands, store)
    with torch.autocast(s.device.type, part.precision, enabled=part.precision != s.dtype):
        layers = tape.without_feedback(enter_known(tape.feedback, part.plan.chunks, s))
        loop.forward(layers)
    error = (layers.feedback.outputs() - s).abs().max() / s.abs().max()
    # A state that is not finite has no error to speak of: the step's own guard deals with it.
    if error > _RESIDUAL[part.precision]:
        raise RuntimeError(
            f"tokens {part.tokens.start} .. {part.tokens.stop - 1} of the segment gave other "
            f"outputs when they were recomputed (relative error {error:.1e}); were weights or "
            "inputs changed between forward and backward?"
        )
    return tape
