"""The jobs of a run that wait or run, here or by Slurm's own word, and how a person ends them."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from rlt_dist.jobs import slurm
from rlt_dist.jobs.batch import LOCAL
from rlt_dist.jobs.job import (
    CANCELLED,
    SUBMITTED,
    Cancelled,
    Submitted,
    job_folders,
    read_record,
    write_record,
)
from rlt_dist.jobs.status import statuses, supervisor_of
from rlt_dist.util.errors import UserError

_RUNNING = "RUNNING"


@dataclass(frozen=True)
class Active:
    """A job that waits or runs.

    Attributes:
        folder: the job's.
        state: in Slurm's words.
        process: of this machine, which runs it; None: it is Slurm's.
    """

    folder: Path
    job_id: str
    state: str
    process: int | None = None

    @property
    def runs(self) -> bool:
        """It has processes that can be told to save."""
        return self.state == _RUNNING

    @property
    def kill(self) -> str:
        """The command that ends it at once."""
        return f"scancel {self.job_id}" if self.process is None else f"kill -9 {self.process}"


def active_jobs(run_folder: Path) -> list[Active]:
    """A run's jobs, oldest first: one, and those that wait for its end.

    Raises:
        UserError: Slurm does not answer, or is not installed.
    """
    paths = [path for folder in job_folders(run_folder) if (path := folder / SUBMITTED).is_file()]
    ids = {path.parent: read_record(path, Submitted).job_id for path in paths}
    known = slurm.queue(job_id for job_id in ids.values() if job_id != LOCAL)
    found = []
    for folder, job_id in ids.items():
        if job_id == LOCAL and (process := supervisor_of(folder)) is not None:
            found.append(Active(folder, job_id, _RUNNING, process))
        elif job_id in known and known[job_id].active:
            found.append(Active(folder, job_id, known[job_id].state))
    return found


def cancel(run_folder: Path) -> list[Active]:
    """Cancel a run's jobs: one that runs is told to save and end, others leave the queue.

    Returns:
        what they were.

    Raises:
        UserError: there is none that waits or runs, or Slurm refuses.
    """
    jobs = active_jobs(run_folder)
    if not jobs:
        (status,) = statuses([run_folder])
        if status.active:
            raise UserError(f"{run_folder}: {status.why}; stop it there with Ctrl-C")
        why = f": {status.why}" if status.why else ""
        raise UserError(f"{run_folder}: nothing to cancel, it is {status.state}{why}")
    for job in jobs:  # First: the job looks for it when it decides whether it goes on.
        write_record(job.folder / CANCELLED, Cancelled(when=time.time()))
    for job in reversed(jobs):  # One that waits for another is not to begin at that one's end.
        if job.process is not None:
            os.kill(job.process, signal.SIGTERM)
        elif job.runs:
            slurm.tell_to_stop(job.job_id)
        else:
            slurm.cancel(job.job_id)
    return jobs
