"""One run on its ranks: trained for some steps, and compared with a reference.

This module is the program of the ranks: `python -m rlt_dist.train.check.case FOLDER`, where
FOLDER/cases.json says what to run. A reference writes what came out of it; of every other run each
rank compares what it has with its own part of a reference.
"""

import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import BaseModel
from torch import Tensor

from rlt_dist.config.run import RunConfig
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.mesh.world import World
from rlt_dist.parallel.mesh import mesh_of
from rlt_dist.parallel.plan.cut import Cut
from rlt_dist.train.check.launch import run_cases
from rlt_dist.train.rehearsal import Rehearsal

_NUMBERS = ("loss", "gradient_norm")


class Case(BaseModel):
    """A run that is compared; `name` tells its files from others'.

    Attributes:
        reference: the name of the case that it is held to; None: it is a reference itself.
    """

    name: str
    config: RunConfig
    vocabulary: int
    steps: int
    reference: str | None


class Named(NamedTuple):
    """The relative error of a tensor."""

    error: float
    name: str


class Deviation(NamedTuple):
    """The largest relative errors of a run, over its steps, tensors and ranks."""

    loss: float
    gradient_norm: float
    parameters: Named
    state: Named


def relative_error(found: Tensor, expected: Tensor) -> float:
    """max|x - y| / max(max|y|, 1e-6); infinite where a number is missing or not finite."""
    if found.shape != expected.shape:
        return float("inf")
    if not expected.numel():
        return 0.0
    error = (found.double() - expected.double()).abs().max()
    error = error / expected.double().abs().max().clamp(min=1e-6)
    return float(error) if error.isfinite() else float("inf")


def deviation_of(folder: Path, case: Case, ranks: int) -> Deviation:
    """What the ranks of a case have written."""
    files = [folder / f"{case.name}-{rank}.json" for rank in range(ranks)]
    of_ranks = [json.loads(file.read_text()) for file in files]
    reference = torch.load(folder / f"{case.reference}.pt")
    return Deviation(
        *(max(found[number] for found in of_ranks) for number in _NUMBERS),
        *(
            _worst(reference[group], [found[group] for found in of_ranks])
            for group in ("parameters", "state")
        ),
    )


def _worst(expected: Iterable[str], of_ranks: Sequence[Mapping[str, float]]) -> Named:
    """Over all ranks; a tensor that no rank has is infinitely far off."""
    worst = dict.fromkeys(expected, -1.0)
    for found in of_ranks:
        for name, error in found.items():
            worst[name] = max(worst.get(name, -1.0), error)
    return max(Named(error if error >= 0 else math.inf, name) for name, error in worst.items())


def run_case(case: Case, world: World, folder: Path) -> None:
    """Train; write what came out if it is a reference, else how far it is from one."""
    with mesh_of(case.config, world) as mesh:
        rehearsal = Rehearsal(case.config, case.vocabulary, mesh)
        results = [rehearsal.step() for _ in range(case.steps)]
        whole = {
            **{number: [getattr(result, number) for result in results] for number in _NUMBERS},
            "parameters": {n: p.detach() for n, p in rehearsal.local.parameters.items()},
            "state": rehearsal.state,
        }
        if case.reference is None:
            torch.save(whole, folder / f"{case.name}.pt")
            return
        reference = torch.load(folder / f"{case.reference}.pt")
        found = _compare(whole, reference, rehearsal, mesh)
        (folder / f"{case.name}-{world.rank}.json").write_text(json.dumps(found))


def _compare(
    whole: Mapping[str, Any], reference: Mapping[str, Any], rehearsal: Rehearsal, mesh: Mesh
) -> dict[str, Any]:
    """This rank's errors, by name."""
    local, rank, ranks = rehearsal.local, mesh.place.tensor, mesh.axes.tensor
    lanes = slice(rehearsal.lanes.start, rehearsal.lanes.stop)

    def error(found: Tensor, expected: Tensor, cut: Cut | None) -> float:
        return relative_error(found, expected if cut is None else cut.part(expected, rank, ranks))

    def of_numbers(number: str) -> float:
        found, expected = (
            torch.tensor(values, dtype=torch.float64)
            for values in (whole[number], reference[number])
        )
        return max(map(relative_error, found, expected))

    return {number: of_numbers(number) for number in _NUMBERS} | {
        "parameters": {
            name: error(found, reference["parameters"][name], local.layouts[name].cut)
            for name, found in whole["parameters"].items()
        },
        "state": {
            name: error(found, reference["state"][name][lanes], local.plan.state_cut(name))
            for name, found in whole["state"].items()
        },
    }


if __name__ == "__main__":
    run_cases(Path(sys.argv[1]), Case, run_case)
