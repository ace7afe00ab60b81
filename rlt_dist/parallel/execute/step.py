"""From micro-batches to losses, gradients and new state, through a pipeline."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlt_dist.config.run import PipelineConfig
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.models.rlt.model import RecurrentLoopedTransformer
from rlt_dist.models.state import State, join_lanes
from rlt_dist.parallel.execute.channel import Channel
from rlt_dist.parallel.execute.executor import execute
from rlt_dist.parallel.execute.looped import LoopedStage
from rlt_dist.parallel.execute.stack import StackStage
from rlt_dist.parallel.execute.stage import Head, MicroBatch, Precision
from rlt_dist.parallel.local import LocalModel
from rlt_dist.parallel.schedule.instructions import Schedule
from rlt_dist.parallel.schedule.simulate import Timed


@dataclass(frozen=True)
class Passed:
    """What a pass through the pipeline leaves behind.

    Attributes:
        state: of all micro-batches' lanes after the segment, what this stage has of it.
        planned: the instructions of all stages.
        done: what this stage carried out, and when.
        sent: bytes of this stage's messages.
    """

    state: State
    planned: Schedule
    done: list[Timed]
    sent: int


def pipeline_pass(
    local: LocalModel,
    mesh: Mesh,
    config: PipelineConfig,
    micro_batches: list[MicroBatch],
    precision: Precision,
    head: Head,
) -> Passed:
    """Run micro-batches forward and, where gradients are enabled, backward.

    Parameters are given what this process finds of their gradients.

    Args:
        precision: makes the context that the model's forward runs in.
        head: called on the last stage with the model's outputs.
    """
    model, given = local.model, (local.placement, micro_batches, precision, head)
    stage: LoopedStage | StackStage
    if isinstance(model, RecurrentLoopedTransformer):
        stage = LoopedStage(lambda number: _least(number, mesh), model, *given)
    else:
        stage = StackStage(model, *given)
    planned = stage.schedule(config)
    channel = Channel(mesh.pipeline, mesh.world.device, next(model.parameters()).dtype)
    done = execute(planned[mesh.place.stage], stage, channel)
    stage.finish()
    state = join_lanes([micro.carried for micro in micro_batches])
    return Passed(state, planned, done, channel.bytes_sent)


def _least(number: int, mesh: Mesh) -> int:
    """The smallest of what the processes of a replica give."""
    least = torch.tensor(number, device=mesh.world.device)
    if mesh.replica.size() > 1:
        dist.all_reduce(least, dist.ReduceOp.MIN, group=mesh.replica)
    return int(least)
