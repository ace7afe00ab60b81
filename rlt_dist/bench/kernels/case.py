"""One thing that kernels do: made-up inputs, what comes out, and the time that none can beat."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rlt_dist.ops.triton.shapes import Shapes

BYTES_A_SECOND = 4.8e12
"""An H200's memory."""
OPERATIONS_A_SECOND = 790e12
"""An H200's dense products in bfloat16 as they are reached; a multiply and an add are two."""

_ALLOWED = {"fp32": 1e-4, "bf16": 1e-2}
"""Error that any result may have, relative to its largest number: a few roundings."""
_OF_PLAIN = 2
"""How many times plain torch's own error, in the same type, a result may have besides."""

Compute = Callable[..., Sequence[Tensor]]


@dataclass(frozen=True)
class Floor:
    """Bytes that must be moved and operations that must be done, inputs read once."""

    bytes: float
    operations: float = 0.0

    @property
    def microseconds(self) -> float:
        """On an H200."""
        return 1e6 * max(self.bytes / BYTES_A_SECOND, self.operations / OPERATIONS_A_SECOND)


class Made(NamedTuple):
    """Attributes:
    inputs: what may be in float64 as well.
    kernel: all that is to be right, outputs or gradients, computed by kernels.
    plain: the same by plain torch; in float64 where its inputs are.
    """

    inputs: Sequence[Tensor]
    kernel: Compute
    plain: Compute


@dataclass(frozen=True)
class Case:
    """Attributes:
    name: what is done, and in which direction.
    floor: of one call.
    make: called under the device that all is to be on.
    graph: the kernel is launched from a CUDA graph, as the loop does; plain torch is not.
    """

    name: str
    floor: Floor
    make: Callable[[], Made]
    graph: bool = False


@dataclass(frozen=True)
class Checked:
    """Attributes:
    error: the worst result's against float64, relative to its largest number.
    tolerance: what it may be: in many steps of bfloat16 plain torch goes far from float64 too.
    kernel, plain: microseconds of a call; None: not timed.
    """

    case: Case
    error: float
    tolerance: float
    kernel: float | None = None
    plain: float | None = None

    @property
    def right(self) -> bool:
        return self.error <= self.tolerance  # not for NaN


def check(case: Case, shapes: Shapes, device: torch.device, timed: bool) -> Checked:
    """Hold kernels to float64 on a device, and time them where it is a GPU."""
    torch.manual_seed(0)
    with device:
        made = case.make()
        found, plain = made.kernel(*made.inputs), made.plain(*made.inputs)
        expected = made.plain(*(x.double() for x in made.inputs))
    results = [
        (_error(a, c), max(_ALLOWED[shapes.dtype], _OF_PLAIN * _error(b, c)))
        for a, b, c in zip(found, plain, expected, strict=True)
    ]
    checked = Checked(case, *max(results, key=_excess))
    if not timed:
        return checked
    del found, plain, expected
    kernel = _microseconds(made.kernel, made.inputs, case.graph)
    eager = _microseconds(made.plain, made.inputs, graph=False)
    return replace(checked, kernel=kernel, plain=eager)


def with_gradients(compute: Callable[..., Tensor]) -> Compute:
    """Its output, and the gradients of its inputs for a gradient that is the same at every call."""

    def run(*inputs: Tensor) -> Sequence[Tensor]:
        leaves = [x.detach().requires_grad_() for x in inputs]
        output = compute(*leaves)
        angle = torch.arange(output.numel(), device=output.device, dtype=torch.float32)
        gradient = torch.sin(angle).view(output.shape).to(output.dtype)
        return output.detach(), *torch.autograd.grad(output, leaves, gradient)

    return run


def _excess(result: tuple[float, float]) -> float:
    """Of an error over its tolerance; without end where one of them is no number."""
    error, tolerance = result
    return error / tolerance if error <= tolerance or error > tolerance else float("inf")


def _error(found: Tensor, expected: Tensor) -> float:
    """NaN where one of them holds NaN."""
    most = expected.abs().max().clamp(min=1e-30)
    return ((found.double() - expected).abs().max() / most).item()


def _microseconds(compute: Compute, inputs: Sequence[Tensor], graph: bool) -> float:
    """Median of calls that find the cache empty; from a graph the mean, with the cache as it is."""
    from triton import testing

    if graph:
        return 1e3 * testing.do_bench_cudagraph(lambda: compute(*inputs))
    return 1e3 * testing.do_bench(lambda: compute(*inputs), return_mode="median")
