"""The mesh of a run: who computes with whom, as process groups made once."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from rlt_dist.mesh.axes import AXES, Axes, Group, Place
from rlt_dist.mesh.line import Line, Meter
from rlt_dist.mesh.world import World

METERED = (*AXES, "replica", "world")
"""What messages are counted by; those of stages that share a parameter count as `pipeline`."""


@dataclass(frozen=True)
class Mesh:
    """This process's place among all, and the lines that it belongs to.

    Attributes:
        devices: the same as torch's mesh, with dimensions `data`, `pipeline` and `tensor`.
        meters: what this process has sent, by `METERED`.
    """

    world: World
    axes: Axes
    place: Place
    devices: DeviceMesh
    meters: Mapping[str, Meter]
    _lines: Mapping[Group, Line]

    @property
    def data(self) -> Line:
        """Processes that hold the same weights, and other lanes."""
        return self._lines["data"]

    @property
    def pipeline(self) -> Line:
        """Processes that hold the same lanes, and the same cut of other layers; by stage."""
        return self._lines["pipeline"]

    @property
    def tensor(self) -> Line:
        """Processes that hold the same lanes, and other cuts of the same layers."""
        return self._lines["tensor"]

    @property
    def replica(self) -> Line:
        """All processes of the same lanes; together they hold every weight."""
        return self._lines["replica"]

    @property
    def everyone(self) -> Line:
        """All processes."""
        return self._lines["world"]

    def holders(self, stages: Iterable[int]) -> Line:
        """The part of the pipeline axis that holds a parameter which these stages share.

        Args:
            stages: a set that the mesh was opened with; this process's own stage is in it.
        """
        return self._lines[tuple(sorted(stages))]


@contextmanager
def open_mesh(world: World, axes: Axes, shared: Iterable[Iterable[int]] = ()) -> Iterator[Mesh]:
    """Make all groups of a run, in the same order on all ranks.

    Args:
        axes: of as many ranks as the world has.
        shared: the sets of stages that hold a parameter together, alike on all ranks.
    """
    ranks = torch.arange(axes.size).view(axes.data, axes.pipeline, axes.tensor)
    groups: dict[Group, Tensor] = {
        "data": ranks.permute(1, 2, 0).flatten(0, 1),
        "pipeline": ranks.transpose(1, 2).flatten(0, 1),
        "tensor": ranks.flatten(0, 1),
        "replica": ranks.flatten(1),
        "world": ranks.view(1, -1),
    }
    for stages in sorted({tuple(sorted(stages)) for stages in shared}):
        groups[stages] = ranks[:, list(stages)].transpose(1, 2).flatten(0, 1)
    meters = {name: Meter() for name in METERED}
    lines: dict[Group, Line] = {}
    for name, members in groups.items():
        every = [tuple(one) for one in members.tolist()]
        world.make_groups(every)
        meter = meters[name if isinstance(name, str) else "pipeline"]
        lines.update((name, Line(world, one, meter)) for one in every if world.rank in one)
    devices = DeviceMesh.from_group(
        [lines[name].group for name in AXES],
        world.device.type,
        ranks,
        mesh_dim_names=AXES,
    )
    try:
        yield Mesh(world, axes, axes.place(world.rank), devices, meters, lines)
    finally:
        devices._pg_registry.clear()
