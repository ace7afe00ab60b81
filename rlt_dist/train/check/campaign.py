"""Configurations x meshes x variants, run as ranks on this machine and held to one process."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Literal

from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.mesh.axes import Axes
from rlt_dist.train.check.case import Case, Deviation, deviation_of
from rlt_dist.train.check.launch import kept_after_errors, launch
from rlt_dist.train.start import check_mesh

Precision = Literal["float64", "float32", "bfloat16"]
TOLERANCE: dict[Precision, float] = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 1e-2}
"""Largest relative error: in float64 of everything; in float32 of losses and gradient norms alone,
since the optimizer's division makes an error of rounding as large as it likes where a gradient is
small; in bfloat16 of losses."""

_PROGRAM = "rlt_dist.train.check.case"

# What the reference is computed with, whatever its configuration says: one piece, nothing again.
_PLAIN = (
    "mesh.data=1",
    "mesh.pipeline=1",
    "mesh.tensor=1",
    "train.micro_batch=null",
    "recompute.decoder_chunk=none",
    "recompute.layers=false",
    "optimizer.engine=torch",
    "pipeline={}",
)


@dataclass(frozen=True)
class Campaign:
    """What is to be checked.

    Attributes:
        files: configurations; of their data only lanes and segment matter.
        variants: for each, overrides of the form KEY=VALUE; the empty one is the file as it stands.
        steps: optimizer steps of each run.
    """

    files: Sequence[Path]
    meshes: Sequence[Axes]
    variants: Sequence[Sequence[str]]
    vocabulary: int
    steps: int
    precision: Precision


@dataclass(frozen=True)
class Row:
    """One run's result."""

    file: Path
    variant: str
    mesh: Axes
    deviation: Deviation
    ok: bool


def check_meshes(campaign: Campaign) -> Iterator[Row]:
    """Run everything, as many ranks at a time as a mesh has, and give the results of each size.

    Raises:
        UserError: a configuration is wrong, a mesh is impossible, or a rank failed.
    """
    references, runs = _cases(campaign)
    with kept_after_errors() as folder:
        launch(folder, 1, _PROGRAM, references)
        for size in sorted({mesh.size for _, _, mesh, _ in runs}):
            here = [run for run in runs if run[2].size == size]
            launch(folder, size, _PROGRAM, [case for *_, case in here])
            for file, variant, mesh, case in here:
                deviation = deviation_of(folder, case, size)
                yield Row(file, variant, mesh, deviation, _is_small(deviation, campaign.precision))


_Run = tuple[Path, str, Axes, Case]


def _cases(campaign: Campaign) -> tuple[list[Case], list[_Run]]:
    """The references, and the runs that are held to them; all is known to fit.

    What a variant says of the result holds for its reference as well.
    """
    references: dict[str, Case] = {}
    runs: list[_Run] = []
    for file, variant in product(campaign.files, campaign.variants):
        name = f"reference-{len(references)}"
        plain = _case(campaign, file, [*variant, *_PLAIN], name, None)
        reference = references.setdefault(plain.config.model_dump_json(), plain)
        for mesh in campaign.meshes:
            name, overrides = f"run-{len(runs)}", [*variant, *mesh.overrides()]
            case = _case(campaign, file, overrides, name, reference.name)
            check_mesh(case.config, campaign.vocabulary, mesh)
            runs.append((file, " ".join(variant), mesh, case))
    return list(references.values()), runs


def _case(
    campaign: Campaign, file: Path, overrides: Iterable[str], name: str, reference: str | None
) -> Case:
    same = f"train.precision={campaign.precision}"
    return Case(
        name=name,
        config=load_typed(file, RunConfig, [*overrides, same]),
        vocabulary=campaign.vocabulary,
        steps=campaign.steps,
        reference=reference,
    )


def _is_small(deviation: Deviation, precision: Precision) -> bool:
    errors = [deviation.loss]
    if precision != "bfloat16":
        errors.append(deviation.gradient_norm)
    if precision == "float64":
        errors += [deviation.parameters.error, deviation.state.error]
    return max(errors) <= TOLERANCE[precision]
