"""How large the carried state is, layer by layer."""

import math

import torch
import torch.distributed as dist

from rlt_dist.mesh.collectives import all_sum
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.models.state import State, mean_squares


class StateNorms:
    """Root mean square of every layer's state tensors over all lanes, wherever their parts are."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._names: list[str] | None = None

    def measure(self, state: State) -> dict[str, float]:
        """By global name, alike on all ranks, from each rank's part; one sum over the world.

        Tensors without elements, such as a memory that is still empty, are left out.
        """
        if self._names is None:
            self._names = self._every_name(state)
        own = mean_squares(state)
        parts = torch.zeros(
            2, len(self._names), dtype=torch.float64, device=self._mesh.world.device
        )
        for at, name in enumerate(self._names):
            if name in own:
                parts[0, at], parts[1, at] = own[name].mean(), 1
        squares, holders = all_sum(parts, self._mesh.everyone).tolist()
        # All who hold some of a tensor hold as much of it, so its mean is that of theirs.
        return {
            name: math.sqrt(square / held)
            for name, square, held in zip(self._names, squares, holders, strict=True)
            if held
        }

    def _every_name(self, state: State) -> list[str]:
        """The names of all ranks' tensors, in the same order everywhere."""
        own = [name for name, tensor in state.items() if tensor.is_floating_point()]
        of_all: list[list[str]] = [[]] * self._mesh.world.size
        dist.all_gather_object(of_all, own, group=self._mesh.world.group)
        return list(dict.fromkeys(name for names in of_all for name in names))
