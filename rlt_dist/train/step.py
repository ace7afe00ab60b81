"""One optimizer step: one segment of every lane."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from rlt_dist.config.run import RunConfig
from rlt_dist.data.loader import Batch
from rlt_dist.inference.forward import batch_loss
from rlt_dist.mesh.collectives import all_sum, sum_gradients
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.models.build import Model
from rlt_dist.models.state import (
    State,
    detach,
    finite_lanes,
    join_lanes,
    restart_lanes,
    select_lanes,
)
from rlt_dist.ops.noise import Noise
from rlt_dist.train.optimizer import NamedAdamW


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
    model: Model,
    optimizer: NamedAdamW,
    batch: Batch,
    state: State,
    *,
    config: RunConfig,
    mesh: Mesh,
    step: int,
    learning_rate: float,
) -> tuple[StepResult, State]:
    """Forward and backward over this rank's lanes, the sum over the data axis, and the update.

    The loss is the sum over unmasked tokens of the whole global batch divided by their number.
    A skipped step leaves parameters and optimizer as they were; each lane's new state is kept if
    it is finite, else the lane restarts. Every decision is taken on numbers summed over the
    data axis, so all its ranks take it alike.

    Returns:
        the step's numbers, and the state to carry, detached.
    """
    scored = all_sum(batch.loss_mask.sum(), mesh.data).clamp(min=1)
    optimizer.zero_gradients()
    total, new_state = _forward_backward(model, batch, state, config, step, scored)
    sum_gradients(optimizer.parameters.values(), mesh.data)
    loss = all_sum(total, mesh.data).item()
    norm = optimizer.gradient_norm()
    finite = math.isfinite(loss) and bool(norm.isfinite())
    if finite:
        optimizer.step(learning_rate, norm)
    alive = finite_lanes(new_state)
    if not alive.all():
        new_state = restart_lanes(new_state, ~alive)
    restarted = int(all_sum((~alive).sum(), mesh.data))
    return StepResult(loss, norm.item(), not finite, restarted), new_state


def _forward_backward(
    model: Model, batch: Batch, state: State, config: RunConfig, step: int, scored: Tensor
) -> tuple[Tensor, State]:
    """Accumulate gradients over micro-batches of lanes; this rank's share of the loss."""
    lanes = batch.tokens.shape[0]
    size = config.micro_batch_lanes(lanes)
    total = torch.zeros((), dtype=torch.float64, device=batch.tokens.device)
    states = []
    for first in range(0, lanes, size):
        rows = slice(first, first + size)
        part = batch.rows(rows)
        noise = Noise(config.train.seed, step, part.lanes)
        total_nll, new_state = batch_loss(model, part, select_lanes(state, rows), config, noise)
        loss = total_nll / scored
        loss.backward()
        total += loss.detach().double()
        states.append(detach(new_state))
    return total, join_lanes(states)
