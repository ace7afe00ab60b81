"""Kernels compiled ahead of time, for chips that need not be here, and what became of them.

Registers and local memory are read from the finished binary, the matrix instruction from its
assembly. Triton keeps what it compiled in its own cache (TRITON_CACHE_DIR): the second time costs
little, on the chip as here.
"""

import multiprocessing
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple

from rlt_dist.ops.triton.launch import OPTIONS
from rlt_dist.ops.triton.shapes import Shapes
from rlt_dist.util.errors import one_line


@dataclass(frozen=True)
class Build:
    """One kernel as a wrapper launches it at some shapes.

    Attributes:
        name: "memory_forward"; one file gives no two of one name.
        kernel: the function that @triton.jit decorates.
        signature: by argument its type: "*bf16", "*fp32", "*i64", "i32", "i64", "fp32"; those that
            are constexpr are left out. Pointers are multiples of 16 bytes, as torch allocates;
            "i32:16" is an integer that is a multiple of 16, as triton finds out at a launch.
        constants: by argument the constexpr ones, and integers that are 1: block sizes, widths.
        warps, stages: as it is launched.
        product: it multiplies matrices, so that matrix instructions are expected.
        amd: the same as it is launched on AMD's chips; None: no differently.
    """

    name: str
    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int = 4
    stages: int = 2
    product: bool = False
    amd: "Build | None" = None


class Chip(NamedTuple):
    """What a kernel is compiled for.

    Attributes:
        backend, arch, lanes: triton's name for it; lanes is the threads of a warp.
        shared: bytes of shared memory that one block may have.
        products: its matrix instructions as they begin in assembly, the fastest first.
    """

    backend: str
    arch: int | str
    lanes: int
    shared: int
    products: tuple[str, ...]


CHIPS = {
    "sm_80": Chip("cuda", 80, 32, 163 << 10, ("mma.sync",)),
    "sm_90": Chip("cuda", 90, 32, 227 << 10, ("wgmma", "mma.sync")),
    "sm_100": Chip("cuda", 100, 32, 227 << 10, ("tcgen05.mma", "mma.sync")),
    "gfx942": Chip("hip", "gfx942", 64, 64 << 10, ("v_mfma",)),
}
"""By the name of a target: A100, H100 and H200, B200, MI300."""


@dataclass(frozen=True)
class Built:
    """What became of a Build.

    Attributes:
        name, target: which kernel, for which chip.
        registers: of a thread; AMD's accumulator registers are counted.
        spilled: bytes of a thread that did not fit into registers and lie in memory.
        shared: bytes of shared memory that a block takes.
        instruction: the matrix instruction used; None: none.
        seconds: that it took to compile, or to find in the cache.
        trouble: what makes it unfit, one line each.
    """

    name: str
    target: str
    registers: int = 0
    spilled: int = 0
    shared: int = 0
    instruction: str | None = None
    seconds: float = 0.0
    trouble: tuple[str, ...] = ()


def build_all(
    files: Sequence[str], shapes: Shapes, targets: Sequence[str], workers: int = 1
) -> Iterator[Built]:
    """Compile every kernel of some files for every target, in processes of their own.

    Args:
        files: modules that have `builds`, by their full names.
        targets: of CHIPS.

    A process of its own has kernels that can be compiled even where this one's are interpreted
    (TRITON_INTERPRET=1), which is settled when a kernel's file is imported.
    """
    names = [(file, build.name) for file in files for build in import_module(file).builds(shapes)]
    wanted = [(*name, shapes, target) for target in targets for name in names]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, spawn, initializer=_compile_for_real) as pool:
        yield from pool.map(_build_named, wanted)


def _compile_for_real() -> None:
    os.environ.pop("TRITON_INTERPRET", None)


def _build_named(wanted: tuple[str, str, Shapes, str]) -> Built:
    file, name, shapes, target = wanted
    found = next(build for build in import_module(file).builds(shapes) if build.name == name)
    return compile_for(found, target)


def compile_for(build: Build, target: str) -> Built:
    """Compile one kernel, in this process, and read its binary."""
    chip, start = CHIPS[target], time.perf_counter()
    if chip.backend == "hip" and build.amd is not None:
        build = build.amd
    try:
        compiled = _compile(build, chip)
    except Exception as error:  # the compiler's are of many kinds, and each is the kernel's mistake
        said = one_line(error) or f"{type(error).__name__}: {str(error).strip()}"
        return Built(build.name, target, trouble=(f"does not compile: {said.splitlines()[0]}",))
    seconds = time.perf_counter() - start
    registers, spilled = _amd(compiled) if chip.backend == "hip" else _nvidia(compiled)
    assembly = compiled.asm["amdgcn" if chip.backend == "hip" else "ptx"]
    instruction = next((word for word in chip.products if word in assembly), None)
    shared = compiled.metadata.shared
    trouble = []
    if spilled:
        trouble.append(f"{spilled} bytes a thread do not fit into registers")
    if shared > chip.shared:
        trouble.append(f"{shared} bytes of shared memory, of {chip.shared}")
    if build.product and instruction is None:
        trouble.append("a product without matrix instructions")
    facts = (registers, spilled, shared, instruction, seconds, tuple(trouble))
    return Built(build.name, target, *facts)


def _compile(build: Build, chip: Chip) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    arguments = build.kernel.arg_names
    types = {name: build.signature.get(name, "constexpr") for name in arguments}
    aligned = [
        (place,)
        for place, name in enumerate(arguments)
        if types[name].startswith("*") or types[name].endswith(":16")
    ]
    source = ASTSource(
        build.kernel,
        {name: kind.removesuffix(":16") for name, kind in types.items()},
        dict(build.constants),
        {place: [["tt.divisibility", 16]] for place in aligned},
    )
    target = GPUTarget(chip.backend, chip.arch, chip.lanes)
    options = {"num_warps": build.warps, "num_stages": build.stages, **OPTIONS}
    return triton.compile(source, target=target, options=options)


def _nvidia(compiled: Any) -> tuple[int, int]:
    """Registers and spilled bytes of a thread: what is spilled lies on its stack."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(compiled.kernel)
        binary.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", binary.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return _number(r"\bREG:(\d+)", said), _number(r"\bSTACK:(\d+)", said)


def _amd(compiled: Any) -> tuple[int, int]:
    """Registers and spilled bytes of a thread, from the assembly's metadata."""
    said = compiled.asm["amdgcn"]
    # On gfx942 the count of vector registers has the accumulators in it.
    return _number(r"\.vgpr_count: +(\d+)", said), _number(
        r"^ *\.private_segment_fixed_size: +(\d+)", said
    )


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text, re.MULTILINE)
    if found is None:
        raise ValueError(f"no {pattern} in what the compiler's tools said")
    return int(found[1])
