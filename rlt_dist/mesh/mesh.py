"""The mesh of a run: who computes with whom, as process groups made once."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlt_dist.mesh.axes import AXES, Axes, Place
from rlt_dist.mesh.world import World

Group = str | tuple[int, ...]
"""An axis, `replica`, or the stages that share a parameter."""


@dataclass(frozen=True)
class Mesh:
    """This process's place among all, and the groups that it belongs to.

    A group of one process costs nothing. Whoever needs a group later keeps the mesh and not the
    group (`World.group_of` has the reason).

    Attributes:
        devices: the same as torch's mesh, with dimensions `data`, `pipeline` and `tensor`.
    """

    world: World
    axes: Axes
    place: Place
    devices: DeviceMesh
    _members: dict[Group, tuple[int, ...]]

    @property
    def data(self) -> dist.ProcessGroup:
        """Processes that hold the same weights, and other lanes."""
        return self._group("data")

    @property
    def pipeline(self) -> dist.ProcessGroup:
        """Processes that hold the same lanes, and the same cut of other layers; by stage."""
        return self._group("pipeline")

    @property
    def tensor(self) -> dist.ProcessGroup:
        """Processes that hold the same lanes, and other cuts of the same layers."""
        return self._group("tensor")

    @property
    def replica(self) -> dist.ProcessGroup:
        """All processes of the same lanes; together they hold every weight."""
        return self._group("replica")

    def holders(self, stages: Iterable[int]) -> dist.ProcessGroup:
        """The part of the pipeline axis that holds a parameter which these stages share.

        Args:
            stages: a set that the mesh was opened with; this process's own stage is in it.
        """
        return self._group(tuple(sorted(stages)))

    def _group(self, name: Group) -> dist.ProcessGroup:
        return self.world.group_of(self._members[name])


@contextmanager
def open_mesh(world: World, axes: Axes, shared: Iterable[Iterable[int]] = ()) -> Iterator[Mesh]:
    """Make all groups of a run, in the same order on all ranks.

    Args:
        axes: of as many ranks as the world has.
        shared: the sets of stages that hold a parameter together, alike on all ranks.
    """
    ranks = torch.arange(axes.size).view(axes.data, axes.pipeline, axes.tensor)
    lines: dict[Group, Tensor] = {
        "data": ranks.permute(1, 2, 0).flatten(0, 1),
        "pipeline": ranks.transpose(1, 2).flatten(0, 1),
        "tensor": ranks.flatten(0, 1),
        "replica": ranks.flatten(1),
    }
    for stages in sorted({tuple(sorted(stages)) for stages in shared}):
        lines[stages] = ranks[:, list(stages)].transpose(1, 2).flatten(0, 1)
    members: dict[Group, tuple[int, ...]] = {}
    for name, line in lines.items():
        every = [tuple(one) for one in line.tolist()]
        world.make_groups(every)
        members.update((name, one) for one in every if world.rank in one)
    devices = DeviceMesh.from_group(
        [world.group_of(members[name]) for name in AXES],
        world.device.type,
        ranks,
        mesh_dim_names=AXES,
    )
    try:
        yield Mesh(world, axes, axes.place(world.rank), devices, members)
    finally:
        devices._pg_registry.clear()
