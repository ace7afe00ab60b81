"""The looped transformer's work on one stage: encoder, memory, decoder as part of a ring."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from rlt_dist.config.run import PipelineConfig
from rlt_dist.models.rlt.model import RecurrentLoopedTransformer
from rlt_dist.ops.recurrence.gradients import WeightSums, zero_weights
from rlt_dist.ops.recurrence.loop import Loop
from rlt_dist.ops.recurrence.parts import Cut
from rlt_dist.ops.recurrence.problem import Operands, Plan
from rlt_dist.ops.recurrence.stage import StageDecoder, steps_of_parts
from rlt_dist.parallel.execute.stage import BaseStage, gradient, leaf
from rlt_dist.parallel.schedule.instructions import Message, Schedule, Value, Work
from rlt_dist.parallel.schedule.looped import looped
from rlt_dist.util.errors import UserError


@dataclass
class _Decoding:
    """A micro-batch in the decoder.

    Attributes:
        e: the encoder's output, a leaf, [b, T, d].
        operands: what was made of it, with the graphs that lead back to it.
        steps: the decoder layers that are here.
        awaited: how many works are still done on it, none of which has another after it.
    """

    e: Tensor
    operands: Operands
    plan: Plan
    steps: StageDecoder
    awaited: int


Agree = Callable[[int], int]
"""The smallest of what all stages give."""


class LoopedStage(BaseStage[RecurrentLoopedTransformer]):
    """Encoder and decoder layers; the first stage embeds and merges, the last has the head.

    The decoder's weights are folded once for all micro-batches, which add to the same gradients.
    """

    def __init__(self, agree: Agree, *given: Any) -> None:
        """The other arguments are those of `BaseStage`."""
        super().__init__(*given)
        self._decoder = self._model.decoder_here()
        self._folded = self._decoder.folded()
        self._cut = self._agreed_cut(agree)
        self._tokens = [
            steps_of_parts(self._cut, self._segment(i).position.T, self._model.config.feedback)
            for i in range(len(self.micro_batches))
        ]
        self._ring = self.placement.stages > 1 and self._model.config.feedback > 0
        self._loop: Loop | None = None
        self._weights: WeightSums | None = None
        self._encoded: dict[int, tuple[Tensor, Tensor]] = {}
        self._decoding: dict[int, _Decoding] = {}
        self._d_outputs: dict[int, Tensor] = {}

    def shape(self, message: Message) -> tuple[int, ...]:
        lanes, _, d = whole = super().shape(message)
        if message.value in (Value.S, Value.DS):
            return lanes, d
        if message.value in (Value.U, Value.DU):
            # It may come before anything else of its micro-batch has.
            steps = [tokens for part in self._tokens[message.micro] for tokens in part]
            return steps[message.step], lanes, d
        return whole

    def schedule(self, config: PipelineConfig) -> Schedule:
        """All stages' instructions for the micro-batches; without gradients forward alone."""
        return _schedule(
            self.placement.stages,
            tuple(tuple(map(len, parts)) for parts in self._tokens),
            self._model.config.feedback > 0,
            config.group,
            config.in_flight,
            torch.is_grad_enabled(),
        )

    def finish(self) -> None:
        """Give the decoder's weights the gradients of all micro-batches."""
        if self._weights is None:
            return
        (layers, merge), sums = self._folded, self._weights
        folded = [weight for layer in layers for weight in layer]
        found = [weight for layer in sums.layers for weight in layer]
        if merge is not None and sums.merge is not None:
            folded, found = [*folded, merge], [*found, sums.merge]
        torch.autograd.backward(folded, found)

    def _agreed_cut(self, agree: Agree) -> Cut:
        """The parts of a segment, short enough for every stage."""
        own, model = self.micro_batches[0], self._model
        position = self._segment(0).position.T
        sketch = self._decoder.sketch(position, own.state, self._folded[0])
        cut = model.recurrence.cut(*sketch)
        longest = len(position)
        agreed = agree(longest + 1 if cut.keep else cut.length)
        return cut if agreed > longest else Cut(agreed, keep=False)

    # -- encoder -------------------------------------------------------------------------------

    def _do_encode(self, work: Work) -> None:
        own, given = self.micro_batches[work.micro], self._layer_input(work)
        with self._precision():
            made, state = self._model.encode(given, self._segment(work.micro), own.state)
        own.carry(state)
        if torch.is_grad_enabled():
            self._encoded[work.micro] = given, made
        self._put(Value.E if self.placement.last else Value.X, work, made)

    def _do_encode_backward(self, work: Work) -> None:
        given, made = self._encoded.pop(work.micro)
        if self.placement.last:
            parts = [self._use(Value.DE, work, stage) for stage in range(self.placement.stages)]
            d_made = torch.stack(parts).sum(dim=0)
        else:
            d_made = self._use(Value.DX, work, self.number + 1)
        torch.autograd.backward(made, d_made)
        if not self.placement.first:
            self._put(Value.DX, work, gradient(given))

    # -- memory --------------------------------------------------------------------------------

    def _do_memory(self, work: Work) -> None:
        own, segment = self.micro_batches[work.micro], self._segment(work.micro)
        e = leaf(self._use(Value.E, work, self.placement.stages - 1))
        with self._precision():
            memory, state = self._model.remember(e, segment, own.state)
            plan, operands = self._decoder.problem(e, memory, segment, own.state, self._folded)
            own.carry(state)
            steps = StageDecoder(
                self._loop_for(plan, operands.detached()),
                self._cut,
                plan,
                operands,
                first=self.placement.first,
                last=self.placement.last,
            )
        # With gradients their two kinds; without, what is carried on, and the loss.
        awaited = 2 if torch.is_grad_enabled() else 1 + self.placement.last
        self._decoding[work.micro] = _Decoding(e, operands, plan, steps, awaited)

    def _loop_for(self, plan: Plan, operands: Operands) -> Loop:
        """One for all micro-batches, since what it makes of the weights is the same."""
        if self._loop is None:
            make = self._model.recurrence.loop(plan, operands)
            if make is None:
                raise UserError(
                    "the reference recurrence is one autograd graph and has no steps for a "
                    "pipeline; unset RLT_DIST_OPS, or take mesh.pipeline 1"
                )
            self._loop = make(operands)
            if torch.is_grad_enabled():
                self._weights = zero_weights(operands)
        return self._loop

    def _do_memory_gradient(self, work: Work) -> None:
        self._decoding[work.micro].steps.add_inputs(work.step)

    def _do_memory_backward(self, work: Work) -> None:
        decoding = self._decoding[work.micro]
        e, operands, found = decoding.e, decoding.operands, decoding.steps.gradients
        made = [tensor for memory in operands.memories for tensor in memory]
        gradients = [tensor for memory in found.memories for tensor in memory]
        if operands.fed is not None and found.fed is not None:
            made += [operands.fed.gate_e, operands.fed.initial]
            gradients += [found.fed.gate_e, found.fed.initial]
        torch.autograd.backward(made, gradients)
        de = gradient(e)
        if self.placement.first:
            de += found.e.transpose(0, 1)
        self._put(Value.DE, work, de)
        self._let_go(work.micro)

    def _let_go(self, micro: int) -> None:
        """Drop a micro-batch's activations, if this was the last work that is done on them."""
        self._decoding[micro].awaited -= 1
        if not self._decoding[micro].awaited:
            del self._decoding[micro]

    # -- decoder -------------------------------------------------------------------------------

    def _do_decode(self, work: Work) -> None:
        steps, step = self._decoding[work.micro].steps, work.step
        u = None if self.placement.first else self._use(Value.U, work, self.number - 1, step)
        if self.placement.first and self._ring and step:
            steps.feed(step - 1, self._use(Value.S, work, self.placement.stages - 1, step - 1))
        with self._precision():
            y = steps.decode(step, u)
        if not self.placement.last:
            self._put(Value.U, work, y, step)
        elif self._ring:
            self._put(Value.S, work, steps.newest(step), step)
        fed = self.placement.first and self._model.config.feedback > 0
        if step + 1 == steps.parts[-1].stop and not fed:
            self._end(work.micro)

    def _do_carry(self, work: Work) -> None:
        if self._ring:
            step = work.step - 1
            s = self._use(Value.S, work, self.placement.stages - 1, step)
            self._decoding[work.micro].steps.feed(step, s)
        self._end(work.micro)

    def _end(self, micro: int) -> None:
        """Keep what the decoder carries to the next segment."""
        own, decoding = self.micro_batches[micro], self._decoding[micro]
        border = decoding.steps.after
        own.carry(self._decoder.carried(decoding.plan, border.windows))
        if border.fed is not None:
            own.carry({"s": border.fed.s})
            if "boundary" in own.state:
                own.carry({"boundary": border.fed.boundary})
        if not torch.is_grad_enabled():
            self._let_go(micro)

    def _do_head(self, work: Work) -> None:
        outputs = leaf(self._decoding[work.micro].steps.outputs().transpose(0, 1))
        self._give_output(work.micro, outputs)
        if torch.is_grad_enabled():
            self._d_outputs[work.micro] = gradient(outputs).transpose(0, 1)
        else:
            self._let_go(work.micro)

    def _do_replay(self, work: Work) -> None:
        self._decoding[work.micro].steps.replay(work.step)

    def _do_decode_backward(self, work: Work) -> None:
        steps, step = self._decoding[work.micro].steps, work.step
        ended = step + 1 == steps.parts[-1].stop
        if ended:
            assert self._loop is not None and self._weights is not None
            ds = self._d_outputs.pop(work.micro, None)
            steps.begin_backward(self._loop, self._weights, ds)
        dy = ds = None
        if not self.placement.last:
            dy = self._use(Value.DU, work, self.number + 1, step)
        elif self._ring and not ended:
            ds = self._use(Value.DS, work, 0, step)
        du = steps.decode_backward(step, dy, ds)
        if not self.placement.first:
            self._put(Value.DU, work, du, step)
        elif self._ring and step:
            self._put(Value.DS, work, steps.fed_gradient(step), step - 1)

    def _do_weights(self, work: Work) -> None:
        self._decoding[work.micro].steps.add_weights(work.step)
        if work.step == 0:
            self._let_go(work.micro)


@lru_cache(maxsize=64)
def _schedule(
    stages: int,
    parts: tuple[tuple[int, ...], ...],
    feedback: bool,
    group: int | None,
    in_flight: int,
    backward: bool,
) -> Schedule:
    """Kept for the next segment: RLT-1's are all alike, and arranging a long one takes a while."""
    return looped(
        stages, parts, feedback=feedback, group=group, in_flight=in_flight, backward=backward
    )
