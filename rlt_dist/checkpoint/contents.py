"""What a checkpoint holds, as tensors with global names.

Names are `model.NAME`, `optimizer.MOMENT.NAME`, `state.NAME` and `cursors`. State and cursors are
cut by lanes, so they are written as DTensors over the mesh's data axis: any number of processes
that divides the lanes loads what any other saved.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rlt_dist.mesh.mesh import Mesh
from rlt_dist.models.state import State


@dataclass(frozen=True)
class Contents:
    """Everything that lasts beyond a step.

    Attributes:
        model: parameters by global name.
        optimizer: the optimizer's tensors by global name.
        state: this process's lanes, each tensor [b, ...].
        cursors: int64 [b, 4], this process's lanes' positions in the data.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: State
    cursors: Tensor

    def to_global(self, mesh: Mesh) -> dict[str, Tensor]:
        """One flat mapping of global names to tensors; those cut by lanes become DTensors.

        Tensors without elements (a memory that is still empty) are left out.
        """
        by_lane = {f"state.{name}": tensor for name, tensor in self.state.items()}
        by_lane["cursors"] = self.cursors
        flat = {f"model.{name}": tensor.detach() for name, tensor in self.model.items()}
        flat |= {f"optimizer.{name}": tensor for name, tensor in self.optimizer.items()}
        flat |= {
            name: _by_lane(tensor.contiguous(), mesh)
            for name, tensor in by_lane.items()
            if tensor.numel()
        }
        return flat


def from_global(flat: Mapping[str, Tensor], empty: State) -> Contents:
    """The inverse of `to_global`; state that is not in `flat` is as in `empty`."""

    def part(prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): tensor.to_local() if isinstance(tensor, DTensor) else tensor
            for name, tensor in flat.items()
            if name.startswith(prefix)
        }

    cursors = part("cursors")[""]
    return Contents(part("model."), part("optimizer."), empty | part("state."), cursors)


def blank(name: str, shape: torch.Size, dtype: torch.dtype, mesh: Mesh) -> Tensor:
    """A tensor to load into: whole, or this process's lanes of it."""
    device = mesh.world.device
    if not name.startswith("state.") and name != "cursors":
        return torch.empty(shape, dtype=dtype, device=device)
    local = (shape[0] // mesh.axes.data, *shape[1:])
    return _by_lane(torch.empty(local, dtype=dtype, device=device), mesh)


def _by_lane(local: Tensor, mesh: Mesh) -> DTensor:
    return DTensor.from_local(local, mesh.devices["data"], [Shard(0)], run_check=False)
