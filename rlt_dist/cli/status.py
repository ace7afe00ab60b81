"""`rlt-dist status`, `logs`, `cancel`: what becomes of runs."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlt_dist.util.errors import Trouble, UserError
from rlt_dist.util.log import show_error

if TYPE_CHECKING:
    from collections.abc import Callable

    from rlt_dist.jobs.status import Status

_ASK = 10.0
"""Seconds after which Slurm is asked again whether a job has ended."""

RunFolder = Annotated[Path, typer.Argument(help="A run folder.")]


def status(
    runs: Annotated[
        list[Path] | None, typer.Argument(help="Run folders [default: all below runs/].")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One object a line.")] = False,
) -> None:
    """Show how runs are getting on, whoever started them.

    State: pending or running, and why; or how the run ended: finished, stopped (saved, and can go
    on), guard, mistake, failed, sick (a node), cancelled, lost (without a word), or what Slurm
    says. A checkpoint is shown with its age, restarts are the newest job's.

    Examples:

    `rlt-dist status`

    `rlt-dist status runs/rlt --json`
    """
    from rlt_dist.jobs.status import run_folders, statuses

    folders = [run.absolute() for run in runs] if runs else run_folders(Path("runs").absolute())
    if not folders:
        raise UserError("runs/: holds no run; name run folders, or start one")
    found = statuses(folders)
    if as_json:
        for each in found:
            _print_json(each)
    else:
        _show(found)


def logs(
    run: RunFolder,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")
    ] = False,
    rank: Annotated[
        int | None, typer.Option(min=0, help="One rank's own log [default: the job's output].")
    ] = None,
) -> None:
    """Show what a run's newest job has printed, or one of its ranks.

    Examples:

    `rlt-dist logs runs/rlt -f`

    `rlt-dist logs runs/rlt --rank 3`
    """
    from rlt_dist.jobs.status import log_of, statuses

    run = run.absolute()
    statuses([run])  # it is one
    path = log_of(run, rank)
    try:
        _copy(path, (lambda: statuses([run])[0].active) if follow else (lambda: False))
    except KeyboardInterrupt:
        return
    if not path.is_file():
        raise UserError(f"{path}: is not there; `rlt-dist status {run}` says why")
    (status,) = statuses([run])
    if path.stat().st_size == 0 and not status.active:
        said = status.why or f"`sacct --jobs={status.job_id}` may say why"
        raise Trouble(f"{path}: is empty, job {status.job_id} printed nothing; {said}")


def cancel(runs: Annotated[list[Path], typer.Argument(help="Run folders.")]) -> None:
    """Cancel runs: a job that waits leaves the queue, one that runs saves and ends.

    Slurm's own `scancel` ends a job for good, too, but may kill it before it has saved: the site's
    KillWait says after how many seconds.

    Example: `rlt-dist cancel runs/rlt`
    """
    from rlt_dist.jobs.active import cancel as cancel_run

    failed = False
    for run in runs:
        try:
            jobs = cancel_run(run.absolute())
        except UserError as error:  # The others are to be cancelled all the same.
            show_error(str(error))
            failed = True
            continue
        for job in jobs:
            ends = f"saves and ends; `{job.kill}` kills it if it does not"
            does = ends if job.runs else "is cancelled"
            typer.echo(f"{run}: job {job.job_id}, which was {job.state.lower()}, {does}")
    if failed:
        raise typer.Exit(2)


def _copy(path: Path, goes_on: "Callable[[], bool]") -> None:
    """Print a file as it grows."""
    asked, going, place = time.monotonic(), goes_on(), 0
    while True:
        if path.is_file():
            with path.open("rb") as file:
                file.seek(place)
                while block := file.read(1 << 16):
                    typer.echo(block, nl=False)
                place = file.tell()
        if not going:
            return
        time.sleep(0.2)
        if time.monotonic() > asked + _ASK:
            asked, going = time.monotonic(), goes_on()


def _print_json(status: "Status") -> None:
    from dataclasses import asdict

    from rlt_dist.util.records import to_json

    print(to_json(asdict(status) | {"run_folder": str(status.run_folder)}))


def _show(found: "list[Status]") -> None:
    from rich import box
    from rich.table import Table

    from rlt_dist.cli.console import console

    table = Table(box=box.SIMPLE)
    for name in ("run", "state", "job"):
        table.add_column(name, overflow="fold")
    for name in ("step", "tokens/s", "loss", "checkpoint", "mesh", "restarts"):
        table.add_column(name, justify="right")
    for each in found:
        table.add_row(*_row(each))
    console(width=200).print(table)


def _row(status: "Status") -> tuple[str, ...]:
    folder, here = status.run_folder, Path.cwd()
    saved = "-"
    if status.checkpoint is not None and status.saved is not None:
        saved = f"{status.checkpoint:,}, {_age(time.time() - status.saved)} ago"
    return (
        str(folder.relative_to(here) if folder.is_relative_to(here) else folder),
        f"{status.state} ({status.why})" if status.why else status.state,
        status.job_id or "-",
        f"{status.step:,} of {'?' if status.steps is None else format(status.steps, ',')}",
        "-" if status.tokens_per_second is None else f"{status.tokens_per_second:,.0f}",
        "-" if status.loss is None else f"{status.loss:.4f}",
        saved,
        (status.mesh or "-") + (f" ({status.idle} idle)" if status.idle else ""),
        str(status.restarts),
    )


def _age(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
