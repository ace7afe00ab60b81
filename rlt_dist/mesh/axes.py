"""Which rank stands where: data x pipeline x tensor, as arithmetic alone."""

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from rlt_dist.config.run import MeshConfig
from rlt_dist.util.errors import UserError

AXES = ("data", "pipeline", "tensor")
"""The axes, the slowest of a rank's number first."""

Group = str | tuple[int, ...]
"""Who takes part in a message: an axis of the mesh, `replica` (all axes but data), `world`, or the
stages that share a parameter."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands.

    Attributes:
        data: which share of the lanes is its own.
        stage: which layers, along the pipeline.
        tensor: which cut of each weight.
    """

    data: int
    stage: int
    tensor: int


@dataclass(frozen=True)
class Axes:
    """The sizes of the mesh's axes; the tensor axis, which talks most, is the innermost."""

    data: int
    pipeline: int
    tensor: int

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.data * self.pipeline * self.tensor

    def place(self, rank: int) -> Place:
        """Where `rank` stands: rank = (data * pipeline size + stage) * tensor size + tensor."""
        replica, tensor = divmod(rank, self.tensor)
        return Place(*divmod(replica, self.pipeline), tensor)

    def rank(self, place: Place) -> int:
        """The inverse of `place`."""
        return (place.data * self.pipeline + place.stage) * self.tensor + place.tensor

    def members(self, group: Group, place: Place) -> Sequence[int]:
        """The ranks that take part in a message of the rank at a place, in ascending order."""
        if isinstance(group, tuple):
            return [self.rank(replace(place, stage=stage)) for stage in group]
        replica = self.pipeline * self.tensor
        first, count, apart = {
            "data": (replace(place, data=0), self.data, replica),
            "pipeline": (replace(place, stage=0), self.pipeline, self.tensor),
            "tensor": (replace(place, tensor=0), self.tensor, 1),
            "replica": (Place(place.data, 0, 0), replica, 1),
            "world": (Place(0, 0, 0), self.size, 1),
        }[group]
        start = self.rank(first)
        return range(start, start + count * apart, apart)

    def overrides(self) -> list[str]:
        """The configuration of this mesh, as `KEY.SUB=VALUE`."""
        return [f"mesh.{axis}={size}" for axis, size in asdict(self).items()]

    def __str__(self) -> str:
        return f"{self.data}x{self.pipeline}x{self.tensor}"


def parse_axes(text: str) -> Axes:
    """`2x1x4`: data x pipeline x tensor.

    Raises:
        UserError: it is not three positive numbers.
    """
    sizes = [int(size) for size in text.split("x")] if re.fullmatch(r"\d+x\d+x\d+", text) else [0]
    if min(sizes) < 1:
        raise UserError(f"mesh {text!r}: write data x pipeline x tensor, for example 2x1x4")
    return Axes(*sizes)


def least_axes(config: MeshConfig) -> Axes:
    """The mesh of a configuration; one replica where it leaves their number open."""
    return Axes(config.data or 1, config.pipeline, config.tensor)


def axes_of(config: MeshConfig, processes: int) -> Axes:
    """The mesh that a configuration asks for, on so many processes.

    Raises:
        UserError: it needs another number of processes.
    """
    replica = config.pipeline * config.tensor
    if config.data is not None:
        axes = Axes(config.data, config.pipeline, config.tensor)
        if axes.size != processes:
            raise UserError(
                f"mesh.data {axes.data} x mesh.pipeline {axes.pipeline} x mesh.tensor "
                f"{axes.tensor} needs {axes.size} processes, and there are {processes}"
            )
        return axes
    if processes % replica:
        raise UserError(
            f"{processes} processes cannot be shared out over mesh.pipeline {config.pipeline} x "
            f"mesh.tensor {config.tensor}; start a multiple of {replica}"
        )
    return Axes(processes // replica, config.pipeline, config.tensor)
