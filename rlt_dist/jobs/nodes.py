"""Which mesh fits on the nodes that a job was given, and how many ranks each of them runs: pure."""

from dataclasses import dataclass

from rlt_dist.config.run import RunConfig
from rlt_dist.mesh.axes import Axes, least_axes
from rlt_dist.util.errors import UserError


@dataclass(frozen=True)
class Layout:
    """A job's ranks on its nodes.

    Attributes:
        ranks: how many each node runs, in the nodes' order; those at the end may have none.
        idle: places for ranks that the mesh does not use.
    """

    axes: Axes
    ranks: tuple[int, ...]
    idle: int


def lay_out(config: RunConfig, nodes: int, processes: int) -> Layout:
    """The largest mesh of a run that fits on `nodes` nodes of `processes` ranks each.

    The tensor and pipeline axes are the configuration's. The data axis is as long as fits, divides
    the lanes and leaves every rank whole micro-batches; at most the configuration's, if it names a
    length. Nodes are filled one after the other, so that ranks of one tensor group stay together.

    Raises:
        UserError: there is no room for one replica.
    """
    places, replica = nodes * processes, least_axes(config.mesh)
    one = replica.pipeline * replica.tensor
    most = min(places // one, config.mesh.data or places)
    if most < 1:
        raise UserError(
            f"mesh.pipeline {replica.pipeline} x mesh.tensor {replica.tensor} needs {one} "
            f"processes, and {nodes} nodes of {processes} have room for {places}"
        )
    lanes, micro_batch = config.data.lanes, config.train.micro_batch or 1
    data = next(n for n in range(most, 0, -1) if lanes % (n * micro_batch) == 0)
    axes = Axes(data, replica.pipeline, replica.tensor)
    ranks = tuple(max(0, min(processes, axes.size - n * processes)) for n in range(nodes))
    return Layout(axes, ranks, places - axes.size)
