"""One run that saves, or one that goes on from what another saved, on its ranks.

The program of the ranks: `python -m rlt_dist.train.check.resume_case FOLDER`. A run that saves
writes a checkpoint, goes on, and writes another at its end; of a run that goes on from the first,
each rank compares what it then has with its own part of the last, which is read whole and cut by
the plan: not by the code that loads checkpoints.
"""

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from pydantic import BaseModel
from torch import Tensor

from rlt_dist.checkpoint.load import load_whole, stored_tensors
from rlt_dist.checkpoint.manifest import folder_name
from rlt_dist.config.run import RunConfig
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.mesh.world import World
from rlt_dist.parallel.engine.rows import own_rows
from rlt_dist.parallel.mesh import mesh_of
from rlt_dist.parallel.plan.cut import Cut
from rlt_dist.train.check.case import relative_error
from rlt_dist.train.check.launch import run_cases
from rlt_dist.train.rehearsal import Rehearsal

NUMBERS = ("loss", "gradient_norm")


class ResumeCase(BaseModel):
    """A run; `name` tells its files from others'.

    Attributes:
        before: steps up to the checkpoint.
        after: steps beyond it.
        source: the case that saved what it goes on from; None: it is one that saves.
    """

    name: str
    config: RunConfig
    vocabulary: int
    before: int
    after: int
    source: str | None


def run_case(case: ResumeCase, world: World, folder: Path) -> None:
    """Save and go on, or go on from what was saved and tell how far the end is from that run's."""
    with mesh_of(case.config, world) as mesh:
        rehearsal = Rehearsal(case.config, case.vocabulary, mesh)
        if case.source is None:
            for _ in range(case.before):
                rehearsal.step()
            rehearsal.save(folder / case.name)
        else:
            rehearsal.resume(folder / case.source / folder_name(case.before))
        results = [rehearsal.step() for _ in range(case.after)]
        numbers = {key: [getattr(result, key) for result in results] for key in NUMBERS}
        if case.source is None:
            rehearsal.save(folder / case.name)
            if world.leads:
                (folder / f"{case.name}.json").write_text(json.dumps(numbers))
            return
        expected = json.loads((folder / f"{case.source}.json").read_text())
        errors = {key: _of_numbers(numbers[key], expected[key]) for key in NUMBERS}
        last = folder / case.source / folder_name(case.before + case.after)
        errors |= dict(_errors(rehearsal, mesh, last))
        (folder / f"{case.name}-{world.rank}.json").write_text(json.dumps(errors))


def _of_numbers(found: list[float], expected: list[float]) -> float:
    whole = (torch.tensor(numbers, dtype=torch.float64) for numbers in (found, expected))
    return max(map(relative_error, *whole))


def _errors(rehearsal: Rehearsal, mesh: Mesh, last: Path) -> Iterator[tuple[str, float]]:
    """The relative error of all that this rank has, by its name in a checkpoint."""
    whole = load_whole(last, stored_tensors(last))
    for name, found, expected in _parts(rehearsal, mesh, whole):
        yield name, float("inf") if expected is None else relative_error(found, expected)


def _parts(
    rehearsal: Rehearsal, mesh: Mesh, whole: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor | None]]:
    """What this rank has, and what it should be."""
    local, contents, place, axes = rehearsal.local, rehearsal.contents(), mesh.place, mesh.axes
    lanes = slice(rehearsal.lanes.start, rehearsal.lanes.stop)

    def cut(name: str, by: Cut | None) -> Tensor | None:
        if name not in whole or by is None:
            return whole.get(name)
        return by.part(whole[name], place.tensor, axes.tensor)

    for name, found in contents.model.items():
        yield f"model.{name}", found.detach(), cut(f"model.{name}", local.layouts[name].cut)
    for name, found in contents.optimizer.items():
        _, _, parameter = name.partition(".")
        expected = cut(f"optimizer.{name}", local.layouts[parameter].cut if parameter else None)
        if expected is not None and parameter:
            expected = own_rows(expected, place.data, axes.data)
        yield f"optimizer.{name}", found, expected
    for name, found in contents.state.items():
        expected = cut(f"state.{name}", local.plan.state_cut(name))
        yield f"state.{name}", found, None if expected is None else expected[lanes]
    yield "cursors", contents.cursors, whole["cursors"][lanes]


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), ResumeCase, run_case)
