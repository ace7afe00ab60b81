"""`rlt-dist scale run`: a study's points really trained."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rlt_dist.cli.scale import Output, StudyFile, folder_of
from rlt_dist.cli.submit import AFTER, Account, Partition, Template, Time, sort_words, template_of
from rlt_dist.util.ending import STATUS
from rlt_dist.util.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from rlt_dist.study.run import Task


def run(
    context: typer.Context,
    file: StudyFile,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY.SUB=VALUE... OPTION-OF-SBATCH...",
            help="Values that replace those of all points, and whatever else sbatch is to be told.",
        ),
    ] = None,
    output: Output = None,
    slurm: Annotated[
        bool, typer.Option("--slurm", help="Submit the points; an array for each number of nodes.")
    ] = False,
    time: Time = None,
    partition: Partition = None,
    account: Account = None,
    template: Template = None,
) -> None:
    """Train the points of a study that are not done.

    Here, one after the other, each rank a process; with `--slurm`, as jobs, whose ids are printed.
    Each point is a run in OUTPUT/points, of as many steps as the study says. The same command goes
    on with points that were stopped or failed, and leaves alone what is done or at work.

    Exit status: 0 all are done or submitted; 75 stopped, the same command goes on; 1 some failed,
    which are told at the end; 2 a mistake.

    Examples:

    `rlt-dist scale run configs/studies/small.yaml`

    `rlt-dist scale run configs/studies/txl_large_weak.yaml --slurm --gpus-per-node h100:8 --time
    30:00`
    """
    from rlt_dist.study import run as points
    from rlt_dist.study.grid import load_study
    from rlt_dist.study.meshes import meshes_of

    named = {"time": time, "partition": partition, "account": account}
    after = context.meta[AFTER]
    overrides, lasting, once = sort_words(str(file), words or [], after, named)
    if (lasting or once) and not slurm:
        raise UserError(f"{(lasting or once)[0]}: is for --slurm")
    study, folder = load_study(file, tuple(overrides)), output or folder_of(file)
    axes = meshes_of(study, folder, _say)
    tasks = points.tasks_of(study, axes, folder)
    still = [task for task in tasks if task.standing == "open"]
    _tell(tasks)
    if slurm:
        ids, outcome = points.submit_points(
            study, still, template_of(template), (lasting, once), _say
        )
        for job_id in ids:
            typer.echo(job_id)
    else:
        outcome = points.run_here(study, still, _say)
    unfit = {point.name: "no mesh fits" for point in study.points if point.name not in axes}
    _end(outcome.failed | unfit, outcome.stopped, file)


def _tell(tasks: "list[Task]") -> None:
    """What is not done because it needs not to be."""
    for task in tasks:
        if task.standing != "open":
            _say(task.told)


def _end(failed: "Mapping[str, str]", stopped: bool, file: Path) -> None:
    """Tell what failed, and exit by it."""
    for name, why in failed.items():
        _say(f"{name}: failed: {why}")
    if stopped:
        raise typer.Exit(STATUS["stopped"])
    if failed:
        _say(f"{len(failed)} failed; the same command tries them again")
        raise typer.Exit(STATUS["failed"])
    _say(f"`rlt-dist scale report {file}` shows the study")


def _say(line: str) -> None:
    typer.echo(line, err=True)
