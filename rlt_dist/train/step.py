"""One optimizer step: one segment of every lane."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from rlt_dist.config.run import RunConfig
from rlt_dist.data.stream.loader import Batch
from rlt_dist.inference.forward import (
    Objective,
    batch_loss,
    micro_batch_rows,
    output_loss,
    through_pipeline,
)
from rlt_dist.mesh.collectives import all_sum
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.models.state import (
    State,
    detach,
    finite_lanes,
    join_lanes,
    mean_squares,
    restart_lanes,
    select_lanes,
)
from rlt_dist.ops.noise import Noise
from rlt_dist.parallel.engine.engine import Engine
from rlt_dist.parallel.gradients import complete_gradients
from rlt_dist.parallel.local import LocalModel


class PassTime(NamedTuple):
    """Seconds of this process's stage on its way through the pipeline.

    Attributes:
        whole: from its first instruction to its last one's end.
        waited: of them, for messages.
    """

    whole: float
    waited: float


@dataclass(frozen=True)
class StepResult:
    """What one step measured, alike on every rank but for `passed`.

    Attributes:
        loss: mean over the scored tokens of the whole global batch, of -log p in nats unless the
            objective is another; nan where none is scored.
        gradient_norm: Euclidean norm of the whole gradient before clipping.
        refusal: why nothing was updated; None for a step like most.
        restarted_lanes: lanes whose new state was not finite, or beyond the limit, and which start
            afresh.
        passed: how long this stage took; None without a pipeline.
    """

    loss: float
    gradient_norm: float
    refusal: str | None
    restarted_lanes: int
    passed: PassTime | None = None

    @property
    def skipped(self) -> bool:
        """Whether parameters and optimizer stayed as they were."""
        return self.refusal is not None


Judge = Callable[[float, float], str | None]
"""From a step's loss and gradient norm, why it must not update anything; None: it may."""


UNSCORED = "no token of it is scored"
"""Of a step that has read context alone: why nothing was updated."""


def not_finite(loss: float, gradient_norm: float) -> str | None:
    """The judge of every step."""
    finite = math.isfinite(loss) and math.isfinite(gradient_norm)
    return None if finite else "loss or gradient was not finite"


def train_step(
    local: LocalModel,
    optimizer: Engine,
    batch: Batch,
    state: State,
    *,
    config: RunConfig,
    mesh: Mesh,
    step: int,
    learning_rate: float,
    judge: Judge = not_finite,
    objective: Objective = output_loss,
) -> tuple[StepResult, State]:
    """Forward and backward over this rank's lanes, the sums over the mesh, and the update.

    The loss is the objective's sum over unmasked tokens of the whole global batch divided by their
    number.
    A skipped step leaves parameters and optimizer as they were. One that scores nothing is skipped,
    whatever the judge says: weight decay and momentum would move them all the same. After every
    step each lane's new state is kept if it is finite and within `guard.state_norm`, else the lane
    restarts. Every decision is taken on numbers that messages have summed over all ranks, so all
    take it alike.

    Returns:
        the step's numbers, and the state to carry, detached.
    """
    scored = all_sum(batch.loss_mask.sum(), mesh.data)
    optimizer.zero_gradients()
    share, new_state, passed = _forward_backward(
        local, mesh, batch, state, config, step, scored.clamp(min=1), objective
    )
    complete_gradients(local, mesh)
    square = optimizer.reduce()
    loss, squared = all_sum(torch.stack((share, square)), mesh.everyone).tolist()
    norm = math.sqrt(squared) if math.isfinite(squared) else math.inf
    refusal = UNSCORED if scored == 0 else judge(loss, norm)
    if refusal is None:
        optimizer.step(learning_rate, norm)
    new_state, restarted = _restart_broken(new_state, mesh, config.guard.state_norm)
    told = math.nan if refusal == UNSCORED else loss
    return StepResult(told, norm, refusal, restarted, passed), new_state


def _forward_backward(
    local: LocalModel,
    mesh: Mesh,
    batch: Batch,
    state: State,
    config: RunConfig,
    step: int,
    scored: Tensor,
    objective: Objective,
) -> tuple[Tensor, State, PassTime | None]:
    """Accumulate gradients over micro-batches of lanes; this rank's share of the loss.

    The share is a float64 scalar; over all ranks they sum up to the loss.
    """
    time = None
    total = torch.zeros((), dtype=torch.float64, device=batch.tokens.device)
    rows = micro_batch_rows(batch, config)

    def learn(loss: Tensor) -> None:
        (loss / scored).backward()
        total.add_(loss.detach().double() / scored)

    def head(micro: int, output: Tensor) -> None:
        learn(objective(local.model, output, batch.rows(rows[micro]), config))

    if mesh.axes.pipeline > 1:
        passed = through_pipeline(local, mesh, batch, state, config, step, head)
        new_state, time = passed.state, PassTime(passed.seconds, passed.waited)
    else:

        def learned(part: Batch, own: State) -> State:
            # A function, so that nothing of one micro-batch is left when the next begins.
            noise = Noise(config.train.seed, step, part.lanes)
            loss, after = batch_loss(local.model, part, own, config, noise, objective)
            learn(loss)
            return detach(after)

        new_state = join_lanes([learned(batch.rows(r), select_lanes(state, r)) for r in rows])
    # All of a tensor group find the same loss, and one of them tells it.
    return total if mesh.place.tensor == 0 else torch.zeros_like(total), new_state, time


def _restart_broken(state: State, mesh: Mesh, limit: float | None) -> tuple[State, int]:
    """Restart lanes whose state is not finite, or beyond a limit, on some rank; how many in all."""
    alive = finite_lanes(state)
    if limit is not None:
        alive &= _lanes_within(limit, state, mesh)
    alive = alive.to(torch.int64)
    mesh.replica.all_reduce(alive, dist.ReduceOp.MIN)
    broken = alive == 0
    restarted = int(all_sum(broken.sum(), mesh.data))
    return restart_lanes(state, broken) if broken.any() else state, restarted


def _lanes_within(limit: float, state: State, mesh: Mesh) -> Tensor:
    """bool [b]: lanes whose root mean square is within a limit in every layer that is here."""
    squares = mean_squares(state)
    if not squares:
        return torch.ones_like(state["position"], dtype=torch.bool)
    # All of a tensor group hold as much of each tensor, so its mean is that of theirs.
    means = all_sum(torch.stack(list(squares.values())), mesh.tensor) / mesh.axes.tensor
    return (means <= limit**2).all(dim=0)
