"""The mesh that a run's configuration asks for."""

from collections.abc import Iterator
from contextlib import contextmanager

from rlt_dist.config.run import RunConfig
from rlt_dist.mesh.axes import axes_of
from rlt_dist.mesh.collectives import together
from rlt_dist.mesh.mesh import Mesh, open_mesh
from rlt_dist.mesh.world import World
from rlt_dist.parallel.plan.layout import shared_stages


@contextmanager
def mesh_of(config: RunConfig, world: World) -> Iterator[Mesh]:
    """Make the groups of a run.

    Raises:
        UserError: on every process alike, where the mesh needs another number of processes.
    """
    axes = together(world, lambda: axes_of(config.mesh, world.size))
    with open_mesh(world, axes, shared_stages(config.model, axes.pipeline)) as mesh:
        yield mesh
