"""One batch through a model under a run's choices of precision and state reset.

Training, validation and evaluation all come through here, in one piece or by pipeline stages.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from rlt_dist.config.model import GruConfig, RltConfig
from rlt_dist.config.run import RunConfig
from rlt_dist.data.stream.loader import Batch
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.models.build import Frozen, Model
from rlt_dist.models.state import State, select_lanes
from rlt_dist.ops.choice import asked, asker
from rlt_dist.ops.noise import Noise
from rlt_dist.ops.recurrence.dispatch import Kind, Recurrence
from rlt_dist.parallel.execute.stage import Head, MicroBatch
from rlt_dist.parallel.execute.step import Passed, pipeline_pass
from rlt_dist.parallel.local import LocalModel
from rlt_dist.util.errors import UserError


def parameter_dtype(config: RunConfig) -> torch.dtype:
    """Type of parameters, gradients and carried state: float32 also for bfloat16 products."""
    return torch.float64 if config.train.precision == "float64" else torch.float32


def product_dtype(config: RunConfig) -> torch.dtype:
    """Type that products are formed in."""
    return getattr(torch, config.train.precision)


def recurrence(config: RunConfig) -> Recurrence:
    """How RLT's decoder is computed: as configured, unless RLT_DIST_OPS says otherwise.

    Raises:
        UserError: RLT_DIST_OPS is no implementation, or none that the configuration could name.
    """
    chosen, backend = config.recompute, asked() or config.ops.recurrence
    trouble = config.ops_trouble(backend)
    if trouble is not None:
        raise UserError(f"{asker()}: {trouble}")
    return Recurrence(backend, chosen.decoder_chunk, round(chosen.budget_gib * 2**30))


def kind(config: RunConfig, device: str) -> Kind:
    """What a run computes there, as far as implementations differ in what they can."""
    model, dtype, products = config.bounded_model, parameter_dtype(config), product_dtype(config)
    width = 0 if isinstance(model, GruConfig) else model.head_width
    window = model.window if isinstance(model, RltConfig) else 0
    return Kind(device, dtype, products, width, window)


def autocast(config: RunConfig, device: torch.device) -> torch.autocast:
    """Products in their type, where it is not that of the parameters."""
    products = product_dtype(config)
    return torch.autocast(device.type, products, enabled=products != parameter_dtype(config))


def batch_nll(
    model: Model | Frozen, batch: Batch, state: State, config: RunConfig
) -> tuple[Tensor, State]:
    """-log p of every target, without dropout.

    Args:
        batch: tokens [b, T+1].
        state: what the batch's lanes carry.

    Returns:
        [b, T], masked targets included, and the state after the batch.
    """
    with autocast(config, batch.tokens.device):
        output, new_state = model(batch.tokens[:, :-1], _starts(batch, config), state)
        return model.nll(output, batch.targets), new_state


def batch_output(
    model: Model, batch: Batch, state: State, config: RunConfig, noise: Noise | None
) -> tuple[Tensor, State]:
    """The model's outputs [b, T, d] for a batch, and the state after it.

    Args:
        batch: tokens [b, T+1].
        state: what the batch's lanes carry.
        noise: names the dropout masks; None: nothing drops.
    """
    with autocast(config, batch.tokens.device):
        return model(batch.tokens[:, :-1], _starts(batch, config), state, noise)


Objective = Callable[[Model, Tensor, Batch, RunConfig], Tensor]
"""What is learned: of a model's outputs [b, T, d] for a batch, a sum over the tokens where its
`loss_mask` is true, a scalar whose backward can run only once."""


def output_loss(model: Model, output: Tensor, batch: Batch, config: RunConfig) -> Tensor:
    """The objective of pretraining and fine-tuning: -log p of the unmasked targets."""
    targets, scored = batch.targets.flatten(), batch.loss_mask.flatten().nonzero()[:, 0]
    with autocast(config, batch.tokens.device):
        # Masked tokens are left out, not weighted with 0: 0 times a number that is not finite
        # would spoil the loss and every gradient.
        return model.loss(output.flatten(0, 1)[scored], targets[scored])


def batch_loss(
    model: Model,
    batch: Batch,
    state: State,
    config: RunConfig,
    noise: Noise | None,
    objective: Objective = output_loss,
) -> tuple[Tensor, State]:
    """The objective's sum over a batch, for training.

    Args:
        batch, state, noise: as for `batch_output`.

    Returns:
        a scalar whose backward can run only once, and the state after the batch.
    """
    output, new_state = batch_output(model, batch, state, config, noise)
    return objective(model, output, batch, config), new_state


def through_pipeline(
    local: LocalModel,
    mesh: Mesh,
    batch: Batch,
    state: State,
    config: RunConfig,
    noise_step: int | None,
    head: Head,
) -> Passed:
    """A batch through the stages of a pipeline in micro-batches, backward too with gradients on.

    Args:
        batch: tokens [b, T+1].
        state: what the batch's lanes carry on this stage.
        noise_step: the step that names the dropout masks; None: nothing drops.
        head: called on the last stage with a micro-batch's number and the model's outputs.
    """
    micro_batches = []
    for rows in micro_batch_rows(batch, config):
        part = batch.rows(rows)
        noise = None
        if noise_step is not None:
            noise = Noise(config.train.seed, noise_step, part.lanes)
        tokens, starts = part.tokens[:, :-1], _starts(part, config)
        micro_batches.append(MicroBatch(tokens, starts, select_lanes(state, rows), noise))
    device = batch.tokens.device
    return pipeline_pass(
        local, mesh, config.pipeline, micro_batches, lambda: autocast(config, device), head
    )


def micro_batch_rows(batch: Batch, config: RunConfig) -> list[slice]:
    """The groups of lanes that a batch is gone through in."""
    lanes = len(batch.tokens)
    size = config.micro_batch_lanes(lanes)
    return [slice(first, first + size) for first in range(0, lanes, size)]


def _starts(batch: Batch, config: RunConfig) -> Tensor:
    """bool [b, T], True where a lane's state starts afresh."""
    start = batch.document_start
    return torch.zeros_like(start) if config.state.reset == "never" else start
