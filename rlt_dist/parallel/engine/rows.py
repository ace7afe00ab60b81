"""Rows of every parameter, shared out over the data axis: sums arrive cut, updates are gathered."""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from rlt_dist.mesh.mesh import Mesh
from rlt_dist.parallel.plan.cut import own


def own_rows(tensor: Tensor, rank: int, ranks: int) -> Tensor:
    """The rows of a tensor that `rank` of `ranks` has, a view: `own`'s rule over dimension 0.

    Of fewer rows than ranks the last ranks have none.
    """
    here = own(len(tensor), rank, ranks)
    return tensor[here.start : here.stop]


class Rows:
    """The rows of parameters that are this process's to update.

    Each exchange is one message. Numbers are sorted by the rank that they belong to, every
    parameter's padded to as many for each rank.

    Attributes:
        own: by name, views of the parameters, which share their memory; where the data axis is one
            process, the parameters themselves.
    """

    def __init__(self, parameters: Mapping[str, Tensor], mesh: Mesh) -> None:
        """Share out parameters, of one dtype and alike on all processes of the data axis."""
        self._line, self._ranks = mesh.data, mesh.axes.data
        self._parameters = parameters
        self.own: Mapping[str, Tensor] = parameters
        if self._ranks > 1:
            self.own = {
                name: own_rows(parameter.detach(), mesh.place.data, self._ranks)
                for name, parameter in parameters.items()
            }
        # The first rank never has fewer rows than another.
        self._widths = [own_rows(p, 0, self._ranks).numel() for p in parameters.values()]

    def reduce(self) -> None:
        """Give the own rows their gradient, summed over the data axis; the parameters' is freed.

        The sum is taken in the order of ranks: stages and tensor ranks that hold a parameter
        together, each beside others of its own, find the same bits.
        """
        if self._ranks == 1:
            return
        sent = self._flat(self._ranks)
        for parameter, slot in zip(self._parameters.values(), self._slots(sent), strict=True):
            assert parameter.grad is not None
            slot.copy_(_padded(parameter.grad, slot.numel()).view_as(slot))
            parameter.grad = None
        received = torch.empty_like(sent)
        self._line.all_to_all(received, sent)
        total = received[0] + received[1]
        for other in received[2:]:
            total += other
        for rows, slot in zip(self.own.values(), self._slots(total), strict=True):
            rows.grad = slot[: rows.numel()].view_as(rows)

    @torch.no_grad()
    def gather(self) -> None:
        """Write every rank's own rows into the parameters of all."""
        if self._ranks == 1:
            return
        sent, received = self._flat(), self._flat(self._ranks)
        for rows, slot in zip(self.own.values(), self._slots(sent), strict=True):
            slot.copy_(_padded(rows, slot.numel()))
        self._line.all_gather(received.unbind(), sent)
        for parameter, slot in zip(self._parameters.values(), self._slots(received), strict=True):
            parameter.copy_(slot.reshape(-1)[: parameter.numel()].view_as(parameter))

    def _flat(self, *ranks: int) -> Tensor:
        any_rows = next(iter(self.own.values()))
        return any_rows.new_empty(*ranks, sum(self._widths))

    def _slots(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Where in a message each parameter's numbers are."""
        return flat.split(self._widths, dim=-1)


def _padded(tensor: Tensor, size: int) -> Tensor:
    return functional.pad(tensor.flatten(), (0, size - tensor.numel()))
