"""Which implementation of an operation computes, where triton's kernels stand beside plain torch.

No choice changes a result. `RLT_DIST_OPS` overrides the configuration for a whole process. The
kernels are for bfloat16: those of float32, which no tensor core multiplies exactly, spill, and
serve for comparison; only who asks for them gets them.
"""

import os
from functools import lru_cache
from typing import Literal, get_args

import torch

from rlt_dist.util.errors import UserError

VARIABLE = "RLT_DIST_OPS"
Asked = Literal["reference", "triton", "native"]
"""reference: plain torch and plain autograd; triton: kernels for a GPU; native: the recurrence as
compiled for the CPU, and plain torch for all else."""

_TYPES = (torch.float32, torch.bfloat16)

_WIDEST_HEAD = 128
"""Whose blocks fit into a chip's registers and shared memory, as tests of builds find out."""
_LONGEST_WINDOW = 64
"""Of such heads, likewise; heads of at most half the width have one twice as long."""


def asked() -> Asked | None:
    """What RLT_DIST_OPS asks for; None where it is unset or empty.

    Raises:
        UserError: it is no implementation.
    """
    wish = os.environ.get(VARIABLE, "")
    for name in get_args(Asked):
        if wish == name:
            return name
    if wish:
        raise UserError(f"{VARIABLE}: {wish!r} is none of {', '.join(get_args(Asked))}")
    return None


def asker() -> str:
    """Whose choice of an implementation holds here, for a message about it."""
    wish = asked()
    return "ops.recurrence" if wish is None else f"{VARIABLE}={wish}"


def takes_triton(device: str, dtype: torch.dtype, width: int = 0) -> bool:
    """Whether triton's kernels are to compute there: as asked for, else where they are preferred.

    Args:
        dtype: of products.
        width: of a head; 0: there are none.

    Raises:
        UserError: RLT_DIST_OPS asks for triton, and it cannot be had.
    """
    wish = asked()
    if wish != "triton":
        return wish is None and prefers_triton(device, dtype, width)
    require_triton(device, dtype, width)
    return True


def require_triton(device: str, dtype: torch.dtype, width: int = 0, window: int = 0) -> None:
    """Raise UserError where triton's kernels are asked for and cannot compute."""
    trouble = triton_trouble(device, dtype, width, window)
    if trouble is not None:
        raise UserError(f"{asker()}: {trouble}")


def prefers_triton(device: str, dtype: torch.dtype, width: int = 0, window: int = 0) -> bool:
    """Whether triton's kernels compute where nobody asks for one or another implementation."""
    wanted = device == "cuda" and dtype == torch.bfloat16
    return wanted and triton_trouble(device, dtype, width, window) is None


def triton_trouble(device: str, dtype: torch.dtype, width: int = 0, window: int = 0) -> str | None:
    """Why triton's kernels cannot compute there; None where they can.

    Args:
        width, window: as for `size_trouble`.
    """
    if not _installed():
        return "triton is not installed; pip install 'rlt_dist[triton]', or take another"
    if dtype not in _TYPES:
        said = str(dtype).removeprefix("torch.")
        return f"triton's kernels compute in float32 and bfloat16, not in {said}; take another"
    trouble = size_trouble(width, window)
    if trouble is not None:
        return f"{trouble}; take another"
    if device == "cuda" or _interpreted():
        return None
    return (
        f"triton's kernels need a GPU, and this is a {device}; take another, or set "
        "TRITON_INTERPRET=1, which interprets them, some hundred times slower"
    )


def size_trouble(width: int, window: int = 0) -> str | None:
    """Why triton's kernels have no such attention, on any device; None where they have.

    Args:
        width: of a head; 0: there are none.
        window: entries of a head's window; 0: there is none.
    """
    if width > _WIDEST_HEAD:
        return f"triton's kernels have heads of at most {_WIDEST_HEAD}, not {width}"
    longest = _LONGEST_WINDOW if width > _WIDEST_HEAD // 2 else 2 * _LONGEST_WINDOW
    if window > longest:
        most = f"at most {longest} entries for heads of {width}"
        return f"triton's kernels have windows of {most}, not {window}"
    return None


@lru_cache
def _installed() -> bool:
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def _interpreted() -> bool:
    from triton import knobs

    return bool(knobs.runtime.interpret)
