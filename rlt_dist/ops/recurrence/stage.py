"""decoder[i:j] of one micro-batch over one segment, step by step, as a stage of a pipeline runs it.

A step is one chunk. Stages stand in a ring: step c of the first merges what the last made of step
c - 1, and hands its u to the next. Here are their ports only; who carries what between them is not
known here. A decoder on one stage is a ring that is closed on its tape, and goes through whole
parts.

A segment is gone through in parts, so that gradients of activations are there for one part at a
time; and activations too, where parts are recomputed: then forward keeps what the layers were given
and what they gave. All of it is known when a part is recomputed, which is one batched pass over all
its tokens, as in RLT-0. The last part is as forward left it, and is not recomputed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from rlt_dist.ops.recurrence import gradients
from rlt_dist.ops.recurrence.chunks import plan_chunks
from rlt_dist.ops.recurrence.feedback import enter_known
from rlt_dist.ops.recurrence.gradients import WeightSums, zero_gradients
from rlt_dist.ops.recurrence.loop import Loop, Pass
from rlt_dist.ops.recurrence.parts import Cut
from rlt_dist.ops.recurrence.problem import Border, Operands, Plan
from rlt_dist.ops.recurrence.tape import Store, Tape

_RESIDUAL = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 0.2}
"""By the type of products: the largest error, relative to the largest output, of a recomputation.

Rounding gives a thousandth of it; what was recomputed with other weights or inputs is far beyond.
"""


def steps_of_parts(cut: Cut, position: Tensor, feedback: int) -> list[list[int]]:
    """By part of a segment, the tokens C of each of its steps, on any stage.

    Args:
        position, feedback: as in `Plan`.
    """
    return [
        [at.count for at in plan_chunks(position[tokens], feedback).slots]
        for tokens in cut.slices(len(position))
    ]


@dataclass
class _Part:
    """Consecutive tokens of the segment.

    Attributes:
        steps: theirs, numbered in the segment.
        operands: what they are given, known from forward on.
        precision: the type that their products are formed in.
        tape: from forward, or from its recomputation, until all gradients are formed.
        formed: how many of the two kinds of gradients are.
    """

    tokens: slice
    steps: range
    plan: Plan
    operands: Operands
    precision: torch.dtype
    tape: Tape | None = None
    formed: int = 0

    def open(self) -> Tape:
        """The tape, which must be there."""
        if self.tape is None:
            raise RuntimeError(f"steps {self.steps} of the decoder have no activations")
        return self.tape

    def count_formed(self) -> None:
        """Another kind of gradients is; after both, activations can go."""
        self.formed += 1
        if self.formed == 2:
            self.tape, self.formed = None, 0


class StageDecoder:
    """Forward, then backward, in the order of the steps and then against it.

    Attributes:
        parts: by part of the segment, its steps. Methods about a part take any of them.
        after: what the steps behind leave to those in front, at the end the segment to the next.
            Where s comes from another stage, it is there with the `feed` of the last step.
        gradients: of the operands, when all is done; `e` where not first is u. Those of `e`, the
            gate and the memories are complete when `add_inputs` has been through all parts.
    """

    gradients: Operands
    _run: Pass

    def __init__(
        self,
        loop: Loop,
        cut: Cut,
        plan: Plan,
        operands: Operands,
        *,
        first: bool = True,
        last: bool = True,
    ) -> None:
        """Gradients are formed by hand here: autograd does not see what is done with operands.

        Args:
            loop: one with these weights; it may serve many micro-batches.
            plan, operands: of this stage's layers, for the whole segment. The first stage has the
                merge: `e`, but for its shape, and `fed` are not looked at on others.
        """
        operands = operands.detached().with_contiguous_memories()
        if not first:
            operands = operands._replace(e=torch.empty_like(operands.e), fed=None)
        self._loop, self._operands = loop, operands
        self._first, self._last, self._keep = first, last, cut.keep
        self._parts: list[_Part] = []
        for tokens in cut.slices(len(operands.e)):
            part, done = plan.part(tokens), self._parts[-1].steps.stop if self._parts else 0
            steps = range(done, done + len(part.chunks))
            self._parts.append(_Part(tokens, steps, part, operands, loop.precision(operands.e)))
        self.parts = [part.steps for part in self._parts]
        self._part_of = [part for part in self._parts for _ in part.steps]
        self._store, self._y = Store(), torch.empty_like(operands.e)
        apart = operands.fed is not None and not last
        self._s = torch.empty_like(operands.e) if apart else self._y
        self.after = operands.before()

    # -- forward -------------------------------------------------------------------------------

    def decode(self, step: int, u: Tensor | None = None) -> Tensor:
        """y [C, B, d] of a step, for u [C, B, d]; the first stage merges its own."""
        part, k = self._begin(step)
        tape, at = part.open().feedback, part.plan.chunks.slots[k]
        if u is not None:
            at.put(tape.e, u)
        self._forward(part, range(k, k + 1))
        return at.get(tape.y)

    def decode_part(self, step: int) -> None:
        """All steps of a part, where this is the only stage."""
        part, _ = self._begin(self._part_of[step].steps.start)
        self._forward(part, range(len(part.steps)))

    def newest(self, step: int) -> Tensor:
        """Last stage: s [B, d], each lane's output at its last token of a step.

        It is asked for before the next step; of a lane without tokens in the step it is anything.
        """
        part, k = self._find(step)
        chunks, y = part.plan.chunks, part.open().feedback.y
        if (at := chunks.slots[k]).index is None:
            return y[at.first + at.count - 1]
        token = (chunks.first[k] + chunks.length[k] - 1).clamp(min=0)
        return y[token, _lanes(token)]

    def feed(self, step: int, s: Tensor) -> None:
        """First stage, where it is not the last too: take the last's `newest` of a step.

        That of the segment's last step may come as late as may be.
        """
        part, k = self._find(step)
        chunks, there = part.plan.chunks, part.plan.chunks.length[k][:, None] > 0
        if k + 1 == len(part.steps):
            if self.after.fed is not None:
                self.after.fed.s.copy_(torch.where(there, s, self.after.fed.s))
            return
        at, fed = chunks.slots[k], part.open().feedback.s
        if at.index is None:
            fed[at.first + at.count] = s
        else:
            place = chunks.first[k] + chunks.length[k], _lanes(s)
            fed[place] = torch.where(there, s, fed[place])

    def outputs(self) -> Tensor:
        """Last stage: s [T, B, d], when all steps are done."""
        return self._y

    def _begin(self, step: int) -> tuple[_Part, int]:
        """A step's part, with a blank tape where the step is its first."""
        part, k = self._find(step)
        if k == 0:
            if step:
                self._leave(self._part_of[step - 1])
            part.operands = self._operands.part(part.tokens, self.after)
            part.tape = self._blank(part, Store() if self._keep else self._store)
            self._run = self._loop.forward(part.tape)
        return part, k

    def _leave(self, part: _Part) -> None:
        """Let go of a part that is computed again."""
        if not self._keep and part.tape is not None:
            if self._s is not self._y:
                self._s[part.tokens] = part.tape.feedback.s[1:-1]
            part.tape = None

    def _forward(self, part: _Part, chunks: range) -> None:
        tape = part.open()
        self._run(chunks)
        if chunks.stop == len(part.steps):
            self.after = tape.after()
            del self._run
            if part is self._parts[-1]:
                del self._loop  # It may hold weights packed for forward alone.
            if self._last or not self._keep:
                self._y[part.tokens] = tape.feedback.outputs()
            if not (self._first or self._keep):
                self._operands.e[part.tokens] = tape.feedback.e[:-1]

    # -- backward ------------------------------------------------------------------------------

    def begin_backward(
        self,
        loop: Loop,
        weights: WeightSums,
        ds: Tensor | None = None,
        after: Border | None = None,
    ) -> None:
        """Before all else of backward.

        Args:
            loop: as for forward, whose own is let go of when its steps are done.
            weights: what weight gradients are added to.
            ds: last stage: the gradient of `outputs`.
            after: the gradient of what the segment left behind; None: it has none.
        """
        self._loop, self._weights, self._ds = loop, weights, ds
        self.gradients = zero_gradients(self._operands, weights)
        self._after = after or Border(self.gradients.windows)

    def replay(self, step: int) -> None:
        """Compute a part's activations again where forward did not leave them.

        Raises:
            RuntimeError: the outputs that this gives are others.
        """
        part = self._part_of[step]
        if part.tape is None:
            part.tape = self._blank(part, self._store)
            y = self._y[part.tokens]
            with _autocast(part):
                u = enter_known(part.tape.feedback, part.plan.chunks, self._s[part.tokens])
                layers = part.tape.without_feedback(u)
                self._loop.forward(layers)(range(len(layers.plan.chunks)))
            _check(layers.feedback.outputs(), y, part)

    def decode_backward(
        self, step: int, dy: Tensor | None = None, ds: Tensor | None = None
    ) -> Tensor:
        """The gradient [C, B, d] of a step's u, or of the first stage's e.

        Args:
            dy: that of its y [C, B, d], where this is not the last stage.
            ds: the first stage's `fed_gradient` of the next step, where this is the last alone.
        """
        part, k = self._begin_backward(step)
        tape, at = part.open().feedback, part.plan.chunks.slots[k]
        if dy is not None:
            at.put(tape.dy, dy)
        if ds is not None and step == part.steps[-1]:
            tape.dy[-2] += ds
        elif ds is not None:
            tape.dy[part.plan.chunks.first[k + 1] - 1, _lanes(ds)] += ds
        self._backward(part, range(k, k + 1))
        return at.get(tape.de)

    def decode_part_backward(self, step: int) -> None:
        """All steps of a part, where this is the only stage."""
        part, _ = self._begin_backward(self._part_of[step].steps[-1])
        self._backward(part, range(len(part.steps)))

    def fed_gradient(self, step: int) -> Tensor:
        """First stage: the gradient [B, d] of what the step before has fed to this one."""
        part, k = self._find(step)
        chunks = part.plan.chunks
        ds = part.open().feedback.ds[chunks.first[k], _lanes(chunks.first[k])]
        return torch.where(chunks.length[k][:, None] > 0, ds, 0.0)

    def add_inputs(self, step: int) -> None:
        """A part's gradients of e, of its half of the gate, of s* and of the memories."""
        part = self._part_of[step]
        gradients.add_inputs(part.open(), self.gradients, part.tokens)
        part.count_formed()

    def add_weights(self, step: int) -> None:
        """A part's gradients of weights."""
        part = self._part_of[step]
        gradients.add_weights(part.open(), self._weights)
        part.count_formed()

    def end_backward(self) -> Operands:
        """The gradients, when all are formed; the memory that they were formed in is let go of.

        A graph keeps this object for longer: until all that was before the decoder has had its
        backward.
        """
        found, self._store = self.gradients, Store()
        del self.gradients, self._loop, self._weights, self._ds, self._after
        return found

    def _begin_backward(self, step: int) -> tuple[_Part, int]:
        """A step's part, with room for gradients where the step is its last."""
        part, k = self._find(step)
        if step == part.steps[-1]:
            tape, ds = part.open(), self._ds
            tape.begin_backward(ds if ds is None else ds[part.tokens], self._after, self._store)
            with _autocast(part):
                self._run = self._loop.backward(tape)
        return part, k

    def _backward(self, part: _Part, chunks: range) -> None:
        self._run(chunks)
        if chunks.start == 0:
            del self._run
            self._hand_back(part, part.open().gradient_before())

    def _hand_back(self, part: _Part, before: Border) -> None:
        """To the part before, or to the operands, the gradient of what the part was given.

        Where s came from another stage, nobody reads there what the part before gets for it here.
        """
        if part.tokens.start == 0:
            fed = self.gradients.fed
            if fed is not None and before.fed is not None:
                fed = fed._replace(s=before.fed.s, boundary=before.fed.boundary)
            self.gradients = self.gradients._replace(windows=before.windows, fed=fed)
        self._after = before

    def _blank(self, part: _Part, store: Store) -> Tape:
        return Tape.blank(part.plan, part.operands, store, closed=self._last)

    def _find(self, step: int) -> tuple[_Part, int]:
        """A step's part, and its number there."""
        part = self._part_of[step]
        return part, step - part.steps.start


def _autocast(part: _Part) -> torch.autocast:
    """As forward formed products."""
    e = part.operands.e
    return torch.autocast(e.device.type, part.precision, enabled=part.precision != e.dtype)


def _check(found: Tensor, y: Tensor, part: _Part) -> None:
    """Outputs of a recomputation against those of forward."""
    error = (found - y).abs().max() / y.abs().max()
    # A state that is not finite has no error to speak of: the step's own guard deals with it.
    if error > _RESIDUAL[part.precision]:
        raise RuntimeError(
            f"tokens {part.tokens.start} .. {part.tokens.stop - 1} of the segment gave other "
            f"outputs when they were recomputed (relative error {error:.1e}); were weights or "
            "inputs changed between forward and backward?"
        )


def _lanes(x: Tensor) -> Tensor:
    """The numbers of the lanes of x [B, ...]."""
    return torch.arange(len(x), device=x.device)
