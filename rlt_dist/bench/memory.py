"""The most memory that a step takes above its inputs, measured in a process of its own."""

import ctypes
import gc
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import active_children, get_context

import torch

from rlt_dist.bench.timing import Step
from rlt_dist.util.memory import forget_peak, peak_resident

_M_MMAP_THRESHOLD, _MMAP_BYTES = -3, 64 << 10
"""mallopt(3): blocks from this size on are mapped alone, so that freeing one gives it back."""


def peak_above_inputs(build: Callable[[], Step], threads: int, segments: int) -> int | None:
    """Bytes at the peak of `segments` consecutive runs of a step, above what its inputs take.

    A new process builds the step (`build` is pickled) and runs it once, which loads code and makes
    the libraries' workspaces. It builds the step afresh, so that no gradient exists, returns what
    is free to the system, and takes what is resident then as the inputs. The peak is the kernel's
    own (VmHWM), so nothing between two looks is missed; it is exact to some hundred KiB, for the
    kernel counts pages in batches.

    Returns:
        None where the kernel lets no process reset its peak.
    """
    others = set(active_children())
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        try:
            return pool.submit(_measure, build, threads, segments).result()
        except BaseException:
            # An interrupt may reach this process alone, and the block's end waits for the other.
            for child in set(active_children()) - others:
                child.kill()
            raise


def _measure(build: Callable[[], Step], threads: int, segments: int) -> int | None:
    torch.set_num_threads(threads)
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        # Else the allocator raises this threshold as blocks are freed, and keeps what lies below.
        libc.mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
    build()()
    step = build()
    gc.collect()
    if hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
    if not forget_peak():
        return None
    inputs = peak_resident()
    for _ in range(segments):
        step()
    return peak_resident() - inputs
