"""`rlt-dist verify mesh` as a user runs it: a part of docs/meshes.txt, and its verdicts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from rlt_dist.cli.main import main
from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.train.check import campaign
from rlt_dist.train.check.campaign import Campaign
from rlt_dist.train.check.case import Case, deviation_of, relative_error

VERIFY = Path(__file__).parents[2] / "configs" / "verify"
EVERY = sorted(path.stem for path in VERIFY.glob("*.yaml"))
CUT_SMALL = "train.micro_batch=1 recompute.decoder_chunk=5 recompute.layers=true"


def verify(*arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """Exit status, rows, and what was said besides."""
    command = [sys.executable, "-m", "rlt_dist", "verify", "mesh", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return done.returncode, rows, done.stderr


def files(*names: str) -> list[str]:
    return [str(VERIFY / f"{name}.yaml") for name in names]


def check(status: int, rows: list[dict[str, Any]], count: int) -> None:
    """All rows are there, and as close as float64 is."""
    assert len(rows) == count
    for row in rows:
        errors = [row[key] for key in ("loss", "gradient_norm", "parameters", "state")]
        assert row["ok"], row
        assert max(errors) <= 1e-9, row
    assert status == 0


def test_every_model_on_a_mesh_of_stages_and_cut_weights() -> None:
    status, rows, _ = verify(*files(*EVERY), "--mesh", "1x2x2", "--steps", "2")
    check(status, rows, len(EVERY))


def test_more_stages_more_cuts_more_replicas_small_micro_batches_and_recomputation() -> None:
    meshes = [part for mesh in ("1x4x1", "2x2x1", "2x1x2") for part in ("--mesh", mesh)]
    models = files("rlt1_tied", "rlt2", "txl_adaptive")
    status, rows, _ = verify(*models, *meshes, "--steps", "2", "--variant", CUT_SMALL)
    check(status, rows, 18)


def test_a_variant_that_changes_the_result_is_held_to_a_reference_of_its_own() -> None:
    """A model without stages, whose weights are cut all the same."""
    variant = ("--variant", "model.feedback_from=token")
    status, rows, _ = verify(*files("rlt1"), "--mesh", "1x1x2", "--steps", "1", *variant)
    check(status, rows, 2)


def test_bfloat16_of_padded_chunks_on_cut_weights_is_close_in_its_losses() -> None:
    status, rows, _ = verify(*files("rlt2"), "--mesh", "1x1x2", "--precision", "bfloat16")
    assert [row["ok"] for row in rows] == [True]
    assert 0 < rows[0]["loss"] < 1e-2
    assert status == 0


def test_another_result_is_called_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run is held to a reference of another seed; the command tells it by its exit status."""
    original = campaign._case

    def other_seed(of: Campaign, file: Path, overrides: Any, name: str, reference: Any) -> Case:
        more = ["train.seed=1"] if reference is None else []
        return original(of, file, [*overrides, *more], name, reference)

    monkeypatch.setattr(campaign, "_case", other_seed)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    arguments = ["verify", "mesh", *files("txl"), "--mesh", "1x1x1", "--steps", "1"]
    monkeypatch.setattr(sys, "argv", ["rlt-dist", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("mesh", "says"),
    [
        ("1x1x4 --vocabulary 5", "the vocabulary of 5 cannot be cut over mesh.tensor 4"),
        ("2x2", "write data x pipeline x tensor"),
        ("3x1x1", "8 lanes cannot be shared equally by 3 data-parallel ranks"),
        ("1x1x3", "mesh.tensor 3 does not divide model.heads 4"),
        ("1x9x1", "mesh.pipeline 9 exceeds model.encoder_layers 5"),
    ],
)
def test_an_impossible_mesh_is_one_line_before_anything_starts(mesh: str, says: str) -> None:
    status, rows, said = verify(*files("rlt1"), "--mesh", *mesh.split())
    assert status == 2
    assert not rows
    assert len(said.splitlines()) == 1
    assert says in said


def test_cutoffs_beyond_the_vocabulary_are_one_line_too() -> None:
    status, _, said = verify(*files("txl_adaptive"), "--mesh", "1x1x2", "--vocabulary", "100")
    assert status == 2
    assert len(said.splitlines()) == 1
    assert "cutoffs end at 300, but the vocabulary has 100 ids" in said


def test_errors_are_relative_to_the_tensor_and_nothing_missing_is_passed_over(
    tmp_path: Path,
) -> None:
    expected = torch.tensor([4.0, 0.0])
    assert relative_error(torch.tensor([4.0, 1e-3]), expected) == pytest.approx(2.5e-4)
    assert relative_error(torch.tensor([torch.nan, 0.0]), expected) == float("inf")
    assert relative_error(torch.zeros(3), expected) == float("inf")
    case = Case(
        name="run",
        config=load_typed(VERIFY / "rlt1.yaml", RunConfig),
        vocabulary=2,
        steps=1,
        reference="whole",
    )
    of_rank = {"loss": 0.0, "gradient_norm": 0.0, "parameters": {"a": 0.0}, "state": {"s": 0.0}}
    (tmp_path / "run-0.json").write_text(json.dumps(of_rank))
    torch.save({"parameters": {"a": 0, "b": 0}, "state": {"s": 0}}, tmp_path / "whole.pt")
    found = deviation_of(tmp_path, case, ranks=1)
    assert found.parameters == (float("inf"), "b")
    assert found.state == (0.0, "s")
