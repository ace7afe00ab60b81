"""Submitting a run: checks, the job's folder, the job script, Slurm's answer.

Everything a job works from is in its own folder before it is submitted; what is refused leaves
nothing behind.
"""

import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.jobs import slurm
from rlt_dist.jobs.active import active_jobs
from rlt_dist.jobs.batch import LOCAL
from rlt_dist.jobs.freeze import PACKAGE, freeze, revision
from rlt_dist.jobs.job import (
    CODE,
    CONFIG,
    JOB,
    JOBS,
    REVISION,
    SCRIPT,
    SUBMITTED,
    Job,
    Submitted,
    job_folders,
    write_record,
)
from rlt_dist.jobs.lead import UNMEASURED, lead_of
from rlt_dist.jobs.options import awaited, value_of
from rlt_dist.jobs.plan import Plan, Room, own_folders, plan_run, seconds_of, tasks_of
from rlt_dist.jobs.status import unanswered
from rlt_dist.jobs.template import TASKS, render
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import write_atomic
from rlt_dist.util.lock import LOCK, holder, locked

_TASK = "{task}"


@dataclass(frozen=True)
class Wanted:
    """What a person asks for.

    Attributes:
        job: all of it that lasts; run folder and lead are each task's own.
        template: of the job script.
        code: the package that the job is to run.
        revision: what that is.
        array: the tasks, as Slurm writes them; None: no array.
        once: options of sbatch for this submission alone.
        lead: seconds before its end in which the job is warned; None: as long as it needs.
        local: this machine runs it.
    """

    job: Job
    template: Path
    code: Path
    revision: str
    array: str | None = None
    once: tuple[str, ...] = ()
    lead: float | None = None
    local: bool = False


@dataclass(frozen=True)
class Ready:
    """What has been checked and may be submitted.

    Attributes:
        jobs: by task; that of no array is task 0.
    """

    wanted: Wanted
    room: Room
    plans: dict[int, Plan]
    jobs: dict[int, Job]

    def script(self) -> str:
        """The job script, of the folder that is the next in the first run's.

        Raises:
            UserError: the template cannot be read, or is none.
        """
        first = next(iter(self.jobs.values()))
        folder = _next_folder(first.run_folder)
        return render(self.wanted.template, folder, first, self.wanted.array)

    def lines(self) -> list[str]:
        """What a person should know of it."""
        first = next(iter(self.plans))
        lines = self.plans[first].lines(self.room)
        if len(self.plans) > 1:
            lines.append(f"and {len(self.plans) - 1} more tasks: --array {self.wanted.array}")
        commit, *difference = self.wanted.revision.splitlines()
        return [*lines, f"code: {commit}{' and uncommitted changes' if difference else ''}"]


def configurations(file: Path, overrides: Sequence[str], array: str | None) -> dict[int, RunConfig]:
    """The resolved configuration of every task; that of no array is task 0.

    Raises:
        UserError: one is wrong, or two tasks share a run folder.
    """
    if array is None:
        return {0: load_typed(file, RunConfig, overrides).resolved()}
    configs = {
        task: load_typed(
            file, RunConfig, [override.replace(_TASK, str(task)) for override in overrides]
        ).resolved()
        for task in tasks_of(array)
    }
    own_folders(list(configs.values()))
    return configs


def current_code() -> tuple[Path, str]:
    """The package that runs now, and what it is."""
    return PACKAGE, revision(PACKAGE)


def earlier(run_folder: Path) -> Path:
    """The folder of a run's newest job.

    Raises:
        UserError: it was never submitted.
    """
    folders = job_folders(run_folder)
    if folders:
        return folders[-1]
    if not run_folder.is_dir():
        raise UserError(f"{run_folder}: no such folder; give a run folder")
    raise UserError(
        f"{run_folder}: was never submitted; `rlt-dist submit {run_folder / CONFIG} --nodes N` does"
    )


def resumed_code(folder: Path) -> tuple[Path, str]:
    """The package of an earlier job, and what it is."""
    return folder / CODE / PACKAGE.name, (folder / REVISION).read_text()


def make_ready(
    wanted: Wanted, configs: dict[int, RunConfig], room: Room, *, compare: bool = True
) -> Ready:
    """Check all that can be known before a job id is spent; nothing is written.

    Args:
        configs: by task.
        compare: as `plan_run` has it.

    Raises:
        UserError: something does not fit; one line that names it.
    """
    again = "--reset-state" in wanted.job.arguments
    plans = {}
    for task, config in configs.items():
        _check_idle(config.run_folder, wanted, task)
        plans[task] = plan_run(config, room, compare=compare, reset_state=again)
    jobs = {
        task: wanted.job.model_copy(
            update={"run_folder": plan.config.run_folder, "lead": _lead(wanted, plan)}
        )
        for task, plan in plans.items()
    }
    # One script serves all tasks: with the longest lead.
    lead = max(job.lead for job in jobs.values())
    jobs = {task: job.model_copy(update={"lead": lead}) for task, job in jobs.items()}
    return Ready(wanted, room, plans, jobs)


def submit(ready: Ready) -> tuple[str, str | None]:
    """Make the jobs' folders and submit them; the job's id, and what keeps it from starting.

    Raises:
        UserError: Slurm refuses, and nothing is left behind; or it may have taken the job, or has
            and that cannot be written down, and the folders are kept.
    """
    wanted, job, directory = ready.wanted, ready.wanted.job, ready.wanted.job.directory
    partition = value_of(job.options, "--partition", "-p")
    with _alone(ready), ExitStack() as undo:
        script = ready.script()
        waits = slurm.check(script, directory, partition, job.nodes_min)
        folders = _make_folders(ready, script, undo)
        with _uninterrupted():
            first = next(iter(folders.values()))
            try:
                job_id = slurm.submit(first / SCRIPT, wanted.once, directory)
            except slurm.Unanswered as error:
                undo.pop_all()
                raise UserError(f"{error}; {unanswered(first)}") from None
            undo.pop_all()
            _record(folders, job_id, wanted)
    return job_id, waits


def make_local(ready: Ready) -> Path:
    """Make the folder of a job that this machine is to run; its script."""
    with _alone(ready), ExitStack() as undo:
        (folder,) = _make_folders(ready, ready.script(), undo).values()
        write_record(folder / SUBMITTED, Submitted(job_id=LOCAL, when=time.time()))
        undo.pop_all()
    return folder / SCRIPT


def _record(folders: dict[int, Path], job_id: str, wanted: Wanted) -> None:
    """Write down what Slurm has answered."""
    try:
        for task, folder in folders.items():
            own = job_id if wanted.array is None else f"{job_id}_{task}"
            write_record(folder / SUBMITTED, Submitted(job_id=own, when=time.time()))
    except OSError as error:
        raise UserError(
            f"job {job_id} is submitted, but that cannot be written into {folder}: "
            f"{error.strerror}; the job will do so when it starts, `scancel {job_id}` ends it"
        ) from None


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Between a job and what is remembered of it nobody's Ctrl-C may come; sbatch ignores it, too.

    Python interrupts its main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def _alone(ready: Ready) -> Iterator[None]:
    """Hold idle runs for one submission; folders that stay empty are removed again.

    Raises:
        UserError: another submission is under way, or a run is not idle.
    """
    with ExitStack() as stack:
        for task, job in ready.jobs.items():
            jobs = job.run_folder / JOBS
            stack.enter_context(locked(jobs, "submits a job"))
            stack.callback(_remove_unused, jobs)
            _check_idle(job.run_folder, ready.wanted, task)
        yield


def _remove_unused(jobs: Path) -> None:
    """What the run or other jobs have there stays."""
    with suppress(OSError):
        if os.listdir(jobs) == [LOCK]:
            (jobs / LOCK).unlink()
            jobs.rmdir()
            jobs.parent.rmdir()


def _check_idle(run_folder: Path, wanted: Wanted, task: int) -> None:
    """A run is trained by one job at a time, unless the next one waits for its end."""
    folders = job_folders(run_folder)
    if folders and not (folders[-1] / SUBMITTED).is_file():
        raise UserError(unanswered(folders[-1]))
    jobs = active_jobs(run_folder) if slurm.installed() else []
    ends = awaited(value_of(wanted.once, "--dependency", "-d") or "", task)
    for job in jobs:
        if not ends & {job.job_id, job.job_id.partition("_")[0]}:
            wait = f", or wait for it with --dependency afterany:{job.job_id}"
            raise UserError(
                f"{run_folder}: job {job.job_id} is {job.state.lower()}; `rlt-dist cancel "
                f"{run_folder}` it first{wait if job.process is None else ''}"
            )
    here = holder(run_folder)
    if here is not None and not jobs:  # otherwise it is one of those
        raise UserError(f"{run_folder}: {here}; stop it first")


def _lead(wanted: Wanted, plan: Plan) -> float:
    """Seconds that the job is warned before its end.

    Raises:
        UserError: the job has not so much time.
    """
    time_limit = value_of(wanted.job.options, "--time", "-t")
    limit = None if time_limit is None else seconds_of(time_limit)
    measured = lead_of(plan.config.run_folder)
    if wanted.lead is None and measured == UNMEASURED:
        return measured if limit is None else min(measured, limit / 2)
    lead = measured if wanted.lead is None else wanted.lead
    if limit is not None and lead >= limit:
        raise UserError(
            f"--time {time_limit}: the run needs {lead:.0f} s of it to stop and save; give it more"
        )
    return lead


def _next_folder(run_folder: Path) -> Path:
    """Also after one that somebody was killed over, before it was a job's."""
    numbers = [int(path.name) for path in (run_folder / JOBS).glob("[0-9]" * 4)]
    return run_folder / JOBS / f"{max(numbers, default=0) + 1:04}"


def _make_folders(ready: Ready, script: str, undo: ExitStack) -> dict[int, Path]:
    """The jobs' folders, by task, with all that they work from.

    Args:
        undo: is told how they are removed.
    """
    made = {task: _next_folder(job.run_folder) for task, job in ready.jobs.items()}
    for task, folder in made.items():
        undo.callback(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir()
        _fill(folder, ready, task, script)
    if ready.wanted.array is not None:
        links = next(iter(made.values())) / TASKS
        links.mkdir()
        for task, folder in made.items():
            (links / str(task)).symlink_to(folder)
    return made


def _fill(folder: Path, ready: Ready, task: int, script: str) -> None:
    wanted, job = ready.wanted, ready.jobs[task]
    freeze(wanted.code, folder / CODE)
    write_atomic(folder / REVISION, wanted.revision)
    write_atomic(folder / CONFIG, ready.plans[task].config.to_yaml())
    write_atomic(folder / SCRIPT, script)
    write_record(folder / JOB, job)
