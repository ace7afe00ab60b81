"""What a job asks of whoever runs it: Slurm, or nobody but this machine."""

import os
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rlt_dist.jobs import slurm
from rlt_dist.jobs.job import SUBMITTED, Start, Submitted, is_cancelled, read_record, write_record
from rlt_dist.jobs.launchers import Launch, torchrun, torchrun_on_nodes
from rlt_dist.mesh.launched import port_of
from rlt_dist.util.signals import Signals

LOCAL = "local"
"""The id of a job without a batch system."""
_CANCELLED = "cancelled"


class Batch(Protocol):
    """Whoever runs a job.

    Attributes:
        job_id: its name for the job.
        nodes: that the job was given, the first one leading.
        meeting: address and port at which processes of all nodes may meet; port 0: any.
    """

    job_id: str
    nodes: tuple[str, ...]
    meeting: tuple[str, int]

    def once_a_node(self, program: Sequence[str]) -> Sequence[str]:
        """The command that runs `python PROGRAM` once on each node."""

    def ranks(
        self, program: Sequence[str], places: Sequence[int], restarts: int, shutdown: int
    ) -> Launch:
        """What runs `python PROGRAM` as ranks: so many on each of the first nodes."""

    def unwanted(self, last: Start) -> str | None:
        """What was done to the job so that it is not to go on after this start; None: nothing."""

    def requeue(self, without: Sequence[str]) -> bool:
        """Let the job begin anew, without some nodes; False: this process is to start the ranks."""


class Here:
    """This machine: no queue, and who asks the job to stop means it."""

    def __init__(self, folder: Path, asked: Signals) -> None:
        self.job_id, self.meeting = LOCAL, ("127.0.0.1", 0)
        self.nodes: tuple[str, ...] = (socket.gethostname(),)
        self._folder, self._asked = folder, asked

    def once_a_node(self, program: Sequence[str]) -> Sequence[str]:
        """Once."""
        return [sys.executable, *program]

    def ranks(
        self, program: Sequence[str], places: Sequence[int], restarts: int, shutdown: int
    ) -> Launch:
        """By torchrun."""
        return torchrun(program, places[0], restarts=restarts, shutdown=shutdown)

    def unwanted(self, last: Start) -> str | None:
        """It was cancelled, or asked to stop."""
        if is_cancelled(self._folder):
            return _CANCELLED
        if self._asked.first is not None:
            return f"was sent {self._asked.first}"
        return "asked to stop" if last.how == "stopped" else None

    def requeue(self, without: Sequence[str]) -> bool:  # noqa: ARG002
        """There is no queue."""
        return False


class Slurm:
    """The Slurm job whose batch script this process is.

    Args:
        folder: the job's.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str]) -> None:
        self._folder, self.job_id = folder, own_id(environment)
        self.nodes = slurm.hosts(environment["SLURM_JOB_NODELIST"])
        address = environment.get("MASTER_ADDR", self.nodes[0])
        self.meeting = address, port_of(int(environment["SLURM_JOB_ID"]), 0)
        self._restarts = int(environment.get("SLURM_RESTART_COUNT", "0"))
        cores = environment.get("SLURM_CPUS_PER_TASK")  # srun does not take it over by itself.
        self._step = [f"--cpus-per-task={cores}"] if cores else []

    def once_a_node(self, program: Sequence[str]) -> Sequence[str]:
        """One task a node."""
        count = len(self.nodes)
        tasks = [f"--nodes={count}", f"--ntasks={count}", "--ntasks-per-node=1"]
        # Else the ranks' step may have to wait until this one is cleared away.
        return ["srun", "--overlap", *tasks, *self._step, sys.executable, *program]

    def ranks(
        self, program: Sequence[str], places: Sequence[int], restarts: int, shutdown: int
    ) -> Launch:
        """By torchrun's agents, one a node."""
        chosen = f"--nodelist={','.join(self.nodes[: len(places)])}"
        return torchrun_on_nodes(
            program,
            places,
            meeting=":".join(map(str, self.meeting)),
            name=f"{self.job_id}-{self._restarts}",
            step=[chosen, *self._step],
            restarts=restarts,
            shutdown=shutdown,
        )

    def unwanted(self, last: Start) -> str | None:  # noqa: ARG002
        """It was cancelled, by `rlt-dist cancel` or by Slurm's own scancel."""
        if is_cancelled(self._folder):
            return _CANCELLED
        shown = slurm.job_of(self.job_id)
        return _CANCELLED if slurm.was_cancelled(shown, self._restarts) else None

    def requeue(self, without: Sequence[str]) -> bool:
        """As a pending job.

        Slurm excludes nodes from pending jobs only, and waits longer than that takes before it
        starts a requeued one again.
        """
        # A requeued job's processes are asked to end, and what is called here inherits this.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        before = slurm.job_of(self.job_id).get("ExcNodeList", "(null)")
        slurm.requeue(self.job_id, self._restarts)
        if without:
            slurm.exclude(self.job_id, [*([] if before == "(null)" else [before]), *without])
        return True


def batch_of(folder: Path, asked: Signals, environment: Mapping[str, str] = os.environ) -> Batch:
    """Who runs a job, by how it was submitted: a shell inside an allocation has Slurm's variables,
    too. Where Slurm's answer could not be written down, as whoever submitted the job was killed, it
    is now.
    """
    path = folder / SUBMITTED
    if path.is_file() and read_record(path, Submitted).job_id == LOCAL:
        return Here(folder, asked)
    if not path.is_file():
        write_record(path, Submitted(job_id=own_id(environment), when=time.time()))
    return Slurm(folder, environment)


def own_id(environment: Mapping[str, str]) -> str:
    """The name of the Slurm job that this process is in.

    Of an array's task it is not SLURM_JOB_ID: one of the tasks, the last to begin, has the number
    of the array, by which Slurm's commands know all of them.
    """
    if "SLURM_ARRAY_JOB_ID" in environment:
        return f"{environment['SLURM_ARRAY_JOB_ID']}_{environment['SLURM_ARRAY_TASK_ID']}"
    return environment["SLURM_JOB_ID"]
