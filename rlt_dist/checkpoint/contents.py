"""What a checkpoint holds, as tensors with global names.

Names are `model.NAME`, `optimizer.MOMENT.NAME`, `optimizer.updates`, `state.NAME` and `cursors`.
Each is whole in the file, whatever mesh wrote it: weights are cut over the tensor axis as the
model's plan says, moments by rows over the data axis as well, state and cursors by lanes over the
data axis, cached keys and values also by heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlt_dist.checkpoint.pieces import Pieces, Ranges, clip, local_shape, pieces
from rlt_dist.data.stream.loader import lanes_of_rank
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.models.state import State
from rlt_dist.parallel.local import LocalModel
from rlt_dist.parallel.plan.cut import Cut, own
from rlt_dist.parallel.plan.layout import Layout


@dataclass(frozen=True)
class Contents:
    """Everything that lasts beyond a step, as one process has it.

    Attributes:
        model: its parts of its parameters, by global name.
        optimizer: what its engine remembers (`parallel.engine.engine.Engine.tensors`).
        state: its lanes of the state of its layers, each tensor [b, ...].
        cursors: int64 [b, corpora, 4], its lanes' positions in the data.
    """

    model: dict[str, Tensor]
    optimizer: dict[str, Tensor]
    state: State
    cursors: Tensor

    def pieces(self, local: LocalModel, mesh: Mesh) -> dict[str, Pieces]:
        """The tensors by their names in a checkpoint, and where in the whole ones they lie.

        Tensors without elements (a memory that is still empty) are left out.
        """
        every = dict(self._pieces(local, mesh))
        return {name: of for name, of in every.items() if of.whole.numel()}

    def _pieces(self, local: LocalModel, mesh: Mesh) -> Iterator[tuple[str, Pieces]]:
        for name, tensor in self.model.items():
            layout = local.layouts[name]
            cuts = _by_tensor(layout.cut, mesh)
            yield f"model.{name}", pieces(tensor.detach(), layout.whole, cuts)
        for name, tensor in self.optimizer.items():
            _, _, parameter = name.partition(".")
            if not parameter:
                yield f"optimizer.{name}", pieces(tensor, tensor.shape, {})
                continue
            layout = local.layouts[parameter]
            yield f"optimizer.{name}", pieces(tensor, layout.whole, _by_rows(layout, mesh))
        for name, tensor in self.state.items():
            yield f"state.{name}", _lanes(tensor, local.plan.state_cut(name), mesh)
        yield "cursors", _lanes(self.cursors, None, mesh)


def empty_like_stored(stored: torch.Size, like: Tensor, cut: Cut | None, mesh: Mesh) -> Tensor:
    """Memory for a process's part of a tensor of the state whose whole a checkpoint holds."""
    return like.new_empty(local_shape(stored, _by_lanes(stored[0], cut, mesh)))


def _lanes(tensor: Tensor, cut: Cut | None, mesh: Mesh) -> Pieces:
    whole = [len(tensor) * mesh.axes.data, *tensor.shape[1:]]
    if cut is not None:
        whole[cut.dim] = sum(cut.segments)
    return pieces(tensor, whole, _by_lanes(whole[0], cut, mesh))


def _by_lanes(lanes: int, cut: Cut | None, mesh: Mesh) -> dict[int, Ranges]:
    own_lanes = lanes_of_rank(lanes, mesh.place.data, mesh.axes.data)
    return {0: [own_lanes]} | _by_tensor(cut, mesh)


def _by_tensor(cut: Cut | None, mesh: Mesh) -> dict[int, Ranges]:
    if cut is None:
        return {}
    return {cut.dim: list(cut.ranges(mesh.place.tensor, mesh.axes.tensor))}


def _by_rows(layout: Layout, mesh: Mesh) -> dict[int, Ranges]:
    """The rows of its part of a parameter that a process updates (`parallel.engine.rows`)."""
    cuts = _by_tensor(layout.cut, mesh)
    part = cuts.get(0, [range(layout.whole[0])])
    return cuts | {0: clip(part, own(sum(map(len, part)), mesh.place.data, mesh.axes.data))}
