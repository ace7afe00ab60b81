"""A job on its nodes: examine them, start the ranks, see how they end, decide what comes next.

    python -m rlt_dist.jobs.supervise RUN/jobs/0001

is what a job script runs, with the job's own copy of the code. Under Slurm a job that is to go on
is requeued, so that the next start is another run of the script, maybe on other nodes; without a
batch system this process starts the ranks again itself.
"""

import math
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile

from rlt_dist.checkpoint.manifest import checkpoints, read_manifest, step_of
from rlt_dist.checkpoint.run_folder import CHECKPOINTS
from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.jobs.batch import Batch, batch_of
from rlt_dist.jobs.decide import decide
from rlt_dist.jobs.health import LIMIT, judge, parse_reports
from rlt_dist.jobs.job import (
    CONFIG,
    JOB,
    RUNNING,
    Begun,
    How,
    Job,
    Start,
    add_start,
    is_cancelled,
    read_record,
    starts,
    write_record,
)
from rlt_dist.jobs.nodes import Layout, lay_out
from rlt_dist.jobs.ranks import begin, end, run_ranks_with
from rlt_dist.util.ending import STATUS, how_of
from rlt_dist.util.errors import UserError, disk_trouble, one_line
from rlt_dist.util.log import show_error, warn
from rlt_dist.util.signals import SIGNALS, Signals, heard


def supervise(folder: Path, batch: Batch, asked: Signals) -> int:
    """Start a job's ranks, as often as that makes sense.

    Args:
        folder: the job's.
        asked: what this process is asked by signals.

    Returns:
        the exit status of the job.

    Raises:
        UserError: the run does not fit on the nodes.
        OSError: a start cannot be written down before it begins, so that it would not be counted.
    """
    job = read_record(folder / JOB, Job)
    _remember_lost_start(folder, job)
    known = list(starts(folder))
    unwanted = "cancelled" if is_cancelled(folder) else None
    decision = decide(known, job.attempts, unwanted=unwanted)
    while decision.again:
        known.append(_start_once(folder, job, batch, asked))
        decision = decide(known, job.attempts, unwanted=batch.unwanted(known[-1]))
        if decision.again and batch.requeue(known[-1].sick):
            break
    print(f"rlt-dist: job {batch.job_id}: {decision.why}", flush=True)
    return decision.status


def _start_once(folder: Path, job: Job, batch: Batch, asked: Signals) -> Start:
    """Start the ranks on nodes that are fit, and remember what became of them."""
    config = load_typed(folder / CONFIG, RunConfig)
    layout = lay_out(config, len(batch.nodes), job.processes)
    begun = Begun(
        job_id=batch.job_id,
        nodes=batch.nodes,
        mesh=str(layout.axes),
        idle=layout.idle,
        began=time.time(),
        from_step=_newest_step(job.run_folder),
    )
    write_record(folder / RUNNING, begun)
    _announce(begun)
    try:
        outcome = _unfit(folder, job, batch, asked) or _run_ranks(folder, job, batch, layout)
    except (UserError, OSError) as error:
        outcome = _Outcome(how_of(error), str(error))
    start = _ended(job, begun, outcome)
    try:
        _remember(folder, start)
    except OSError as error:  # The next start does it, or ends.
        if (why := disk_trouble(error)) is None:
            raise
        warn(why)
    return start


def _announce(begun: Begun) -> None:
    idle = f", {begun.idle} places idle" if begun.idle else ""
    print(
        f"rlt-dist: job {begun.job_id}: from step {begun.from_step} on {', '.join(begun.nodes)}: "
        f"mesh {begun.mesh}{idle}",
        flush=True,
    )


@dataclass(frozen=True)
class _Outcome:
    """How a start ended, and which nodes were found to be sick."""

    how: How
    why: str | None
    sick: tuple[str, ...] = ()


def _unfit(folder: Path, job: Job, batch: Batch, asked: Signals) -> _Outcome | None:
    """Why the ranks cannot be started on these nodes at this time."""
    sick = _sick_nodes(folder, job, batch, asked)
    if asked.first:
        return _Outcome("stopped", f"stopped before the first step: was sent {asked.first}")
    if not sick:
        return None
    why = "; ".join(f"{node}: {trouble}" for node, trouble in sick.items())
    if len(sick) == len(batch.nodes) > 1:  # Then it is hardly the nodes.
        return _Outcome("failed", why)
    return _Outcome("sick", why, tuple(sick))


def _sick_nodes(folder: Path, job: Job, batch: Batch, asked: Signals) -> dict[str, str]:
    """The nodes that are not fit to train, and why."""
    where = *map(str, batch.meeting), str(len(batch.nodes))
    program = ["-P", "-m", "rlt_dist.jobs.health", str(folder), *where]
    until = time.monotonic() + LIMIT
    # A file: the end of a pipe would have to be waited for as long as a hung node holds it.
    with TemporaryFile("w+") as told:
        process = begin(batch.once_a_node(program), output=told)
        while process.poll() is None and asked.first is None and time.monotonic() < until:
            time.sleep(0.1)
        end(process)
        told.seek(0)
        return judge(batch.nodes, parse_reports(told.read()), job.gpus)


def _run_ranks(folder: Path, job: Job, batch: Batch, layout: Layout) -> _Outcome:
    """Train until the ranks end; where nodes stay healthy, torchrun starts them again itself."""
    program = ["-m", "rlt_dist", "train", str(folder / CONFIG)]
    program += [*layout.axes.overrides(), *job.arguments]
    places = [ranks for ranks in layout.ranks if ranks]
    launch = batch.ranks(program, places, job.in_job_restarts, math.ceil(job.lead))
    ending = run_ranks_with(launch.command, launch.environment_in(os.environ), job.run_folder)
    return _Outcome(ending.how, ending.why)


def _ended(job: Job, begun: Begun, outcome: _Outcome) -> Start:
    return Start(
        **begun.model_dump(),
        ended=time.time(),
        how=outcome.how,
        why=outcome.why,
        to_step=_newest_step(job.run_folder),
        sick=outcome.sick,
    )


def _remember(folder: Path, start: Start) -> None:
    add_start(folder, start)
    (folder / RUNNING).unlink()


def _remember_lost_start(folder: Path, job: Job) -> None:
    """The start before, if nobody could remember it: its first node was lost, or it was killed."""
    if (folder / RUNNING).is_file():
        begun = read_record(folder / RUNNING, Begun)
        why = f"no word of its end: node {begun.nodes[0]} was lost, or the job was killed"
        _remember(folder, _ended(job, begun, _Outcome("failed", why)))


def _newest_step(run_folder: Path) -> int:
    """The step of the newest checkpoint whose files are all there; 0 without one.

    Their content is looked at by who loads them: that can take minutes.
    """
    for path in reversed(checkpoints(run_folder / CHECKPOINTS)):
        try:
            files = read_manifest(path).files
            if all((path / name).stat().st_size == file.bytes for name, file in files.items()):
                return step_of(path)
        except (UserError, FileNotFoundError):
            continue
    return 0


def main(arguments: Sequence[str]) -> int:
    """Supervise the job of the folder that the arguments name."""
    folder = Path(arguments[0]).absolute()
    with heard() as asked:
        # The job script holds back what it is sent before somebody hears it.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        # At a second signal the ranks end at once, and this process as soon as they have.
        asked.at_second = lambda _: None
        try:
            return supervise(folder, batch_of(folder, asked), asked)
        except (UserError, OSError) as error:
            if (why := one_line(error)) is None:
                raise
            show_error(why)
            return STATUS[how_of(error)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
