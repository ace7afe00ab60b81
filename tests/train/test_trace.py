"""`rlt-dist trace`: a plan and its run, drawn and counted."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.mesh.world import open_world
from rlt_dist.parallel.mesh import mesh_of
from rlt_dist.train.rehearsal import Rehearsal


@pytest.fixture
def config(repository: Path) -> Path:
    """A ring on random tokens; no corpus."""
    return repository / "configs" / "verify" / "rlt1.yaml"


def test_a_step_is_shown_as_planned_and_as_run(
    command: Any, config: Path, tmp_path: Path, strict_json: Any
) -> None:
    output = tmp_path / "a" / "trace"
    code, out, err = command(
        *("trace", config, "train.micro_batch=2", "--mesh", "1x2x1", "--output", output)
    )
    assert (code, err) == (0, "")
    summary = strict_json((output / "summary.json").read_text())
    assert (summary["mesh"], summary["micro_batches"]) == ("1x2x1", 4)
    ring = 4 * 12 / (4 * 12 + 1)
    for kinds, planned, formula, run in summary["uses"]:
        assert f"use, {kinds}: planned {planned:.3f} of ticks, by the formula {formula:.3f}" in out
        assert formula == pytest.approx(ring)
        assert planned == pytest.approx(ring, rel=0.01)
        assert 0 < run <= 1
    assert summary["seconds"] >= summary["seconds_planned"] * 0.5 > 0
    assert [line.split(":")[0] for line in out.splitlines()][3:5] == ["stage 0", "stage 1"]
    assert all(sum(shares) <= 1 + 1e-9 for shares in summary["stages"])
    assert len(summary["sent"]) == 2

    events = json.loads((output / "trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == [
        f"{w}: stage {p} of 2" for w in ("planned", "run") for p in (0, 1)
    ]
    works: dict[int, list[str]] = {process: [] for process in names}
    for event in events:
        if event["ph"] == "X" and event["cat"] != "messages":
            works[event["pid"]].append(event["name"])
    assert works[0] == works[2]
    assert works[1] == works[3]
    assert sum(name.startswith("decode ") for name in works[3]) == 2 * 4 * 12
    assert ElementTree.parse(output / "trace.svg").getroot().tag.endswith("svg")


@pytest.mark.parametrize("name", ["rlt1", "txl"])
def test_one_stage_runs_by_the_same_executor(repository: Path, name: str) -> None:
    """Training of one stage does without it: losses, gradients and state are the same."""
    config = load_typed(
        repository / "configs" / "verify" / f"{name}.yaml",
        RunConfig,
        ["mesh.data=1", "train.micro_batch=4", "optimizer.clip=1e9"],
    )
    with open_world({}) as world, mesh_of(config, world) as mesh:
        executed, trained = (Rehearsal(config, 61, mesh) for _ in range(2))
        passed = executed.pass_through()
        norm = trained.step().gradient_norm
    gradients = [p.grad for p in executed.local.parameters.values()]
    assert all(gradient is not None for gradient in gradients)
    found = torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt()
    assert float(found) == pytest.approx(norm, rel=1e-9)
    assert passed.state.keys() == trained.state.keys()
    for key, tensor in trained.state.items():
        torch.testing.assert_close(passed.state[key], tensor, rtol=1e-9, atol=1e-12)
    assert passed.sent == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--mesh", "1x9x1"), "mesh.pipeline 9 exceeds model.encoder_layers 5"),
        (("--mesh", "4"), "write data x pipeline x tensor"),
        (("--mesh", "3x1x1"), "3"),
        (("ops.recurrence=reference",), "ops.recurrence: reference"),
        (("model.feedback_from=token",), "model.feedback_from token: runs in one piece"),
    ],
)
def test_what_cannot_be_shown_is_one_line(
    command: Any, is_one_error: Any, config: Path, tmp_path: Path, arguments: Any, said: str
) -> None:
    output = tmp_path / "trace"
    is_one_error(command("trace", config, *arguments, "--output", output), said)
    assert not output.exists()
