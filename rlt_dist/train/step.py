"""One optimizer step: one segment of every lane."""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from rlt_dist.config.run import RunConfig
from rlt_dist.data.stream.loader import Batch
from rlt_dist.inference.forward import (
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
    restart_lanes,
    select_lanes,
)
from rlt_dist.ops.noise import Noise
from rlt_dist.parallel.engine.engine import Engine
from rlt_dist.parallel.gradients import complete_gradients
from rlt_dist.parallel.local import LocalModel


@dataclass(frozen=True)
class StepResult:
    """What one step measured, alike on every rank.

    Attributes:
        loss: mean -log p over the scored tokens of the whole global batch, in nats.
        gradient_norm: Euclidean norm of the whole gradient before clipping.
        skipped: the loss or the gradient was not finite, so nothing was updated.
        restarted_lanes: lanes whose new state was not finite and which start afresh.
    """

    loss: float
    gradient_norm: float
    skipped: bool
    restarted_lanes: int


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
) -> tuple[StepResult, State]:
    """Forward and backward over this rank's lanes, the sums over the mesh, and the update.

    The loss is the sum over unmasked tokens of the whole global batch divided by their number.
    A skipped step leaves parameters and optimizer as they were; each lane's new state is kept if
    it is finite, else the lane restarts. Every decision is taken on numbers that one message has
    summed over all ranks, so all take it alike.

    Returns:
        the step's numbers, and the state to carry, detached.
    """
    scored = all_sum(batch.loss_mask.sum(), mesh.data).clamp(min=1)
    optimizer.zero_gradients()
    share, new_state = _forward_backward(local, mesh, batch, state, config, step, scored)
    complete_gradients(local, mesh)
    square = optimizer.reduce()
    loss, squared = all_sum(torch.stack((share, square)), mesh.world.group).tolist()
    norm = math.sqrt(squared) if math.isfinite(squared) else math.inf
    finite = math.isfinite(loss) and math.isfinite(norm)
    if finite:
        optimizer.step(learning_rate, norm)
    new_state, restarted = _restart_broken(new_state, mesh)
    return StepResult(loss, norm, not finite, restarted), new_state


def _forward_backward(
    local: LocalModel,
    mesh: Mesh,
    batch: Batch,
    state: State,
    config: RunConfig,
    step: int,
    scored: Tensor,
) -> tuple[Tensor, State]:
    """Accumulate gradients over micro-batches of lanes; this rank's share of the loss.

    The share is a float64 scalar; over all ranks they sum up to the loss.
    """
    total = torch.zeros((), dtype=torch.float64, device=batch.tokens.device)
    rows = micro_batch_rows(batch, config)

    def learn(loss: Tensor) -> None:
        (loss / scored).backward()
        total.add_(loss.detach().double() / scored)

    def head(micro: int, output: Tensor) -> None:
        learn(output_loss(local.model, output, batch.rows(rows[micro]), config))

    if mesh.axes.pipeline > 1:
        new_state = through_pipeline(local, mesh, batch, state, config, step, head).state
    else:
        states = []
        for part, own in ((batch.rows(r), select_lanes(state, r)) for r in rows):
            noise = Noise(config.train.seed, step, part.lanes)
            loss, after = batch_loss(local.model, part, own, config, noise)
            learn(loss)
            states.append(detach(after))
        new_state = join_lanes(states)
    # All of a tensor group find the same loss, and one of them tells it.
    return total if mesh.place.tensor == 0 else torch.zeros_like(total), new_state


def _restart_broken(state: State, mesh: Mesh) -> tuple[State, int]:
    """Restart lanes whose state is not finite on some rank; how many there are in all."""
    alive = finite_lanes(state).to(torch.int64)
    if mesh.replica.size() > 1:
        dist.all_reduce(alive, dist.ReduceOp.MIN, group=mesh.replica)
    broken = alive == 0
    restarted = int(all_sum(broken.sum(), mesh.data))
    return restart_lanes(state, broken) if broken.any() else state, restarted
