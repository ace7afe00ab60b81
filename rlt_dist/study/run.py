"""A study's points really trained: here one after the other, or as arrays of Slurm.

OUT/points/NAME        a point's run folder
OUT/points/NAME.yaml   the configuration that its ranks are started with here
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Literal

from rlt_dist.checkpoint.run_folder import ANEW, CONFIG, check_unchanged, is_run_folder
from rlt_dist.config.load import load_typed, validate
from rlt_dist.config.run import RunConfig
from rlt_dist.jobs.job import Job, job_folders
from rlt_dist.jobs.launchers import torchrun
from rlt_dist.jobs.plan import Room, plan_run
from rlt_dist.jobs.ranks import run_ranks_with
from rlt_dist.jobs.status import Status, statuses
from rlt_dist.jobs.submit import Wanted, current_code, make_ready, submit
from rlt_dist.mesh.axes import Axes, least_axes
from rlt_dist.study.grid import Point, Study
from rlt_dist.study.measure import measure
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import write_atomic

POINTS = "points"
_SAVES = 4
"""Checkpoints of a point: as much of it is lost at most when it is killed."""
_LOOKS = 8
"""Steps of a point of which all ranks together tell what they waited for and sent."""

Say = Callable[[str], None]
Standing = Literal["done", "active", "open"]


@dataclass(frozen=True)
class Task:
    """A point as it is to be trained.

    Attributes:
        number: of the point in its study; its number in an array.
        config: resolved; its run folder is the point's.
        standing: done; active, by another process or job; open.
        why: what it waits for, or who has it.
    """

    number: int
    point: Point
    config: RunConfig
    standing: Standing
    why: str

    @property
    def told(self) -> str:
        """How far it is, in words."""
        return f"{self.point.name}: {self.standing}{f', {self.why}' * (self.standing != 'done')}"


@dataclass(frozen=True)
class Outcome:
    """What became of the open points.

    Attributes:
        failed: by name, why.
        stopped: this process was asked to stop; what is open can be gone on with.
    """

    failed: dict[str, str]
    stopped: bool = False


def folder_of(output: Path, point: Point) -> Path:
    """The run folder of a point."""
    return output / POINTS / point.name


def tasks_of(study: Study, axes: Mapping[str, Axes], output: Path) -> list[Task]:
    """What is to be done for a study, and how far that is.

    Args:
        axes: by the point's name; a point without is left out.

    Raises:
        UserError: a point that was begun has another configuration now, or a configuration is
            wrong.
    """
    folders = {point.name: folder_of(output, point).absolute() for point in study.points}
    standing = _standings(list(folders.values()))
    tasks = []
    for number, point in enumerate(study.points):
        if point.name not in axes:
            continue
        folder = folders[point.name]
        config = point_config(study, point, axes[point.name], folder)
        check_unchanged(config)
        tasks.append(Task(number, point, config, *standing[folder]))
    return tasks


def point_config(study: Study, point: Point, axes: Axes, folder: Path) -> RunConfig:
    """The run of a point, resolved: as many steps as the study has, and nothing beside them.

    Training waits for its saves: no step is timed beside one.

    Raises:
        UserError: the point's configuration does not go with the mesh.
    """
    steps, content = study.config.steps, point.config.model_dump()
    content |= {"run_folder": folder, "mesh": asdict(axes)}
    cluster = (study.file.parent / study.config.cluster).resolve()
    content["train"] |= {"steps": steps, "log_every": max(1, steps // _LOOKS), "cluster": cluster}
    content["schedule"]["warmup"] = min(content["schedule"]["warmup"], steps)
    content["validation"]["every"] = None
    saves = {"every": max(1, steps // _SAVES), "asynchronous": False, "keep": 2}
    content["checkpoint"] |= saves | {"keep_every": None}
    return validate(content, RunConfig, f"{study.file}: {point.name}").resolved()


def check_begun(study: Study, point: Point, folder: Path) -> None:
    """Check that a point's run, if it was begun, is the one that the study has now.

    Where the study chooses meshes, any mesh of the point's devices will do.

    Raises:
        UserError: its configuration is another.
    """
    if not is_run_folder(folder):
        return
    axes, devices = least_axes(point.config.mesh), point.nodes * study.cluster.devices_per_node
    if study.config.mesh == "best":
        axes = least_axes(load_typed(folder / CONFIG, RunConfig).mesh)
    if axes.size != devices:
        raise UserError(f"{folder}: was begun on {axes}, which are not {devices} devices; {ANEW}")
    check_unchanged(point_config(study, point, axes, folder))


def run_here(study: Study, tasks: Sequence[Task], say: Say) -> Outcome:
    """Train open points on this machine, one after the other, each rank a process.

    A rank is a device of the cluster, which here is one core, unless OMP_NUM_THREADS says
    otherwise. A point that others have had meanwhile is left alone. Only the main thread may call
    it.
    """
    failed: dict[str, str] = {}
    for place, task in enumerate(tasks, 1):
        name, ranks = task.point.name, task.point.nodes * study.cluster.devices_per_node
        head = f"[{place}/{len(tasks)}] {name}: {_ranks(ranks)}"
        (now,) = _standings([task.config.run_folder]).values()
        task = replace(task, standing=now[0], why=now[1])
        if task.standing != "open":
            say(task.told)
            continue
        try:
            _check_here(study, task)
            say(f"{head} ...")
            ending = run_ranks_with(*_launch(task, ranks), task.config.run_folder)
        except UserError as error:
            failed[name] = str(error)
            continue
        if ending.how == "stopped":
            return Outcome(failed, stopped=True)
        if ending.how != "finished":
            failed[name] = ending.why or ending.how
            continue
        say(f"{head}: {_told(study, task)}")
    return Outcome(failed)


def _launch(task: Task, ranks: int) -> tuple[tuple[str, ...], dict[str, str]]:
    """The command and the environment that start a point's ranks here."""
    file = task.config.run_folder.with_name(f"{task.point.name}.yaml")
    file.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(file, task.config.to_yaml())
    launch = torchrun(("-m", "rlt_dist", "train", str(file)), ranks)
    return launch.command, {"OMP_NUM_THREADS": "1", **os.environ, **launch.environment}


def _check_here(study: Study, task: Task) -> None:
    """Raises UserError where this machine is not to train a point."""
    cluster, nodes = study.cluster, task.point.nodes
    if cluster.cores is None and nodes > 1:
        raise UserError(f"{nodes} nodes of {cluster.name} are not this machine; add --slurm")
    plan_run(task.config, _room(study, nodes))


def submit_points(
    study: Study,
    tasks: Sequence[Task],
    template: Path,
    options: tuple[Sequence[str], Sequence[str]],
    say: Say,
) -> tuple[list[str], Outcome]:
    """Submit open points to Slurm: an array for each number of nodes; their ids.

    Args:
        template: of the job script.
        options: of sbatch: those that hold for later submissions of a point, too, and others.
    """
    fit, failed = _fitting(study, tasks)
    ids = []
    for nodes, group in groupby(sorted(fit, key=_nodes), key=_nodes):
        array = {task.number: task for task in group}
        try:
            ids.append(_submit_array(study, array, template, options, say))
        except UserError as error:
            failed |= {task.point.name: str(error) for task in array.values()}
            continue
        names = ", ".join(task.point.name for task in array.values())
        say(f"job {ids[-1]}, {nodes} node{'s' * (nodes > 1)} each: {names}")
    return ids, Outcome(failed)


def _submit_array(
    study: Study,
    tasks: Mapping[int, Task],
    template: Path,
    options: tuple[Sequence[str], Sequence[str]],
    say: Say,
) -> str:
    nodes = {task.point.nodes for task in tasks.values()}.pop()
    lasting, once = options
    job = Job(
        run_folder=Path(),
        directory=Path.cwd(),
        nodes=nodes,
        nodes_min=nodes,
        processes=study.cluster.devices_per_node,
        options=tuple(lasting),
    )
    array = ",".join(map(str, tasks))
    wanted = Wanted(job, template, *current_code(), array=array, once=tuple(once))
    configs = {number: task.config for number, task in tasks.items()}
    # `_fitting` has compared them with their checkpoints.
    job_id, waits = submit(make_ready(wanted, configs, _room(study, nodes), compare=False))
    if waits is not None:
        say(waits)
    return job_id


def _fitting(study: Study, tasks: Sequence[Task]) -> tuple[list[Task], dict[str, str]]:
    """The points that can be trained, and by name why others cannot."""
    fit, failed = [], {}
    for task in tasks:
        try:
            plan_run(task.config, _room(study, task.point.nodes))
            fit.append(task)
        except UserError as error:
            failed[task.point.name] = str(error)
    return fit, failed


def _room(study: Study, nodes: int) -> Room:
    cluster = study.cluster
    ranks = cluster.devices_per_node
    return Room(nodes, nodes, ranks, float(cluster.usable), cluster.name)


def _nodes(task: Task) -> int:
    return task.point.nodes


def _standings(folders: Sequence[Path]) -> dict[Path, tuple[Standing, str]]:
    """By run folder, how far points are at this moment."""
    begun = [each for each in folders if is_run_folder(each) or job_folders(each)]
    known = {status.run_folder: status for status in statuses(begun)}
    return {folder: _standing(known.get(folder)) for folder in folders}


def _standing(status: Status | None) -> tuple[Standing, str]:
    """How far a point is, by what became of its run."""
    if status is None:
        return "open", "not begun"
    who = f"job {status.job_id} is {status.state}" if status.job_id else status.why or status.state
    if status.state == "finished":
        return "done", "finished"
    if status.active or status.state == "unknown":
        return "active", who
    return "open", f"{status.state} after step {status.step}"


def _ranks(number: int) -> str:
    return f"{number} rank{'s' * (number > 1)}"


def _told(study: Study, task: Task) -> str:
    measured = measure(task.point, task.config.run_folder, study.config.warmup)
    assert measured is not None  # a point has more steps than its warm-up, and has done them all
    return f"{measured.tokens_per_second:,.0f} tokens/s, {measured.seconds:.3g} s a step"
