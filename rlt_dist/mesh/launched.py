"""Which rank this process is, from what its launcher says.

Slurm's and MPI's words count only where `RLT_DIST_LAUNCHER` asks for them: a shell inside an
allocation has Slurm's variables too, and a single process needs no launcher.
"""

import fcntl
import os
import re
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlt_dist.util.errors import UserError

LAUNCHER = "RLT_DIST_LAUNCHER"
"""In the environment: mpi or srun, where ranks are to find their places by these."""

THREADS = "OMP_NUM_THREADS"
"""In the environment: on how many threads a rank computes, where a person wants to say so."""

RANK_NAME = "rlt-rank-"
"""A rank's process is called so, with its number: in `top`, and for whoever has to find it."""

SERVED = "TORCHELASTIC_USE_AGENT_STORE"
"""True where the launcher serves the processes' store; otherwise rank 0 does."""

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_JOB_ID")
_FIRST_PORT, _PORTS = 15000, 16000
"""Below those that systems give out by themselves."""

_HERE = "127.0.0.1"
_SIOCGIFADDR, _IFREQ = 0x8915, 256
"""Linux: ask for an interface's address (netdevice(7)), in a structure of so many bytes."""


@dataclass(frozen=True)
class Launched:
    """A rank's place.

    Attributes:
        rank, size: among all ranks.
        local_rank, local_size: among those of this machine.
        address, port: where all ranks meet.
        served: the launcher serves the store there, and not rank 0.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    address: str = _HERE
    port: int = 0
    served: bool = False


def launched(environment: Mapping[str, str]) -> Launched:
    """This process's place; that of a world of one without a launcher.

    Raises:
        UserError: the launcher's variables are incomplete, or it is none that is known.
    """
    by = environment.get(LAUNCHER)
    if by == "mpi":
        return by_mpi(environment)
    if by == "srun":
        return by_slurm(environment, _hosts_of)
    if by is not None:
        raise UserError(f"{LAUNCHER}={by}: give mpi or srun, or leave it out")
    return by_variables(environment)


def by_variables(environment: Mapping[str, str]) -> Launched:
    """What torchrun, DeepSpeed's launcher and most others say."""
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return Launched()
    _check(environment, _VARIABLES, "though other launcher variables are; start with torchrun")
    rank, size, local_rank, port = (
        int(environment[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")
    )
    local_size = environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE", "1")
    served = environment.get(SERVED) == str(True)
    address = environment["MASTER_ADDR"]
    return Launched(rank, size, local_rank, int(local_size), address, port, served)


def by_slurm(environment: Mapping[str, str], hosts_of: Callable[[str], list[str]]) -> Launched:
    """What Slurm says to a task of a step.

    Args:
        hosts_of: the names in a list of Slurm's, such as n[1-4].
    """
    _check(environment, _SLURM, f"though {LAUNCHER}=srun; start with srun")
    rank, size, local_rank, node, job = (int(environment[name]) for name in _SLURM)
    counts = tasks_per_node(environment["SLURM_STEP_TASKS_PER_NODE"])
    step = int(environment.get("SLURM_STEP_ID", 0))
    address = environment.get("MASTER_ADDR") or hosts_of(environment["SLURM_STEP_NODELIST"])[0]
    port = int(environment.get("MASTER_PORT", 0)) or port_of(job, step)
    return Launched(rank, size, local_rank, counts[node], address, port)


def by_mpi(environment: Mapping[str, str]) -> Launched:
    """What an MPI world says, which is left again at once: rank 0 tells where all meet.

    Raises:
        UserError: mpi4py is not installed.
    """
    try:
        import mpi4py
    except ImportError:
        raise UserError("mpi4py is not installed; install the extra `mpi`") from None
    mpi4py.rc.initialize = False
    from mpi4py import MPI

    MPI.Init()
    world: Any = MPI.COMM_WORLD
    rank, hosts = world.Get_rank(), world.allgather(socket.gethostname())
    address = environment.get("MASTER_ADDR") or (_HERE if len(set(hosts)) == 1 else hosts[0])
    port = int(environment.get("MASTER_PORT", 0)) or free_port()
    address, port = world.bcast((address, port))
    MPI.Finalize()
    local_rank, local_size = hosts[:rank].count(hosts[rank]), hosts.count(hosts[rank])
    return Launched(rank, len(hosts), local_rank, local_size, address, port)


def share_of(ranks: int) -> int:
    """Threads of each of so many ranks that share this machine's cores."""
    return max(1, len(os.sched_getaffinity(0)) // ranks)


def name_process(rank: int) -> None:
    """Call this process after its rank."""
    with suppress(OSError):
        Path("/proc/self/comm").write_text(f"{RANK_NAME}{rank}")


def address_towards(host: str, port: int) -> str:
    """This machine's address on the way to another one; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])


def interface_of(address: str) -> str | None:
    """The network interface that has an IPv4 address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # It has none.
                asked = name.encode().ljust(_IFREQ, b"\0")
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, asked)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None


def port_of(job: int, step: int) -> int:
    """A port that all tasks of a job's step know, and other steps mostly do not share."""
    return _FIRST_PORT + (job * 37 + step) % _PORTS


def tasks_per_node(counts: str) -> list[int]:
    """Slurm's short form, such as 8(x3),2 for 8, 8, 8, 2."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(tasks) for tasks, nodes in found for _ in range(int(nodes or 1))]


def _hosts_of(nodes: str) -> list[str]:
    command = ["scontrol", "show", "hostnames", nodes]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def _check(environment: Mapping[str, str], names: tuple[str, ...], otherwise: str) -> None:
    missing = [name for name in names if name not in environment]
    if missing:
        raise UserError(f"{', '.join(missing)} not set {otherwise}")


def free_port() -> int:
    """A port of this machine that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
