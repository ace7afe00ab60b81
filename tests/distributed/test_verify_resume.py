"""`rlt-dist verify resume` as a user runs it: a part of docs/resume.txt, and its verdicts."""

import json
import re
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest

VERIFY = Path(__file__).parents[2] / "configs" / "verify"
PARTS = {"loss", "gradient_norm", "parameters", "optimizer", "state", "cursors"}


def verify(*arguments: str, seconds: int = 280) -> tuple[int, list[dict[str, Any]], str]:
    """Exit status, rows, and what was said besides."""
    command = [sys.executable, "-m", "rlt_dist", "verify", "resume", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    return done.returncode, rows, done.stderr


def files(*names: str) -> list[str]:
    return [str(VERIFY / f"{name}.yaml") for name in names]


@pytest.fixture
def shallow(tmp_path: Path) -> str:
    """rlt1 with few layers, and a single key/value head, which two tensor ranks hold both."""
    text = (VERIFY / "rlt1.yaml").read_text()
    for key, size in (("encoder_layers", 2), ("decoder_layers", 3), ("kv_heads", 1)):
        text, changes = re.subn(rf"\b{key}: \d+", f"{key}: {size}", text)
        assert changes == 1
    (tmp_path / "shallow.yaml").write_text(text)
    return str(tmp_path / "shallow.yaml")


def test_eight_pairs_of_meshes_go_on_as_if_nothing_had_happened(shallow: str) -> None:
    """Of one and two processes; docs/resume.txt has those of four."""
    models, sources, targets = [shallow, *files("txl")], ("1x1x1", "1x2x1"), ("1x2x1", "1x1x2")
    meshes = [*(f"--from={mesh}" for mesh in sources), *(f"--to={mesh}" for mesh in targets)]
    status, rows, said = verify(*models, *meshes)
    assert status == 0, said
    found = {(row["config"], row["from"], row["to"]) for row in rows}
    assert found == set(product(models, sources, targets))
    for row in rows:
        limit = 0.0 if row["from"] == row["to"] else 1e-9
        assert row["ok"], row
        assert row["max_relative_error"] == max(row["errors"].values()) <= limit, row
        assert row["errors"].keys() == PARTS


def test_a_run_that_goes_on_otherwise_is_called_wrong() -> None:
    arguments = ["--from", "1x1x1", "--to", "1x1x1", "--steps", "2"]
    status, rows, _ = verify(*files("txl"), *arguments, "--to-with", "optimizer.weight_decay=0.2")
    assert status == 1
    assert [row["ok"] for row in rows] == [False]
    assert rows[0]["errors"]["parameters"] > 1e-6
    assert rows[0]["errors"]["cursors"] == 0


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--to 1x1x3", "mesh.tensor 3 does not divide model.heads 4"),
        ("--to 16x1x1", "8 lanes cannot be shared equally by 16 data-parallel ranks"),
        ("--to 1x1", "write data x pipeline x tensor"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_starts(
    command: Any, is_one_error: Any, arguments: str, says: str
) -> None:
    meshes = ["--from", "1x1x1", *arguments.split()]
    is_one_error(command("verify", "resume", *files("rlt1"), *meshes), says)


def test_another_run_does_not_go_on() -> None:
    meshes = ["--from", "1x1x1", "--to", "1x1x1"]
    status, rows, said = verify(*files("rlt1"), *meshes, "--to-with", "train.seed=1")
    assert (status, rows) == (2, [])
    assert len(said.splitlines()) == 1
    assert "another run (train.seed: 0 -> 1)" in said


@pytest.mark.deepspeed
@pytest.mark.timeout(900)
@pytest.mark.parametrize("side", ["from", "to"])
def test_either_engine_goes_on_from_the_other_in_float32(side: str) -> None:
    pytest.importorskip("deepspeed")
    meshes = ["--from", "2x2x1", "--to", "1x1x4", "--precision", "float32"]
    choice = [f"--{side}-with", "optimizer.engine=deepspeed"]
    status, rows, said = verify(*files("rlt1", "txl"), *meshes, *choice, seconds=800)
    assert status == 0, said
    assert len(rows) == 2
    for row in rows:
        assert max(row["errors"]["loss"], row["errors"]["gradient_norm"]) <= 1e-5
        assert row["errors"]["cursors"] == 0
