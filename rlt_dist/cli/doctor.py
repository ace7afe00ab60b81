"""`rlt-dist doctor`: what is installed, what is missing, what it means."""

import importlib.metadata
import os
import platform
import re
import shutil

import typer

_OPTIONAL = ("megatron-core", "deepspeed", "triton", "mpi4py")


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
    needed = _needed()
    missing = [name for name in needed if _version(name) is None]
    for name in needed:
        table.add_row(name, _version(name) or "missing", "" if _version(name) else "needed")
    for name in _OPTIONAL:
        table.add_row(name, _version(name) or "-", "optional; nothing uses it yet")
    slurm = shutil.which("sbatch")
    table.add_row("sbatch", "yes" if slurm else "-", "" if slurm else "no Slurm jobs from here")
    Console().print(table)
    if missing:
        typer.echo(f"needed and missing: {', '.join(missing)}; run `make setup`")
        raise typer.Exit(1)


def _needed() -> list[str]:
    """What this package requires, extras left out."""
    required = importlib.metadata.requires("rlt-dist") or []
    return [re.split(r"[^\w.-]", line)[0] for line in required if "extra ==" not in line]


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
