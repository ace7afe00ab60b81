"""The seam of weights that are cut over the tensor axis, on megatron-core's mappings."""

import warnings
from collections.abc import Callable
from functools import lru_cache
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import Node

from rlt_dist.mesh.mesh import Mesh
from rlt_dist.ops.seam import WHOLE, Seam
from rlt_dist.parallel.plan.cut import own
from rlt_dist.util.errors import UserError

Joint = Callable[..., Tensor]


class TensorSeam(Seam):
    """Joins what the processes of a tensor group found."""

    def __init__(self, mesh: Mesh) -> None:
        """Raises UserError where megatron-core is not installed."""
        self._line, self._rank, self._ranks = mesh.tensor, mesh.place.tensor, mesh.axes.tensor
        self._copy, self._reduce = _mappings()

    def own(self, size: int) -> range:
        return own(size, self._rank, self._ranks)

    def enter(self, x: Tensor) -> Tensor:
        entered = self._copy(x, group=self._line.group)
        if entered.requires_grad:
            # megatron-core hands back a gradient that is not contiguous as it came, not summed.
            entered.register_hook(_contiguous)
            assert entered.grad_fn is not None
            self._count_backward(entered.grad_fn)
        return entered

    def leave(self, x: Tensor) -> Tensor:
        # It sums in place; without autograd nothing else would stop it from writing to x itself.
        own = x.contiguous() if torch.is_grad_enabled() else x.clone()
        began = perf_counter()
        summed = self._reduce(own, group=self._line.group)
        self._line.note(own.nbytes, began)
        return summed

    def total(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.SUM)

    def largest(self, x: Tensor) -> Tensor:
        return self._reduced(x, dist.ReduceOp.MAX)

    def _reduced(self, x: Tensor, operation: dist.ReduceOp.RedOpType) -> Tensor:
        reduced = x.detach().clone(memory_format=torch.contiguous_format)
        self._line.all_reduce(reduced, operation)
        return reduced

    def _count_backward(self, node: Node) -> None:
        """Count the sum that a node's backward takes."""
        began = 0.0

        def begin(_: object) -> None:
            nonlocal began
            began = perf_counter()

        def end(_: object, given: tuple[Tensor, ...]) -> None:
            self._line.note(given[0].nbytes, began)

        node.register_prehook(begin)
        node.register_hook(end)


def seam_of(mesh: Mesh) -> Seam:
    """The seam of a mesh; where its tensor axis is one process, weights are whole."""
    return WHOLE if mesh.axes.tensor == 1 else TensorSeam(mesh)


def _contiguous(gradient: Tensor) -> Tensor:
    return gradient.contiguous()


@lru_cache
def _mappings() -> tuple[Joint, Joint]:
    """Identity forward and sum backward; sum forward and identity backward."""
    try:
        with warnings.catch_warnings():
            # It says at length that it would run faster with what only a GPU has.
            warnings.simplefilter("ignore")
            from megatron.core.tensor_parallel import mappings
    except ImportError:
        raise UserError(
            "mesh.tensor above 1 needs megatron-core; pip install 'rlt_dist[megatron]'"
        ) from None
    return (
        mappings.copy_to_tensor_model_parallel_region,
        mappings.reduce_from_tensor_model_parallel_region,
    )
