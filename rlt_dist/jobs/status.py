"""What has become of a run: read from its folder, and asked of Slurm."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlt_dist.checkpoint.manifest import MANIFEST, checkpoints, step_of
from rlt_dist.checkpoint.run_folder import CHECKPOINTS, CONFIG, METRICS, is_run_folder
from rlt_dist.config.load import read_yaml
from rlt_dist.jobs import slurm
from rlt_dist.jobs.batch import LOCAL
from rlt_dist.jobs.job import (
    CANCELLED,
    JOB,
    OUTPUT,
    RUNNING,
    SUBMITTED,
    Begun,
    Cancelled,
    Submitted,
    job_folders,
    read_record,
    starts,
    write_record,
)
from rlt_dist.util.ending import ENDED, last_ended
from rlt_dist.util.errors import UserError
from rlt_dist.util.lock import holder
from rlt_dist.util.log import file_of

_FINAL = ("finished", "guard", "mistake")
"""No job that ended so is started again."""
_TAIL = 1 << 16
"""Bytes at the end of metrics.jsonl that hold its last whole record."""


@dataclass(frozen=True)
class Status:
    """Of one run.

    Attributes:
        state: pending or running, or how it ended: finished, stopped, guard, mistake, failed, sick,
            cancelled, or what Slurm calls it; lost: it ended without a word; new: it never began;
            unknown: Slurm would have to say, and does not.
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
    job_id: str | None
    step: int
    steps: int | None
    tokens_per_second: float | None
    loss: float | None
    checkpoint: int | None
    saved: float | None
    restarts: int
    mesh: str | None
    idle: int


def run_folders(folder: Path) -> list[Path]:
    """The runs in a folder, or below its folders, by name."""
    found = (path for depth in ("*", "*/*") for path in folder.glob(depth) if path.is_dir())
    return sorted(path for path in found if is_run_folder(path) or job_folders(path))


def statuses(folders: Iterable[Path]) -> list[Status]:
    """What has become of runs; Slurm is asked once.

    Raises:
        UserError: one is no run folder.
    """
    newest = {folder: _newest_job(folder) for folder in folders}
    for folder, job in newest.items():
        if job is None and not is_run_folder(folder):
            raise UserError(f"{folder}: is no run folder")
    ids = {folder: _job_id(job) for folder, job in newest.items()}
    known, trouble = _asked([found for found in ids.values() if found not in (None, LOCAL)])
    return [
        _status(folder, job, ids[folder], known.get(ids[folder] or ""), trouble)
        for folder, job in newest.items()
    ]


def status_of(run_folder: Path) -> Status:
    """What has become of a run, or of a folder in which none has begun."""
    if _newest_job(run_folder) is None and not is_run_folder(run_folder):
        return _status(run_folder, None, None, None, None)
    (status,) = statuses([run_folder])
    return status


def cancel(run_folder: Path) -> Status:
    """Cancel a run's job; what it was before.

    Raises:
        UserError: there is none that waits or runs, or Slurm refuses.
    """
    (status,) = statuses([run_folder])
    job, job_id = _newest_job(run_folder), status.job_id
    if not status.active:
        raise UserError(f"{run_folder}: nothing to cancel, it is {status.state}")
    if job is None or job_id is None or job_id == LOCAL:
        raise UserError(f"{run_folder}: {status.why}; stop it there with Ctrl-C")
    # `status` tells by it how the job ended, also once Slurm has forgotten it.
    write_record(job / CANCELLED, Cancelled(when=time.time()))
    slurm.cancel(job_id)
    return status


def log_of(run_folder: Path, rank: int | None) -> Path:
    """Where a run's newest job prints, or one of its ranks."""
    job = _newest_job(run_folder)
    if rank is None and job is not None and _job_id(job) != LOCAL:
        return job / OUTPUT
    return file_of(run_folder, rank or 0)


def _asked(job_ids: list[str]) -> tuple[dict[str, slurm.Queued], str | None]:
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


def _status(
    run_folder: Path,
    job: Path | None,
    job_id: str | None,
    queued: slurm.Queued | None,
    trouble: str | None,
) -> Status:
    state, why, active = _state(run_folder, job, queued, trouble)
    last = last_record(run_folder / METRICS)
    saved = [path for path in checkpoints(run_folder / CHECKPOINTS) if (path / MANIFEST).is_file()]
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
        checkpoint=step_of(saved[-1]) if saved else None,
        saved=(saved[-1] / MANIFEST).stat().st_mtime if saved else None,
        restarts=max(len(begun) - 1, queued.restarts if queued else 0, 0),
        mesh=begun[-1].mesh if begun else None,
        idle=begun[-1].idle if begun else 0,
    )


def _begun(job: Path | None) -> list[Begun]:
    """All starts of a job, that which is at work last."""
    if job is None:
        return []
    running = job / RUNNING
    now = [read_record(running, Begun)] if running.is_file() else []
    return [*starts(job), *now]


def _state(
    run_folder: Path, job: Path | None, queued: slurm.Queued | None, trouble: str | None
) -> tuple[str, str | None, bool]:
    """State, why, and whether it runs or may yet."""
    if queued is not None and queued.active:
        return queued.state.lower(), queued.reason, True
    here = holder(run_folder)
    if here is not None:
        return "running", here, True
    how, why = _ending(run_folder, job)
    if queued is not None and queued.state not in ("COMPLETED", "FAILED"):
        return queued.state.lower(), why, False
    if how in _FINAL:
        return how, why, False
    if trouble is not None and _job_id(job) not in (None, LOCAL):
        return "unknown", trouble, False
    if how in ("stopped", "lost") and job is not None and (job / CANCELLED).is_file():
        return "cancelled", why, False
    return how, why, False


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
    """The last whole object of a file of one a line; none: {}."""
    if not path.is_file():
        return {}
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAIL))
        *whole, _ = file.read().split(b"\n")
    return json.loads(whole[-1]) if whole and whole[-1] else {}


def _steps(run_folder: Path, job: Path | None) -> int | None:
    """How many it is to do, by the configuration that was written last."""
    paths = [run_folder / CONFIG, *([] if job is None else [job / CONFIG])]
    there = [path for path in paths if path.is_file()]
    if not there:
        return None
    newest = max(there, key=lambda path: path.stat().st_mtime)
    steps = read_yaml(newest).get("train", {}).get("steps")
    return steps if isinstance(steps, int) else None
