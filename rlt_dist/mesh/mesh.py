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
    place = axes.place(world.rank)
    ranks = torch.arange(axes.size).view(axes.data, axes.pipeline, axes.tensor)
    replica = ranks[place.data]
    members: dict[Group, Tensor] = {
        "data": ranks[:, place.stage, place.tensor],
        "pipeline": replica[:, place.tensor],
        "tensor": replica[place.stage],
        "replica": replica,
    }
    for stages in sorted({tuple(sorted(stages)) for stages in shared}):
        if place.stage in stages:
            members[stages] = replica[list(stages), place.tensor]
    groups = _make_groups(world, members)
    devices = DeviceMesh.from_group(
        [groups[name] for name in NAMES], world.device.type, ranks, mesh_dim_names=NAMES
    )
    yield Mesh(world, axes, place, devices, groups)
    # Not after an error: letting a group go waits for what was begun and may never be completed.
    devices._pg_registry.clear()
    for group in set(groups.values()) - {world.group}:
        dist.destroy_process_group(group)
    groups.clear()


def _make_groups(world: World, members: dict[Group, Tensor]) -> dict[Group, dist.ProcessGroup]:
    """This process's groups; of the same ranks there is one.

    All processes make theirs in the same order, and those of one kind do not overlap, so making
    each among its members alone cannot deadlock.
    """
    made = {tuple(range(world.size)): world.group}
    groups = {}
    for name, ranks in members.items():
        key = tuple(ranks.flatten().tolist())
        if key not in made:
            made[key] = dist.new_group(list(key), timeout=TIMEOUT, use_local_synchronization=True)
        groups[name] = made[key]
    return groups
