"""`rlt-dist doctor`: what is installed, what is missing, what it means."""

import importlib.metadata
import os
import platform
import shutil

import typer

_NEEDED = ("torch", "numpy", "sentencepiece", "webdataset", "pydantic", "tensorboard")
_OPTIONAL = {
    "megatron-core": "tensor parallelism; install the extra `megatron`",
    "deepspeed": "ZeRO engine; install the extra `deepspeed`",
    "triton": "GPU kernels; install the extra `triton`",
    "mpi4py": "starting ranks with MPI; install the extra `mpi`",
}
_PROGRAMS = {
    "sbatch": "submitting Slurm jobs",
    "mpirun": "starting ranks with MPI",
}


def doctor() -> None:
    """Say what this machine has, what is missing, and what that means.

    Exits with 1 where something that is needed is missing.

    Example: `rlt-dist doctor`
    """
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "found", "meaning")
    cores = len(os.sched_getaffinity(0))
    table.add_row("Python", platform.python_version(), "")
    table.add_row("cores", str(cores), "processes on this machine share them")
    table.add_row("GPU", *_gpu())
    missing = [name for name in _NEEDED if _version(name) is None]
    for name in _NEEDED:
        table.add_row(name, _version(name) or "missing", "" if _version(name) else "needed")
    for name, meaning in _OPTIONAL.items():
        table.add_row(
            name, _version(name) or "-", "" if _version(name) else f"without it no {meaning}"
        )
    for program, meaning in _PROGRAMS.items():
        found = shutil.which(program)
        table.add_row(program, "yes" if found else "-", "" if found else f"without it no {meaning}")
    Console().print(table)
    if missing:
        typer.echo(f"needed and missing: {', '.join(missing)}; run `make setup`")
        raise typer.Exit(1)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gpu() -> tuple[str, str]:
    if _version("torch") is None:
        return "?", "unknown without torch"
    import torch

    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0), f"{torch.cuda.device_count()} on this machine; nccl"
    return "-", "everything runs on the CPU, processes talk over gloo"
