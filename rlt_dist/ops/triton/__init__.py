"""What eager torch does badly on a GPU, as Triton kernels: one file a kernel, forward and backward.

Nothing outside imports this folder before a kernel is to run: without triton all else works.

A kernel's file has thin torch wrappers, which allocate outputs and launch, and `builds(shapes)`,
which gives what `build.py` compiles ahead of time at a configuration's shapes, with the very block
sizes that the wrappers choose. `bench/kernels` checks and times the wrappers.
"""

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType


def kernel_files() -> Iterator[ModuleType]:
    """The files of this folder that have kernels, by name.

    Raises:
        ModuleNotFoundError: triton is not installed.
    """
    for found in iter_modules(__path__, f"{__name__}."):
        module = import_module(found.name)
        if hasattr(module, "builds"):
            yield module
