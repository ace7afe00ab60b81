"""Runs that are saved on one mesh and go on on another, held to those that were not interrupted."""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rlt_dist.checkpoint.load import stored_tensors
from rlt_dist.checkpoint.manifest import folder_name
from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.mesh.axes import Axes
from rlt_dist.train.check.campaign import TOLERANCE, Precision
from rlt_dist.train.check.case import Named
from rlt_dist.train.check.launch import kept_after_errors, launch
from rlt_dist.train.check.resume_case import NUMBERS, ResumeCase
from rlt_dist.train.start import check_mesh

_PROGRAM = "rlt_dist.train.check.resume_case"
_PARTS = {"model": "parameters", "optimizer": "optimizer", "state": "state", "cursors": "cursors"}
"""What a tensor is a part of, by the first part of its name in a checkpoint."""


@dataclass(frozen=True)
class Side:
    """Where a run is saved, or goes on.

    Attributes:
        choices: overrides of the form KEY=VALUE that hold there.
    """

    mesh: Axes
    choices: Sequence[str]


@dataclass(frozen=True)
class Resumptions:
    """What is to be checked: every configuration, from every side to every side.

    Attributes:
        files: configurations; of their data only lanes and segment matter.
        before, after: optimizer steps up to the checkpoint, and beyond it.
    """

    files: Sequence[Path]
    sources: Sequence[Side]
    targets: Sequence[Side]
    vocabulary: int
    before: int
    after: int
    precision: Precision


@dataclass(frozen=True)
class Resumed:
    """The largest relative errors of a run that went on, over its steps, tensors and ranks.

    Attributes:
        errors: of loss, gradient_norm, parameters, optimizer, state and cursors.
        worst: of those that decide, with its name.
    """

    file: Path
    source: Axes
    target: Axes
    errors: dict[str, float]
    worst: Named
    ok: bool


_Pair = tuple[Path, Side, Side, ResumeCase]


def check_resumptions(wanted: Resumptions) -> Iterator[Resumed]:
    """Run everything: each number of ranks saves in one launch, and goes on in another.

    The largest does both in one, after the others have saved.

    Raises:
        UserError: a configuration is wrong, a mesh is impossible, or a rank failed.
    """
    savers, pairs = _cases(wanted)
    sizes = {source.mesh.size for source in wanted.sources}
    sizes |= {target.mesh.size for target in wanted.targets}
    *smaller, largest = sorted(sizes)
    with kept_after_errors() as folder:
        for size in smaller:
            _launch(folder, size, savers)
        for size in (largest, *reversed(smaller)):
            here = [pair for pair in pairs if pair[2].mesh.size == size]
            first = savers if size == largest else []
            _launch(folder, size, [*first, *((target, case) for *_, target, case in here)])
            for file, source, target, case in here:
                errors = _worst_of_ranks(folder, case, size)
                yield _result(file, source, target, errors, wanted.precision)


def _launch(folder: Path, size: int, cases: Sequence[tuple[Side, ResumeCase]]) -> None:
    here = [case for side, case in cases if side.mesh.size == size]
    if here:
        launch(folder, size, _PROGRAM, here)


def _cases(wanted: Resumptions) -> tuple[list[tuple[Side, ResumeCase]], list[_Pair]]:
    """Runs that save, and those that go on from them; all is known to fit its mesh."""
    savers: list[tuple[Side, ResumeCase]] = []
    pairs: list[_Pair] = []
    for file, source in product(wanted.files, wanted.sources):
        saver = _case(wanted, file, source, f"saved-{len(savers)}", None)
        savers.append((source, saver))
        for target in wanted.targets:
            case = _case(wanted, file, target, f"resumed-{len(pairs)}", saver.name)
            pairs.append((file, source, target, case))
    return savers, pairs


def _case(wanted: Resumptions, file: Path, side: Side, name: str, source: str | None) -> ResumeCase:
    same = f"train.precision={wanted.precision}"
    config = load_typed(file, RunConfig, [*side.mesh.overrides(), same, *side.choices])
    check_mesh(config, wanted.vocabulary, side.mesh)
    return ResumeCase(
        name=name,
        config=config,
        vocabulary=wanted.vocabulary,
        before=wanted.before,
        after=wanted.after,
        source=source,
    )


def _worst_of_ranks(folder: Path, case: ResumeCase, ranks: int) -> dict[str, float]:
    """By name; what no rank has is infinitely far off."""
    last = folder / str(case.source) / folder_name(case.before + case.after)
    worst = dict.fromkeys((*NUMBERS, *stored_tensors(last)), -1.0)
    for rank in range(ranks):
        found = json.loads((folder / f"{case.name}-{rank}.json").read_text())
        for name, error in found.items():
            worst[name] = max(worst.get(name, -1.0), error)
    return {name: error if error >= 0 else math.inf for name, error in worst.items()}


def _result(
    file: Path, source: Side, target: Side, found: dict[str, float], precision: Precision
) -> Resumed:
    errors = dict.fromkeys((*NUMBERS, *_PARTS.values()), 0.0)
    parts = {name: _PARTS.get(name.partition(".")[0], name) for name in found}
    for name, error in found.items():
        errors[parts[name]] = max(errors[parts[name]], error)
    limit, decisive = TOLERANCE[precision], set(errors)
    if source == target:
        limit = 0.0
    elif precision != "float64":
        decisive = {"loss", "cursors"} | ({"gradient_norm"} if precision == "float32" else set())
    worst = max(Named(error, name) for name, error in found.items() if parts[name] in decisive)
    return Resumed(file, source.mesh, target.mesh, errors, worst, worst.error <= limit)
