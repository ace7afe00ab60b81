"""What has become of a run: read from its folder, and asked of Slurm."""

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlt_dist.checkpoint.manifest import MANIFEST, checkpoints, step_of
from rlt_dist.checkpoint.run_folder import CHECKPOINTS, CONFIG, METRICS, is_run_folder
from rlt_dist.config.load import read_yaml
from rlt_dist.jobs import slurm
from rlt_dist.jobs.batch import LOCAL
from rlt_dist.jobs.job import (
    JOB,
    OUTPUT,
    RUNNING,
    SUBMITTED,
    Begun,
    Submitted,
    is_cancelled,
    job_folders,
    read_record,
    starts,
)
from rlt_dist.util.ending import ENDED, last_ended
from rlt_dist.util.errors import UserError
from rlt_dist.util.lock import holder
from rlt_dist.util.log import file_of
from rlt_dist.util.records import parse_record

_FINAL = ("finished", "guard", "mistake")
"""No job that ended so is started again."""
_SUPERVISE = b"rlt_dist.jobs.supervise"
"""The module that a job's process runs; its one argument is the job's folder."""
_TAIL = 1 << 16
"""Bytes at the end of metrics.jsonl that hold its last whole record."""


@dataclass(frozen=True)
class Status:
    """Of one run.

    Attributes:
        state: pending or running, or how it ended: finished, stopped, guard, mistake, failed, sick,
            cancelled, or what Slurm calls it; lost: it ended without a word; new: it never began;
            unknown: Slurm would have to say, and does not; damaged: so is one of its records.
        why: in words, where there is more to say.
        job_id: of its newest job; None: it was never submitted.
        step, steps: done, and in all.
        checkpoint, saved: the newest one's step, and when it was written, seconds since the epoch.
        restarts: of the newest job.
        mesh, idle: of the newest start, and the places for ranks that it leaves idle.
    """

    run_folder: Path
    state: str
    why: str | None
    active: bool
    job_id: str | None = None
    step: int = 0
    steps: int | None = None
    tokens_per_second: float | None = None
    loss: float | None = None
    checkpoint: int | None = None
    saved: float | None = None
    restarts: int = 0
    mesh: str | None = None
    idle: int = 0


def run_folders(folder: Path) -> list[Path]:
    """The runs in a folder, or below its folders, by name."""
    found = (path for depth in ("*", "*/*") for path in folder.glob(depth) if path.is_dir())
    return sorted(path for path in found if is_run_folder(path) or job_folders(path))


def statuses(folders: Iterable[Path]) -> list[Status]:
    """What has become of runs, also of those whose records are damaged; Slurm is asked once.

    Raises:
        UserError: one is no run folder.
    """
    newest = {folder: _newest_job(folder) for folder in folders}
    for folder, job in newest.items():
        if job is None and not is_run_folder(folder):
            raise UserError(f"{folder}: is no run folder")
    ids = []
    for job in newest.values():
        with suppress(UserError):
            ids.append(_job_id(job))
    answer = _asked([job_id for job_id in ids if job_id not in (None, LOCAL)])
    found = []
    for folder, job in newest.items():
        try:
            found.append(_status(folder, job, answer))
        except (UserError, OSError) as error:
            found.append(Status(folder, "damaged", str(error), active=False))
    return found


def status_of(run_folder: Path) -> Status:
    """What has become of a run, or of a folder in which none has begun.

    Raises:
        UserError: one of its records is damaged.
    """
    job = _newest_job(run_folder)
    job_id = _job_id(job)
    return _status(run_folder, job, _asked([] if job_id in (None, LOCAL) else [job_id]))


def log_of(run_folder: Path, rank: int | None) -> Path:
    """Where a run's newest job prints, or one of its ranks."""
    job = _newest_job(run_folder)
    if rank is None and job is not None and _job_id(job) != LOCAL:
        return job / OUTPUT
    return file_of(run_folder, rank or 0)


_Answer = tuple[dict[str, slurm.Queued], str | None]


def _asked(job_ids: list[str]) -> _Answer:
    """What Slurm knows of jobs, and why it does not say."""
    try:
        return slurm.queue(job_ids), None
    except UserError as error:
        return {}, str(error)


def _newest_job(run_folder: Path) -> Path | None:
    folders = job_folders(run_folder)
    return folders[-1] if folders else None


def _job_id(job: Path | None) -> str | None:
    if job is None or not (job / SUBMITTED).is_file():
        return None
    return read_record(job / SUBMITTED, Submitted).job_id


def supervisor_of(job: Path | None) -> int | None:
    """The process of this machine that supervises a job, if there is one."""
    if job is None:
        return None
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            *_, module, folder, _ = [b"", b"", *path.read_bytes().split(b"\0")]
            if module == _SUPERVISE and os.path.samefile(folder, job):
                return int(path.parent.name)
    return None


def _status(run_folder: Path, job: Path | None, answer: _Answer) -> Status:
    known, trouble = answer
    job_id = _job_id(job)
    queued = known.get(job_id or "")
    state, why, active = _state(run_folder, job, job_id, queued, trouble)
    last = last_record(run_folder / METRICS)
    checkpoint, saved = _newest_checkpoint(run_folder)
    begun = _begun(job)
    return Status(
        run_folder=run_folder,
        state=state,
        why=why,
        active=active,
        job_id=job_id,
        step=last.get("step", 0),
        steps=_steps(run_folder, job),
        tokens_per_second=last.get("tokens_per_second"),
        loss=last.get("loss"),
        checkpoint=checkpoint,
        saved=saved,
        restarts=max(len(begun) - 1, queued.restarts if queued else 0, 0),
        mesh=begun[-1].mesh if begun else None,
        idle=begun[-1].idle if begun else 0,
    )


def _newest_checkpoint(run_folder: Path) -> tuple[int | None, float | None]:
    """Its step, and when it was written."""
    for path in reversed(checkpoints(run_folder / CHECKPOINTS)):
        with suppress(FileNotFoundError):  # It is not whole, or was removed meanwhile.
            return step_of(path), (path / MANIFEST).stat().st_mtime
    return None, None


def _begun(job: Path | None) -> list[Begun]:
    """All starts of a job, that which is at work last."""
    if job is None:
        return []
    running = job / RUNNING
    now = [read_record(running, Begun)] if running.is_file() else []
    return [*starts(job), *now]


def _state(
    run_folder: Path,
    job: Path | None,
    job_id: str | None,
    queued: slurm.Queued | None,
    trouble: str | None,
) -> tuple[str, str | None, bool]:
    """State, why, and whether it runs or may yet."""
    if queued is not None and queued.active:
        return queued.state.lower(), queued.reason, True
    here = holder(run_folder)
    if here is not None:
        return "running", here, True
    if job is not None and job_id is None:
        return "unknown", unanswered(job), False
    if job_id == LOCAL and (supervisor := supervisor_of(job)) is not None:
        return "running", f"process {supervisor} supervises it here", True
    how, why = _ending(run_folder, job)
    if queued is not None and queued.state not in ("COMPLETED", "FAILED"):
        return queued.state.lower(), why, False
    if how in _FINAL:
        return how, why, False
    if trouble is not None and job_id not in (None, LOCAL):
        return "unknown", trouble, False
    if job is not None and is_cancelled(job):
        return "cancelled", why, False
    if how == "lost" and job_id is not None and job_id != LOCAL:
        why = slurm.last_word(job_id, queued)
    return how, why, False


def unanswered(job: Path) -> str:
    """What a person should know of a job's folder without Slurm's answer."""
    return (
        f"Slurm's answer is not in {job}, as it is being submitted or that was interrupted; "
        f"look for it with `squeue --me`, and if it is not there, remove the folder"
    )


def _ending(run_folder: Path, job: Path | None) -> tuple[str, str | None]:
    """How and why it ended, by what was written last."""
    endings: list[tuple[float, str, str | None]] = []
    since = 0.0
    if job is not None:
        # How a run ended before it was submitted again says nothing of the job.
        since = (job / JOB).stat().st_mtime
        endings += [(start.ended, start.how, start.why) for start in starts(job)]
    ended = last_ended(run_folder)
    if ended is not None and (when := (run_folder / ENDED).stat().st_mtime) >= since:
        endings.append((when, ended.how, ended.why))
    if endings:
        return max(endings, key=lambda ending: ending[0])[1:]
    return "lost" if job is not None or (run_folder / METRICS).is_file() else "new", None


def last_record(path: Path) -> dict[str, Any]:
    """The last whole object of a file of one a line; none: {}.

    Raises:
        UserError: it is no object.
    """
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL))
        *whole, _ = file.read().split(b"\n")
    return parse_record(whole[-1], f"{path}: its last line") if whole else {}


def _steps(run_folder: Path, job: Path | None) -> int | None:
    """How many it is to do, by the configuration that was written last."""
    paths = [run_folder / CONFIG, *([] if job is None else [job / CONFIG])]
    there = [path for path in paths if path.is_file()]
    if not there:
        return None
    newest = max(there, key=lambda path: path.stat().st_mtime)
    train = read_yaml(newest).get("train")
    steps = train.get("steps") if isinstance(train, dict) else None
    return steps if isinstance(steps, int) else None
