"""The command line and environment of every launcher that can start a run's ranks.

Pure functions; `jobs.ranks` runs what they return. Every rank is `python PROGRAM`, where PROGRAM is
the interpreter's arguments, such as ("-m", "rlt_dist", "train", "run.yaml"). The ranks find their
places by `mesh.launched`.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rlt_dist.mesh.launched import LAUNCHER, THREADS, share_of

SHUTDOWN = 30
"""Seconds in which ranks may end after torchrun's agent has asked them to; its own default."""

_PYTHON = sys.executable
_TORCHRUN = (_PYTHON, "-m", "torch.distributed.run")
# Ranks end by themselves when one fails, each with its own word; so launchers are to leave them be.
_SRUN = ("srun", "--kill-on-bad-exit=0", f"--wait={2 * SHUTDOWN}")
_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
"""What torchrun's agent passes on, where somebody sends it to the agent and not to `jobs.ranks`."""

# An agent's own store would still hold what the ranks wrote there before they were started again.
_NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

# Slurm sends a job's signals to all processes of it. The ranks hear them; an agent that did so too
# would give the ranks no longer than `shutdown`.
# nproc, like `share_of`, counts the cores that are this process's.
_AGENT = (
    'places=({}); trap "" USR1; export PET_NPROC_PER_NODE=${{places[SLURM_NODEID]}}; '
    "share=$(($(nproc) / PET_NPROC_PER_NODE)); "
    'export OMP_NUM_THREADS=${{OMP_NUM_THREADS:-$((share > 1 ? share : 1))}}; exec "$@"'
)


# MPICH kills all ranks at once when one is ended by a signal, before they can say whom they miss.
_APART = ("sh", "-c", 'trap "" HUP INT TERM USR1; "$@"; exit $?', "rank")
"""Starts a rank whose end, whatever it is, looks to mpirun like that of a program that returns."""
# MPI only tells the ranks where they are: TCP, no shared memory that a killed one would leave. Not
# over UCX, whose addresses now and then make a request of over the 1024 bytes that Slurm's pmi2
# reads at once: the step then hangs.
_MPI = {
    LAUNCHER: "mpi",
    "MPIR_CVAR_CH4_NETMOD": "ofi",
    "FI_PROVIDER": "tcp",
    "MPIR_CVAR_NOLOCAL": "1",
}


@dataclass(frozen=True)
class Launch:
    """What is to be run.

    Attributes:
        environment: beside what is there already.
        ranks: of this machine; None: it is not known here.
    """

    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    ranks: int | None = None

    def environment_in(self, outer: Mapping[str, str]) -> dict[str, str]:
        """All of the launcher's environment, in that of this process.

        The ranks of a machine share its cores, as they do by themselves (`mesh.world`); torchrun
        would allow each one thread.
        """
        share = {} if self.ranks is None else {THREADS: str(share_of(self.ranks))}
        return {**share, **outer, **self.environment}


def torchrun(
    program: Sequence[str],
    processes: int,
    *,
    nodes: int = 1,
    meeting: str | None = None,
    address: str | None = None,
    serves: bool = False,
    restarts: int = 0,
    shutdown: int = SHUTDOWN,
) -> Launch:
    """One agent, which starts the ranks of this machine.

    Args:
        processes: ranks of this machine.
        nodes: agents in all; each is started on its machine, with as many ranks as it likes.
        meeting: HOST:PORT on one of the machines, the same for all agents; needed for several.
        address: under which the other machines reach this one.
        serves: the meeting is on this machine, which torchrun knows only by the machine's own name.
        restarts: how often all ranks are started again after one has failed.
        shutdown: seconds in which ranks may end after the agent has asked them to.
    """
    where = ["--standalone"]
    if meeting is not None:
        where = [f"--nnodes={nodes}", "--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}"]
        where += [f"--local-addr={address}"] if address else []
        where += ["--rdzv-conf=is_host=1"] if serves else []
    options = [*where, f"--nproc-per-node={processes}", f"--signals-to-handle={_SIGNALS}"]
    command = (*_TORCHRUN, *options, *_patience(restarts, shutdown), *program)
    return Launch(command, _NEW_STORE, processes)


def torchrun_on_nodes(
    program: Sequence[str],
    places: Sequence[int],
    *,
    meeting: str,
    name: str,
    step: Sequence[str] = (),
    restarts: int = 0,
    shutdown: int = SHUTDOWN,
) -> Launch:
    """One agent on each of a Slurm job's nodes, started by srun.

    Args:
        places: ranks of each node, in the order of the step's nodes; all at least 1.
        meeting: HOST:PORT on one of the nodes.
        name: of this start among all that meet there, such as the job's id with its restarts.
        step: further options of srun, such as which nodes.
        restarts, shutdown: as in `torchrun`.
    """
    count = len(places)
    tasks = (*_SRUN, f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1", *step)
    agent = ("bash", "-c", _AGENT.format(" ".join(map(str, places))), "agent", *_TORCHRUN)
    where = (f"--nnodes={count}", "--rdzv-backend=c10d", f"--rdzv-endpoint={meeting}")
    options = (*where, f"--rdzv-id={name}", *_patience(restarts, shutdown))
    return Launch((*tasks, *agent, *options, *program), _NEW_STORE)


def mpirun(program: Sequence[str], processes: int, hosts: Path | None = None) -> Launch:
    """MPICH's mpirun: as many ranks on this machine, or on those of a file with one a line."""
    where = () if hosts is None else ("-f", str(hosts))
    options = ("-disable-auto-cleanup", *where, "-n", str(processes))
    command = (_beside("mpirun"), *options, *_APART, _PYTHON, *program)
    return Launch(command, _MPI, processes if hosts is None else None)


def srun(program: Sequence[str], options: Sequence[str] = (), *, mpi: bool = False) -> Launch:
    """Slurm's own: every task of a step is a rank.

    Args:
        options: srun's, such as ("--nodes=2", "--ntasks-per-node=8").
        mpi: tasks find each other by MPI over Slurm's `pmi2`, and not by Slurm's variables.
    """
    command = (*options, _PYTHON, *program)
    if not mpi:
        return Launch((*_SRUN, *command), {LAUNCHER: "srun"})
    return Launch((*_SRUN, "--mpi=pmi2", *command), _MPI)


def deepspeed(program: Sequence[str], hosts: Path, port: int | None = None) -> Launch:
    """DeepSpeed's launcher, over ssh to the hosts of its file.

    Args:
        program: begins with -m.
        hosts: its hostfile: lines such as `node1 slots=8`.
        port: a free one, where the file names this machine alone and ssh is not needed.
    """
    _, *module = program
    here = () if port is None else ("--no_ssh_check", "--master_addr=127.0.0.1")
    options = (*here, f"--hostfile={hosts}", "--no_local_rank")
    options += () if port is None else (f"--master_port={port}",)
    return Launch((_beside("deepspeed"), *options, "--module", *module))


def _beside(name: str) -> str:
    """A program of this environment, or else of the system."""
    here = Path(_PYTHON).with_name(name)
    return str(here) if here.exists() else name


def _patience(restarts: int, shutdown: int) -> tuple[str, ...]:
    return f"--max-restarts={restarts}", f"--shutdown-timeout={shutdown}"
