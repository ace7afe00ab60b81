"""Loss on held-out text, with the state carried across segments or cut at each."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rlt_dist.config.run import RunConfig
from rlt_dist.data.stream.loader import Batch
from rlt_dist.inference.forward import (
    autocast,
    batch_nll,
    micro_batch_rows,
    parameter_dtype,
    through_pipeline,
)
from rlt_dist.mesh.collectives import all_sum
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.models.build import Model
from rlt_dist.models.state import State, detach
from rlt_dist.parallel.local import LocalModel
from rlt_dist.util.errors import UserError


@dataclass(frozen=True)
class Evaluation:
    """Sums over scored tokens.

    A document's first token is never predicted, for nothing stands before it; its end-of-text is,
    and stands for no byte.

    Attributes:
        nll: sum of -log p, in nats.
        tokens: how many tokens were scored.
        bytes: how many bytes of text they stand for; 0 where the tokenizer is not lossless.
    """

    nll: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Mean -log p per token, in nats."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text; None where tokens do not stand for exact bytes."""
        return self.nll / math.log(2) / self.bytes if self.bytes else None


class Scorer(Protocol):
    """Whatever finds -log p of targets, without dropout, while weights stand still."""

    def empty_state(self, lanes: int) -> State:
        """The state of lanes that have seen nothing."""

    def nll(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        """-log p of every target of a batch, [b, T], masked ones included; the state after it."""


class WholeScorer:
    """All of a model, in one piece."""

    def __init__(self, model: Model, config: RunConfig) -> None:
        self._frozen, self._config = model.frozen(), config

    def empty_state(self, lanes: int) -> State:
        return self._frozen.empty_state(lanes)

    def nll(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        return batch_nll(self._frozen, batch, state, self._config)


class PipelineScorer:
    """A stage of a model, with the others of its pipeline; all get what the last stage finds."""

    def __init__(self, local: LocalModel, mesh: Mesh, config: RunConfig) -> None:
        self._local, self._mesh, self._config = local, mesh, config

    def empty_state(self, lanes: int) -> State:
        return self._local.model.empty_state(lanes)

    def nll(self, batch: Batch, state: State) -> tuple[Tensor, State]:
        model, config, rows = self._local.model, self._config, micro_batch_rows(batch, self._config)
        found = torch.zeros(batch.loss_mask.shape, dtype=parameter_dtype(config))
        found = found.to(batch.tokens.device)

        def head(micro: int, output: Tensor) -> None:
            with autocast(config, output.device):
                found[rows[micro]] = model.nll(output, batch.targets[rows[micro]])

        passed = through_pipeline(self._local, self._mesh, batch, state, config, None, head)
        return all_sum(found, self._mesh.pipeline), passed.state


def scorer_of(local: LocalModel, mesh: Mesh, config: RunConfig) -> Scorer:
    """What scores with a run's model."""
    if mesh.axes.pipeline > 1:
        return PipelineScorer(local, mesh, config)
    return WholeScorer(local.model, config)


@torch.no_grad()
def evaluate(
    scorer: Scorer, batches: Iterable[Batch], byte_lengths: Tensor, *, carried: bool = True
) -> Tensor:
    """Run batches of the same lanes, from an empty state.

    Args:
        byte_lengths: int64 [V], bytes that each token stands for.
        carried: False: every segment starts from an empty state.

    Returns:
        float64 [3]: sums of -log p, of tokens, of bytes; to be summed over ranks.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=byte_lengths.device)
    state = None
    for batch in batches:
        if state is None or not carried:
            state = scorer.empty_state(batch.tokens.shape[0])
        nll, new_state = scorer.nll(batch, state)
        state = detach(new_state)
        mask = batch.loss_mask
        scored_bytes = byte_lengths[batch.targets][mask].sum()
        sums += torch.stack((nll[mask].double().sum(), mask.sum(), scored_bytes))
    return sums


def to_evaluation(sums: Tensor) -> Evaluation:
    """The result of `evaluate` as numbers with names.

    Raises:
        UserError: nothing was scored.
    """
    nll, tokens, size = sums.tolist()
    if not tokens:
        raise UserError(
            "nothing was scored: what was read holds no token after which something is to be "
            "predicted; read more of the split"
        )
    return Evaluation(nll, int(tokens), int(size))
