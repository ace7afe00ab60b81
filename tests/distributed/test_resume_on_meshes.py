"""On every mesh a run that goes on from its checkpoint is the run that was never stopped."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint as dcp

from rlt_dist.checkpoint.load import find_checkpoint, load_parameters, stored_tensors
from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.models.build import build_model

TWO = ("2x1x1", "1x2x1", "1x1x2")
EVERY = [
    *[(2, mesh, model) for mesh in TWO for model in ("rlt1", "rlt2", "xl")],
    *[(4, mesh, "rlt1") for mesh in ("1x2x2", "2x2x1", "2x1x2", "1x4x1", "1x1x4")],
    *[(4, mesh, "rlt2") for mesh in ("1x2x2", "2x2x1", "2x1x2")],
    *[(4, mesh, "xl") for mesh in ("4x1x1", "1x2x2", "2x1x2", "1x1x4")],
]
LAST = Path("checkpoints", "step-00000003")


def saved(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, whole."""
    kinds = stored_tensors(folder).items()
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in kinds}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(tensors, storage_reader=dcp.FileSystemReader(folder), no_dist=True)
    return tensors


def relative_error(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x - y).abs().max() / y.abs().max().clamp(min=1e-6))


@pytest.mark.parametrize(("processes", "mesh", "model"), EVERY)
def test_the_end_is_the_same_to_the_last_bit(
    folder: Any, result: Any, metrics: Any, processes: int, mesh: str, model: str
) -> None:
    case = folder(processes, f"again-{mesh}-{model}")
    notes = result(processes, f"again-{mesh}-{model}")["notes"]
    assert any("resumed from" in note and note.endswith("at step 2") for note in notes)
    assert metrics(case / "again") == metrics(case / "run")
    one, other = saved(case / "run" / LAST), saved(case / "again" / LAST)
    assert one.keys() == other.keys()
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert not different


@pytest.mark.parametrize(("processes", "mesh", "model"), EVERY)
def test_a_checkpoint_holds_the_same_whatever_mesh_wrote_it(
    folder: Any, processes: int, mesh: str, model: str
) -> None:
    expected = saved(folder(1, f"again-1x1x1-{model}") / "run" / LAST)
    found = saved(folder(processes, f"again-{mesh}-{model}") / "run" / LAST)
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == tensor.dtype for name, tensor in expected.items())
    errors = {name: relative_error(found[name], expected[name]) for name in expected}
    assert max(errors.values()) < 1e-9, errors


@pytest.mark.parametrize("model", ["rlt1", "rlt2", "xl"])
@pytest.mark.parametrize("mesh", ["1x2x2", "2x1x2"])
def test_one_process_without_groups_reads_what_a_mesh_wrote(
    folder: Any, mesh: str, model: str
) -> None:
    case = folder(4, f"again-{mesh}-{model}")
    config = load_typed(case / "run.yaml", RunConfig)
    stored = saved(case / "run" / LAST)
    whole = build_model(config.model, _vocabulary(stored, model), torch.float64)
    load_parameters(find_checkpoint(case / "run"), whole)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, stored[f"model.{name}"])


def _vocabulary(stored: dict[str, torch.Tensor], model: str) -> int:
    embedding = "word_emb.emb_layers.0.weight" if model == "xl" else "embed.weight"
    return len(stored[f"model.{embedding}"])
