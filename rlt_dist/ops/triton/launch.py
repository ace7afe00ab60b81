"""How every kernel is launched."""

from typing import Any

import torch
from torch import Tensor

OPTIONS = {"enable_fp_fusion": True}
"""Of the compiler, for all kernels: a multiply and an add are one instruction."""


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    /,
    *arguments: Any,
    warps: int = 4,
    stages: int = 2,
    **constants: Any,
) -> None:
    """Run a kernel on the device of its first tensor; under TRITON_INTERPRET=1 that may be a CPU.

    The arguments are the kernel's in order, the constants its constexpr ones by name.
    """
    here = next(argument for argument in arguments if isinstance(argument, Tensor))
    with torch.cuda.device_of(here):  # triton launches on the current device, whosever tensors
        kernel[grid](*arguments, num_warps=warps, num_stages=stages, **OPTIONS, **constants)
