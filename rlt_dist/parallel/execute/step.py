"""From micro-batches to losses, gradients and new state, through a pipeline."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from rlt_dist.config.model import one_piece
from rlt_dist.config.run import PipelineConfig
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.models.gru import GatedRecurrentUnits
from rlt_dist.models.rlt.model import RecurrentLoopedTransformer
from rlt_dist.models.state import State, join_lanes
from rlt_dist.parallel.execute.channel import Channel
from rlt_dist.parallel.execute.executor import execute
from rlt_dist.parallel.execute.looped import LoopedStage
from rlt_dist.parallel.execute.stack import StackStage
from rlt_dist.parallel.execute.stage import Head, MicroBatch, Precision
from rlt_dist.parallel.local import LocalModel
from rlt_dist.parallel.schedule.instructions import Receive, Schedule
from rlt_dist.parallel.schedule.simulate import Timed
from rlt_dist.util.errors import UserError


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

    @property
    def seconds(self) -> float:
        """From this stage's first instruction to its last one's end."""
        return self.done[-1].end - self.done[0].start

    @property
    def waited(self) -> float:
        """Seconds of them that it received."""
        return sum(t.end - t.start for t in self.done if isinstance(t.instruction, Receive))


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

    Raises:
        UserError: the model has no stages, not even one.
    """
    model, given = local.model, (local.placement, micro_batches, precision, head)
    stage: LoopedStage | StackStage
    piece = one_piece(model.config)
    if isinstance(model, GatedRecurrentUnits) or piece is not None:
        raise UserError(f"{piece} has no stages; its forward is called whole")
    if isinstance(model, RecurrentLoopedTransformer):
        stage = LoopedStage(lambda number: _least(number, mesh), model, *given)
    else:
        stage = StackStage(model, *given)
    planned = stage.schedule(config)
    channel = Channel(mesh.pipeline, mesh.world.device, next(model.parameters()).dtype)
    before = mesh.pipeline.meter.bytes
    done = execute(planned[mesh.place.stage], stage, channel)
    stage.finish()
    state = join_lanes([micro.carried for micro in micro_batches])
    return Passed(state, planned, done, mesh.pipeline.meter.bytes - before)


def _least(number: int, mesh: Mesh) -> int:
    """The smallest of what the processes of a replica give."""
    least = torch.tensor(number, device=mesh.world.device)
    mesh.replica.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)
