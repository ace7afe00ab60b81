"""Submitting a run: checks, the job's folder, the job script, Slurm's answer.

Everything a job works from is in its own folder before it is submitted; what is refused leaves
nothing behind.
"""

import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.jobs import slurm
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
from rlt_dist.jobs.options import has, value_of
from rlt_dist.jobs.plan import Plan, Room, own_folders, plan_run, seconds_of, tasks_of
from rlt_dist.jobs.status import status_of
from rlt_dist.jobs.template import TASKS, render
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import write_atomic

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
        script: of the folder that is the next in the first run's.
    """

    wanted: Wanted
    room: Room
    plans: dict[int, Plan]
    jobs: dict[int, Job]
    script: str

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
        _check_idle(config.run_folder, wanted)
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
    first = next(iter(jobs.values()))
    script = render(wanted.template, _next_folder(first.run_folder), first, wanted.array)
    return Ready(wanted, room, plans, jobs, script)


def submit(ready: Ready) -> tuple[str, str | None]:
    """Make the jobs' folders and submit them; the job's id, and what keeps it from starting.

    Raises:
        UserError: Slurm refuses; nothing is left behind.
    """
    wanted, job, directory = ready.wanted, ready.wanted.job, ready.wanted.job.directory
    partition = value_of(job.options, "--partition", "-p")
    waits = slurm.check(ready.script, directory, partition, job.nodes_min)
    with _folders(ready) as folders:
        job_id = slurm.submit(next(iter(folders.values())) / SCRIPT, wanted.once, directory)
    for task, folder in folders.items():
        own = job_id if wanted.array is None else f"{job_id}_{task}"
        write_record(folder / SUBMITTED, Submitted(job_id=own, when=time.time()))
    return job_id, waits


def make_local(ready: Ready) -> Path:
    """Make the folder of a job that this machine is to run; its script."""
    with _folders(ready) as folders:
        (folder,) = folders.values()
        write_record(folder / SUBMITTED, Submitted(job_id=LOCAL, when=time.time()))
    return folder / SCRIPT


def _check_idle(run_folder: Path, wanted: Wanted) -> None:
    """A run is trained by one job at a time, unless the next one waits for it."""
    status = status_of(run_folder)
    if status.active and not has(wanted.once, "--dependency", "-d"):
        job = f"job {status.job_id}" if status.job_id else (status.why or "a process")
        raise UserError(
            f"{run_folder}: {job} is {status.state}; `rlt-dist cancel {run_folder}` it first, or "
            "wait for it with --dependency"
        )


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
    folders = job_folders(run_folder)
    number = int(folders[-1].name) + 1 if folders else 1
    return run_folder / JOBS / f"{number:04}"


@contextmanager
def _folders(ready: Ready) -> Iterator[dict[int, Path]]:
    """The jobs' folders, by task; whatever goes wrong inside, they are removed."""
    made: dict[int, Path] = {}
    try:
        for task, job in ready.jobs.items():
            made[task] = _next_folder(job.run_folder)
            try:
                made[task].mkdir(parents=True)
            except FileExistsError:
                raise UserError(
                    f"{made.pop(task)}: another submission is under way; try again"
                ) from None
        for task, folder in made.items():
            _fill(folder, ready, task)
        if ready.wanted.array is not None:
            links = next(iter(made.values())) / TASKS
            links.mkdir()
            for task, folder in made.items():
                (links / str(task)).symlink_to(folder)
        yield made
    except BaseException:
        for folder in made.values():
            shutil.rmtree(folder, ignore_errors=True)
            with suppress(OSError):  # what other jobs or the run have there stays
                folder.parent.rmdir()
                folder.parent.parent.rmdir()
        raise


def _fill(folder: Path, ready: Ready, task: int) -> None:
    wanted, job = ready.wanted, ready.jobs[task]
    freeze(wanted.code, folder / CODE)
    write_atomic(folder / REVISION, wanted.revision)
    write_atomic(folder / CONFIG, ready.plans[task].config.to_yaml())
    write_atomic(folder / SCRIPT, ready.script)
    write_record(folder / JOB, job)
