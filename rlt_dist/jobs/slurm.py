"""What is asked of Slurm: every call of its commands that a person's own commands make."""

import re
import shutil
import subprocess
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rlt_dist.util.errors import UserError

_PATIENCE = 120.0
"""Seconds; a busy controller takes its time."""
_NOT_AVAILABLE = "node configuration is not available"
_ABSENCE = 600.0
"""Seconds; what a job at its end needs to know is worth waiting for."""
_ABSENT = re.compile("unable to contact|timed out|connection refused", re.IGNORECASE)
_UNCERTAIN = re.compile("timed out|receive failure|zero bytes|unexpected message", re.IGNORECASE)
"""The controller may have done what was asked, and its answer was lost."""
_ACTIVE = {
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "STOPPED", "SIGNALING"),
    *("REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESIZING", "STAGE_OUT"),
}


class Unanswered(UserError):
    """Slurm does not answer; what it was asked to do may be done."""


@dataclass(frozen=True)
class Queued:
    """What Slurm says of a job.

    Attributes:
        state: in its words, such as RUNNING.
        reason: why it waits; None: it does not.
        restarts: how often it was requeued.
    """

    state: str
    reason: str | None
    restarts: int

    @property
    def active(self) -> bool:
        """It runs, or may yet."""
        return self.state in _ACTIVE


def check(script: str, directory: Path, partition: str | None, nodes: int) -> str | None:
    """Let Slurm's own parser and scheduler look at a job script; nothing is submitted.

    Without the options that make a job wait: to Slurm, one that cannot start now could never.

    Args:
        nodes: as few as the job may have.

    Returns:
        what keeps it from starting, if it may start once nodes are back that are down now.

    Raises:
        UserError: the job could never run, in Slurm's words.
    """
    try:
        _sbatch("--test-only", given=script, directory=directory)
    except UserError as error:
        if _NOT_AVAILABLE not in str(error):
            raise
        down = _down(partition)
        up = _count(partition) - len(down)
        if not down or nodes > up + len(down):
            raise
        if up > 0:  # those have to do in every other way
            few = f"--nodes={min(nodes, up)}"
            _sbatch("--test-only", few, given=script, directory=directory)
        return f"Slurm cannot start it while {','.join(down)} is down; it will wait"
    return None


def submit(script: Path, once: Sequence[str], directory: Path) -> str:
    """Submit a job script; the job's id.

    Args:
        once: options beside those in the script.

    Raises:
        Unanswered: Slurm may have taken it.
        UserError: Slurm refuses it, in its words.
    """
    answer = _sbatch("--parsable", *once, str(script), directory=directory)
    return answer.strip().partition(";")[0]  # the name of a cluster may follow


def installed() -> bool:
    """Whether Slurm's commands are there to be called."""
    return shutil.which("squeue") is not None


def queue(job_ids: Iterable[str]) -> dict[str, Queued]:
    """What Slurm knows of jobs, by id; it forgets those that ended a while ago.

    Raises:
        UserError: Slurm does not answer, or is not installed.
    """
    wanted = list(job_ids)
    if not wanted:
        return {}
    wanted.append(wanted[0])  # one unknown id alone is an error for squeue, several are not
    columns = "JobArrayID:|,State:|,RestartCnt:|,Reason:|"
    command = ["squeue", "--noheader", "--array", "--states=all", f"--Format={columns}"]
    answer = _ask([*command, f"--jobs={','.join(wanted)}"])
    known = {}
    for line in answer.splitlines():
        job_id, state, restarts, reason = (word.strip() for word in line.split("|")[:4])
        waits = None if reason in ("None", "(null)", "") else reason
        known[job_id] = Queued(state, waits, int(restarts))
    return known


def last_word(job_id: str, queued: Queued | None) -> str | None:
    """What Slurm says of a job that ended without a word of its own; None: nothing.

    Args:
        queued: as `queue` has it; of what it has forgotten, the accounting may know.
    """
    if queued is not None:
        reason = f" ({queued.reason})" if queued.reason else ""
        return f"Slurm says {queued.state}{reason}"
    command = ["sacct", "--noheader", "--parsable2", "--allocations", "--format=State,ExitCode"]
    try:
        state, _, status = _ask([*command, f"--jobs={job_id}"]).strip().partition("|")
    except UserError:  # a site without accounting
        return None
    return f"Slurm says {state} ({status})" if state else None


def tell_to_stop(job_id: str) -> None:
    """Warn a job that runs, as Slurm does before a job's time is over.

    Raises:
        UserError: Slurm refuses, in its words.
    """
    _ask(["scancel", "--batch", "--signal=USR1", job_id])


def cancel(job_id: str) -> None:
    """End a job, or take it out of the queue.

    Raises:
        UserError: Slurm refuses, in its words.
    """
    _ask(["scancel", job_id])


def node_memory(partition: str | None) -> float | None:
    """Bytes of the largest node of a partition, or of all; None: it has none.

    Raises:
        UserError: Slurm does not answer, or is not installed.
    """
    found = re.findall(r"\d+", _sinfo(partition, "--format=%m"))
    return max(map(float, found)) * (1 << 20) if found else None


def _down(partition: str | None) -> list[str]:
    states = "--states=down,drain,fail,maint,unknown,power_down"
    return sorted(set(_sinfo(partition, "--Node", states, "--format=%N").split()))


def _count(partition: str | None) -> int:
    return len(set(_sinfo(partition, "--Node", "--format=%N").split()))


def _sinfo(partition: str | None, *arguments: str) -> str:
    chosen = [] if partition is None else [f"--partition={partition}"]
    return _ask(["sinfo", "--noheader", *chosen, *arguments])


def hosts(nodes: str) -> tuple[str, ...]:
    """The names in a list of Slurm's, such as n[1-4]."""
    return tuple(_ask(["scontrol", "show", "hostnames", nodes]).split())


def job_of(job_id: str) -> dict[str, str]:
    """What Slurm knows of a job, by its own names: JobState, ExcNodeList, ...

    Raises:
        UserError: it knows none of this id.
    """
    shown = _patiently(["scontrol", "--oneliner", "show", "job", job_id])
    return dict(re.findall(r"(\S+?)=(\S*)", shown))


def was_cancelled(shown: Mapping[str, str], restarts: int) -> bool:
    """Whether a person ended a job that has begun for the `restarts`-th time after its first; pure.

    Args:
        shown: as `job_of` gives it.

    While the processes of a job are being ended, Slurm only says that it is completing, whatever
    the cause: one that it has requeued has begun once more in its count, and one whose time was
    over says so.
    """
    if shown["JobState"] == "COMPLETING":
        return int(shown["Restarts"]) == restarts and shown["Reason"] != "TimeLimit"
    return shown["JobState"] == "CANCELLED"


def requeue(job_id: str, restarts: int) -> None:
    """Make a job pending that has begun for the `restarts`-th time after its first.

    Slurm may have done that by itself: it requeues what was preempted or lost a node.

    Raises:
        UserError: Slurm refuses, in its words.
    """

    def waits() -> bool:
        return int(job_of(job_id)["Restarts"]) > restarts

    if waits():
        return
    try:
        _patiently(["scontrol", "requeue", job_id])
    except UserError:
        if not waits():
            raise


def exclude(job_id: str, nodes: Iterable[str]) -> None:
    """Let a pending job no longer begin on these nodes; it replaces what was excluded before.

    Raises:
        UserError: the job is not pending.
    """
    _patiently(["scontrol", "update", f"JobId={job_id}", f"ExcNodeList={','.join(nodes)}"])


def _patiently(command: Sequence[str]) -> str:
    """The answer of a controller that may be away for a while, as it is when it is restarted."""
    until = time.monotonic() + _ABSENCE
    while True:
        try:
            return _ask(command)
        except UserError as error:
            absent = isinstance(error, Unanswered) or _ABSENT.search(str(error))
            if time.monotonic() > until or not absent:
                raise
        time.sleep(5)


def _sbatch(*arguments: str, directory: Path, given: str | None = None) -> str:
    try:
        return _ask(["sbatch", *arguments], directory, given)
    except Unanswered:
        raise
    except UserError as error:
        raise UserError(f"{error}; `man sbatch` has the options") from None


def _ask(command: Sequence[str], directory: Path | None = None, given: str | None = None) -> str:
    """What a command of Slurm's answers.

    Raises:
        Unanswered: it does not answer.
        UserError: it is not there, or refuses; one line, in its own words.
    """
    name = command[0]
    try:
        done = subprocess.run(
            command,
            cwd=directory,
            input=given,
            capture_output=True,
            text=True,
            timeout=_PATIENCE,
            check=False,
        )
    except FileNotFoundError:
        raise UserError(
            f"{name} is not installed here; go to a machine of the cluster, or run with --local"
        ) from None
    except subprocess.TimeoutExpired:
        raise Unanswered(f"{name} does not answer within {_PATIENCE:.0f} s; try again") from None
    if done.returncode != 0:
        words = (line.removeprefix(f"{name}: ") for line in done.stderr.splitlines())
        said = "; ".join(line.removeprefix("error: ").strip() for line in words)
        if done.returncode < 0 or _UNCERTAIN.search(said):
            raise Unanswered(f"{name} has no answer: {said or f'signal {-done.returncode}'}")
        raise UserError(f"{name} refuses: {said or f'exit status {done.returncode}'}")
    return done.stdout
