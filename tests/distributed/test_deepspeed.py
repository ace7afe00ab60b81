"""Engine deepspeed is held to engine torch, in float32 at 1e-5: `pytest -m deepspeed`."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlt_dist.checkpoint.load import stored_tensors

pytestmark = pytest.mark.deepspeed

TOLERANCE = 1e-5
RUNS = [
    (mesh, model, stage)
    for mesh in ("2x1x1", "2x1x2", "2x2x1")
    for model in ("rlt1", "rlt2", "xl")
    for stage in ("1", "2")
    if (mesh, stage) != ("2x2x1", "2")
]


@pytest.fixture(scope="module", autouse=True)
def installed() -> None:
    pytest.importorskip("deepspeed")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mesh", "model", "stage"), RUNS)
def test_losses_and_norms_are_those_of_engine_torch(
    with_deepspeed: Path, metrics: Any, mesh: str, model: str, stage: str
) -> None:
    ours = metrics(with_deepspeed / f"{mesh}-{model}-torch" / "run")
    theirs = metrics(with_deepspeed / f"{mesh}-{model}-{stage}" / "run")
    assert [record["step"] for record in theirs] == [1, 2, 3, 4, 5]
    assert any(record["gradient_norm"] > 1 for record in ours), "nothing was clipped"
    for one, other in zip(ours, theirs, strict=True):
        for key in ("loss", "gradient_norm"):
            assert other[key] == pytest.approx(one[key], rel=TOLERANCE, abs=0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mesh", "model", "stage"), RUNS)
def test_a_run_goes_on_from_its_checkpoint(
    with_deepspeed: Path, metrics: Any, mesh: str, model: str, stage: str
) -> None:
    case = with_deepspeed / f"{mesh}-{model}-{stage}"
    notes = torch.load(with_deepspeed / f"{case.name}.pt")["notes"]
    assert any("resumed from" in note and note.endswith("at step 2") for note in notes)
    assert metrics(case / "again") == metrics(case / "run")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(("mesh", "model", "stage"), RUNS)
def test_checkpoints_hold_the_same_names_shapes_and_types(
    with_deepspeed: Path, mesh: str, model: str, stage: str
) -> None:
    last = Path("run", "checkpoints", "step-00000005")
    ours, theirs = (
        stored_tensors(with_deepspeed / f"{mesh}-{model}-{engine}" / last)
        for engine in ("torch", stage)
    )
    assert theirs == ours
