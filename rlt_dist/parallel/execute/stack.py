"""Transformer-XL's work on one stage."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlt_dist.config.run import PipelineConfig
from rlt_dist.models.transformer_xl.model import TransformerXL
from rlt_dist.parallel.execute.stage import BaseStage, gradient, leaf
from rlt_dist.parallel.schedule.instructions import Schedule, Value, Work
from rlt_dist.parallel.schedule.pipeline import gpipe, one_f_one_b


class _Held(NamedTuple):
    """What a micro-batch's backward needs.

    Attributes:
        given, made: the layers' input, a leaf, and their output.
        output: the output as the head's input, a leaf, on the last stage.
    """

    given: Tensor
    made: Tensor
    output: Tensor


class StackStage(BaseStage[TransformerXL]):
    """Layers of Transformer-XL, with the embedding on the first stage and the head on the last."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._held: dict[int, _Held] = {}

    def schedule(self, config: PipelineConfig) -> Schedule:
        """All stages' instructions for the micro-batches; without gradients forward alone."""
        stages, count = self.placement.stages, len(self.micro_batches)
        if not torch.is_grad_enabled():
            return gpipe(stages, count, backward=False)
        return (gpipe if config.schedule == "gpipe" else one_f_one_b)(stages, count)

    def _do_forward(self, work: Work) -> None:
        own, given = self.micro_batches[work.micro], self._layer_input(work)
        with self._precision():
            made, state = self._model.run_layers(given, self._segment(work.micro), own.state)
        own.carry(state)
        self._held[work.micro] = _Held(given, made, leaf(made))
        if not self.placement.last:
            self._put(Value.X, work, made)
            if not torch.is_grad_enabled():
                self._let_go(work.micro)

    def _do_head(self, work: Work) -> None:
        with self._precision():
            output = self._model.finish(self._held[work.micro].output, self._segment(work.micro))
        self._give_output(work.micro, output)
        if not torch.is_grad_enabled():
            self._let_go(work.micro)

    def _do_backward(self, work: Work) -> None:
        held = self._held[work.micro]
        if self.placement.last:
            d_made = gradient(held.output)
        else:
            d_made = self._use(Value.DX, work, self.number + 1)
        torch.autograd.backward(held.made, d_made)
        if not self.placement.first:
            self._put(Value.DX, work, gradient(held.given))
        self._let_go(work.micro)

    def _let_go(self, micro: int) -> None:
        """Nothing more is done on a micro-batch's activations."""
        del self._held[micro], self._segments[micro]
