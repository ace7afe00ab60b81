"""From what one process found to the whole gradient of its replica: all axes but data."""

import torch
from torch import Tensor

from rlt_dist.mesh.collectives import sum_all
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.parallel.local import LocalModel


def complete_gradients(local: LocalModel, mesh: Mesh) -> None:
    """Add up what other processes of the replica found of this one's parameters.

    Afterwards a gradient is that of the replica's lanes, alike on all holders of the parameter; one
    that no token reached is zeros. Over the tensor axis are added up those of parameters that stand
    between the seams without being cut, and of blocks that several processes hold; over the
    pipeline, those of parameters that several stages hold.
    """
    parameters = local.parameters
    for parameter in parameters.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    _over_tensor(local, parameters, mesh)
    shared: dict[tuple[int, ...], list[Tensor]] = {}
    for name, parameter in parameters.items():
        stages = local.layouts[name].stages
        if len(stages) > 1 and parameter.grad is not None:
            shared.setdefault(stages, []).append(parameter.grad)
    # All holders go through the sets in one order, so none waits for another in a circle.
    for stages in sorted(shared):
        sum_all(shared[stages], mesh.holders(stages))


def _over_tensor(local: LocalModel, parameters: dict[str, Tensor], mesh: Mesh) -> None:
    rank, ranks = local.tensor, local.tensors
    if ranks == 1:
        return
    sums, copied = [], []
    for name, parameter in parameters.items():
        layout, gradient = local.layouts[name], parameter.grad
        assert gradient is not None
        if layout.cut is None and layout.partial:
            sums.append(gradient)
        elif layout.cut is not None and layout.cut.copies(ranks) > 1:
            whole = layout.cut.spread(gradient, rank, ranks)
            copied.append((layout.cut, gradient, whole))
    sum_all([*sums, *(whole for _, _, whole in copied)], mesh.tensor)
    for cut, gradient, whole in copied:
        gradient.copy_(cut.part(whole, rank, ranks))
