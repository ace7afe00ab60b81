"""The mesh of a run: who computes with whom, as process groups made once."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlt_dist.mesh.axes import Axes, Place
from rlt_dist.mesh.world import TIMEOUT, World

NAMES = ("data", "pipeline", "tensor")
"""The axes, the slowest of a rank's number first."""

Group = str | tuple[int, ...]
"""An axis, `replica`, or the stages that share a parameter."""


@dataclass(frozen=True)
class Mesh:
    """This process's place among all, and the groups that it belongs to.

    A group of one process costs nothing. Whoever needs a group later keeps the mesh and not the
    group (`World.group` has the reason).

    Attributes:
        devices: the same as torch's mesh, with dimensions `data`, `pipeline` and `tensor`.
    """

    world: World
    axes: Axes
    place: Place
    devices: DeviceMesh
    _groups: dict[Group, dist.ProcessGroup]

    @property
    def data(self) -> dist.ProcessGroup:
        """Processes that hold the same weights, and other lanes."""
        return self._groups["data"]

    @property
    def pipeline(self) -> dist.ProcessGroup:
        """Processes that hold the same lanes, and the same cut of other layers; by stage."""
        return self._groups["pipeline"]

    @property
    def tensor(self) -> dist.ProcessGroup:
        """Processes that hold the same lanes, and other cuts of the same layers."""
        return self._groups["tensor"]

    @property
    def replica(self) -> dist.ProcessGroup:
        """All processes of the same lanes; together they hold every weight."""
        return self._groups["replica"]

    def holders(self, stages: Iterable[int]) -> dist.ProcessGroup:
        """The part of the pipeline axis that holds a parameter which these stages share.

        Args:
            stages: a set that the mesh was opened with; this process's own stage is in it.
        """
        return self._groups[tuple(sorted(stages))]


@contextmanager
def open_mesh(world: World, axes: Axes, shared: Iterable[Iterable[int]] = ()) -> Iterator[Mesh]:
    """Make all groups of a run; they are let go again at the end.

    Args:
        axes: of as many ranks as the world has.
        shared: the sets of stages that hold a parameter together, alike on all ranks.
    """
    ranks = torch.arange(axes.size).view(axes.data, axes.pipeline, axes.tensor)
    members: dict[Group, Tensor] = {
        "data": ranks.permute(1, 2, 0).flatten(0, 1),
        "pipeline": ranks.transpose(1, 2).flatten(0, 1),
        "tensor": ranks.flatten(0, 1),
        "replica": ranks.flatten(1),
    }
    for stages in sorted({tuple(sorted(stages)) for stages in shared}):
        members[stages] = ranks[:, list(stages)].transpose(1, 2).flatten(0, 1)
    groups = _make_groups(world, members)
    devices = DeviceMesh.from_group(
        [groups[name] for name in NAMES], world.device.type, ranks, mesh_dim_names=NAMES
    )
    yield Mesh(world, axes, axes.place(world.rank), devices, groups)
    # Not after an error: letting a group go waits for what was begun and may never be completed.
    devices._pg_registry.clear()
    for group in set(groups.values()) - {world.group}:
        dist.destroy_process_group(group)
    groups.clear()


def _make_groups(world: World, members: dict[Group, Tensor]) -> dict[Group, dist.ProcessGroup]:
    """This process's groups, given all groups' ranks [groups, members]; of the same there is one.

    All processes go through all groups in one order. Were each made among its members alone, torch
    would name it by its ranks, and a second mesh would meet at what the first left in the store.
    """
    made = {tuple(range(world.size)): world.group}
    groups = {}
    for name, of_all in members.items():
        for ranks in map(tuple, of_all.tolist()):
            if ranks not in made:
                made[ranks] = dist.new_group(list(ranks), timeout=TIMEOUT)
            if world.rank in ranks:
                groups[name] = made[ranks]
    return groups
