"""All that the benchmarks ask of a model: a step of training, a segment or token of evaluation."""

import torch
from torch import Tensor

from rlt_dist.config.model import ModelConfig
from rlt_dist.models.build import Model, initial_model
from rlt_dist.models.state import State, detach
from rlt_dist.models.transformer_xl.model import FrozenTransformerXL, TransformerXL
from rlt_dist.ops.recurrence.dispatch import DEFAULT, Recurrence


def model_of(config: ModelConfig, vocabulary: int, recurrence: Recurrence = DEFAULT) -> Model:
    """The model in float32; the same configuration gives the same parameters."""
    return initial_model(config, vocabulary, seed=0, recurrence=recurrence)


def random_tokens(lanes: int, tokens: int, vocabulary: int) -> Tensor:
    """int64 [lanes, tokens], the same at every call."""
    return torch.randint(vocabulary, (lanes, tokens), generator=torch.Generator().manual_seed(0))


class TrainingStep:
    """Forward, loss and backward of a segment behind a carried state, which is carried on."""

    def __init__(self, model: Model, lanes: int, tokens: int) -> None:
        """The state of a first segment is made here, so that every call has one to read."""
        batch = random_tokens(lanes, tokens + 1, model.vocabulary)
        self._model, self._inputs, self._targets = model, batch[:, :-1], batch[:, 1:]
        self._start = torch.zeros_like(self._inputs, dtype=torch.bool)
        with torch.no_grad():
            _, self._state = model(self._inputs, self._start, model.empty_state(lanes))

    def __call__(self) -> float:
        """The loss; gradients are left in the parameters."""
        self._model.zero_grad()
        output, state = self._model(self._inputs, self._start, self._state)
        targets = self._targets.flatten()
        loss = self._model.loss(output.flatten(0, 1), targets) / len(targets)
        loss.backward()
        self._state = detach(state)
        return loss.item()


class CachedEvaluation:
    """Score a segment of one lane behind a full memory, which is carried on."""

    def __init__(self, model: TransformerXL, tokens: int) -> None:
        batch = random_tokens(1, tokens + 1, model.vocabulary)
        self._model, self._inputs, self._targets = model.frozen(), batch[:, :-1], batch[:, 1:]
        self._start = torch.zeros_like(self._inputs, dtype=torch.bool)
        self._state = _full_state(self._model, model.config.memory_len)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """-log p of every token of the segment, [1, T]."""
        output, self._state = self._model(self._inputs, self._start, self._state)
        return self._model.nll(output, self._targets)


class WindowEvaluation:
    """Score one token by running all that it may attend to through the model afresh."""

    def __init__(self, model: TransformerXL) -> None:
        batch = random_tokens(1, model.config.memory_len + 1, model.vocabulary)
        self._model, self._inputs, self._targets = model.frozen(), batch[:, :-1], batch[:, -1:]
        self._start = torch.zeros_like(self._inputs, dtype=torch.bool)

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """-log p of the token behind the window, [1, 1]."""
        output, _ = self._model(self._inputs, self._start, self._model.empty_state(1))
        return self._model.nll(output[:, -1:], self._targets)


def _full_state(model: FrozenTransformerXL, length: int) -> State:
    """A state as after a long document; running one would take longer than the benchmark."""
    state = model.empty_state(1)
    counts = {name: torch.full_like(state[name], length) for name in ("position", "tokens")}
    memories = {
        name: torch.randn(1, length, *state[name].shape[2:])
        for name in state.keys() - counts.keys()
    }
    return memories | counts
