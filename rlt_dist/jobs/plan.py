"""Whether a job can do what its run asks, found out before a job id is spent."""

import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rlt_dist.checkpoint.manifest import checkpoints
from rlt_dist.checkpoint.run_folder import CHECKPOINTS, check_free
from rlt_dist.config.run import RunConfig
from rlt_dist.costs.estimate import Estimate, estimate_run, refusal
from rlt_dist.costs.run import run_of
from rlt_dist.data.stream.corpora import open_corpora
from rlt_dist.jobs.nodes import lay_out
from rlt_dist.mesh.axes import Axes, axes_of
from rlt_dist.train.start import check_corpora, check_mesh, starting_point
from rlt_dist.train.usage import known_peak
from rlt_dist.util.errors import UserError

_LARGEST = 4
"""Parts of a rank's memory that are shown."""


@dataclass(frozen=True)
class Room:
    """What a job is to get.

    Attributes:
        nodes, nodes_min: how many, and with how few it may go on.
        processes: ranks of each.
        rank_memory: bytes that a rank may take; None: not known.
        memory_from: where that is known from, for messages.
    """

    nodes: int
    nodes_min: int
    processes: int
    rank_memory: float | None = None
    memory_from: str = ""


@dataclass(frozen=True)
class Plan:
    """A run that fits.

    Attributes:
        config: resolved.
    """

    config: RunConfig
    axes: Axes
    needs: Estimate

    def lines(self, room: Room) -> list[str]:
        """What a person should know before it starts."""
        nodes = f"{room.nodes} nodes" if room.nodes > 1 else "one node"
        least = f", at least {room.nodes_min}" if room.nodes_min < room.nodes else ""
        memory = self.needs.memory
        parts = sorted(memory.parts.items(), key=lambda part: -part[1])[:_LARGEST]
        ranks = f"{room.processes} ranks" if room.processes > 1 else "one rank"
        return [
            f"{self.config.run_folder}: mesh {self.axes} (data x pipeline x tensor), {nodes}"
            f"{least}, {ranks} each",
            f"memory: {_gib(memory.peak)} at the fullest moment of a rank of stage "
            f"{self.needs.stage}: " + ", ".join(f"{part} {_gib(n)}" for part, n in parts),
            f"disk: {_gib(self.needs.checkpoint)} a checkpoint",
        ]


def plan_run(
    config: RunConfig, room: Room, *, compare: bool = True, reset_state: bool = False
) -> Plan:
    """Check a run against what its job is to get.

    Args:
        config: resolved.
        compare: check that the run's newest checkpoint fits the configuration, too; it is read.

    Raises:
        UserError: the mesh does not fit the nodes, the lanes not the mesh, or the run not its
            folder, its corpora, the memory or the disk; one line.
    """
    _check_name(config.run_folder)
    check_free(config.run_folder)
    axes = axes_of(config.mesh, room.nodes * room.processes)
    corpora = open_corpora(config.data)
    vocabulary = corpora.tokenizer.vocabulary
    check_mesh(config, vocabulary, axes)
    lay_out(config, room.nodes_min, room.processes)
    check_corpora(config, corpora)
    known_peak(config, axes.size)
    needs = estimate_run(run_of(config, vocabulary, axes), None)
    _check_memory(needs, room)
    _check_disk(config, needs.checkpoint)
    if compare:
        starting_point(config, corpora, axes, reset_state)
    return Plan(config, axes, needs)


def _check_name(run_folder: Path) -> None:
    """A job's code is in its run folder: on Python's path, in which a colon parts folders.

    The folder is written into the job script, too, and a line of it is an option of Slurm's, which
    reads a backslash as no other character.
    """
    name = str(run_folder)
    wrong = next((letter for letter in name if letter in ":\\" or not letter.isprintable()), None)
    if wrong is not None:
        raise UserError(f"run_folder {name!r}: a job's folder cannot have a {wrong!r} in its name")


def _check_memory(needs: Estimate, room: Room) -> None:
    if room.rank_memory is not None:
        devices = room.nodes * room.processes
        why = refusal(needs, room.rank_memory, room.memory_from, devices)
        if why is not None:
            raise UserError(why)


def _check_disk(config: RunConfig, checkpoint: int) -> None:
    """There is room for as many checkpoints as are kept, and for the next one beside them."""
    folder = config.run_folder
    kept = min(len(checkpoints(folder / CHECKPOINTS)), config.checkpoint.keep)
    more = config.checkpoint.keep + 1 - kept
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if checkpoint * more > free:
        raise UserError(
            f"{folder}: {more} more checkpoints of {_gib(checkpoint)} have to fit "
            f"beside each other (checkpoint.keep and one), and {_gib(free)} are free; "
            "make room, or lower checkpoint.keep"
        )


def _gib(size: float) -> str:
    return f"{size / 2**30:,.3f} GiB"


def tasks_of(array: str) -> list[int]:
    """The tasks of an array as Slurm writes them: `0-3`, `1,5,7`, `0-15:4`, any with `%2`.

    Raises:
        UserError: it is none of these.
    """
    tasks: list[int] = []
    for part in re.sub(r"%\d+$", "", array).split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+)(?::([1-9]\d*))?)?", part)
        if found is None:
            raise UserError(f"--array {array}: write 0-3, 1,5,7 or 0-15:4, with %2 for two at once")
        first, last, step = found.groups()
        tasks += range(int(first), int(last or first) + 1, int(step or 1))
    if not tasks or len(set(tasks)) < len(tasks):
        raise UserError(f"--array {array}: names {'a task twice' if tasks else 'no task'}")
    return tasks


def own_folders(configs: Sequence[RunConfig]) -> None:
    """Check that no two tasks of an array write into the same run folder.

    Raises:
        UserError: two do.
    """
    seen: set[Path] = set()
    for config in configs:
        if config.run_folder in seen:
            raise UserError(
                f"{config.run_folder}: is the run folder of several tasks; put the task's number "
                "into it, as in run_folder=runs/seed-{task}"
            )
        seen.add(config.run_folder)


def seconds_of(limit: str) -> float | None:
    """A time limit as Slurm writes it; None: it sets none, or is no time, which Slurm will say."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", limit)
    if found is None:
        return None
    days, *rest = found.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:  # days-hours[:minutes[:seconds]]
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
        return float(((int(days) * 24 + hours) * 60 + minutes) * 60 + seconds)
    if len(numbers) == 3:
        return float(numbers[0] * 3600 + numbers[1] * 60 + numbers[2])
    return float(numbers[0] * 60 + (numbers[1] if len(numbers) == 2 else 0))
