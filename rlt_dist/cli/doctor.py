"""`rlt-dist doctor`: what is installed, what is missing, what it means."""

import importlib.metadata
import os
import platform
import re
import shutil
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rich.table import Table

_OPTIONAL = {
    "megatron-core": "optional: mesh.tensor above 1",
    "deepspeed": "optional: optimizer.engine: deepspeed",
    "triton": "optional: kernels for a GPU",
    "mpi4py": "optional: data prepare over several machines",
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
    needed = _needed()
    missing = [name for name in needed if _version(name) is None]
    for name in needed:
        table.add_row(name, _version(name) or "missing", "" if _version(name) else "needed")
    for name, meaning in _OPTIONAL.items():
        table.add_row(name, _version(name) or "-", meaning)
    slurm = shutil.which("sbatch")
    table.add_row("sbatch", "yes" if slurm else "-", "" if slurm else "no Slurm jobs from here")
    Console().print(table)
    if _version("torch") is not None:
        Console().print(_operations())
    if missing:
        typer.echo(f"needed and missing: {', '.join(missing)}; run `make setup`")
        raise typer.Exit(1)


def _operations() -> "Table":
    """Which implementation of each operation is used here by a configuration that says auto."""
    import torch
    from rich.markup import escape
    from rich.table import Table

    from rlt_dist.ops.choice import VARIABLE, asked, triton_trouble

    wish, device = asked(), "cuda" if torch.cuda.is_available() else "cpu"
    # Else triton would be imported to no purpose.
    at_stake = wish == "triton" or device == "cuda"
    trouble = triton_trouble(device, torch.bfloat16) if at_stake else None
    wished = f"{VARIABLE} asks for it"
    if wish == "triton":
        loop = others = ("-", trouble) if trouble else ("triton", wished)
    elif wish is not None:
        loop, others = (wish, wished), ("torch", wished)
    elif device == "cpu":
        loop, others = _loop_on_cpu(), ("torch", "no GPU here")
    elif trouble is not None:
        loop, others = ("python", trouble), ("torch", trouble)
    else:
        loop = others = ("triton", "a GPU is here; torch in float32: the kernels are for bfloat16")
    table = Table("operation", "computed by", "why")
    table.add_row("recurrence", *map(escape, loop))
    for name in ("attention", "relative attention", "cross entropy"):
        table.add_row(name, *map(escape, others))
    return table


def _loop_on_cpu() -> tuple[str, str]:
    from rlt_dist.ops.recurrence.native.build import compiler
    from rlt_dist.util.errors import UserError

    try:
        return "native", f"no GPU here; {compiler()[0]} compiles it at first use"
    except UserError as error:
        return "python", str(error)


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
