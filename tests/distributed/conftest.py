"""Two launches of ranks for all tests here: two processes, then four."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rlt_dist.config.run import RunConfig
from rlt_dist.data.index import load_corpus
from rlt_dist.data.loader import LaneLoader
from rlt_dist.models.build import initial_model

HERE = Path(__file__).parent
MICRO_BATCHES = {
    1: {"rlt1": ("null", "1", "2"), "rlt2": ("null",), "xl": ("null", "1", "2")},
    2: {"rlt1": ("null", "1", "2"), "rlt2": ("null", "2"), "xl": ("null", "1", "2")},
    4: {"rlt1": ("null", "1"), "rlt2": ("null",), "xl": ("null", "1")},
}
"""By processes and model; null: all of a rank's lanes at once, which are two on four ranks."""

LONG = ("rlt1", "train.steps=30", "checkpoint.every=2", "checkpoint.keep=2")

Result = Callable[[int, str], dict[str, Any]]


def launch(processes: int, cases: list[dict[str, Any]], folder: Path) -> None:
    """Run cases of the driver under torchrun."""
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), str(HERE / "driver.py")]
    done = subprocess.run(
        [*command, str(folder / "cases.json"), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def training_cases(
    processes: int, folder: Path, configure: Callable[..., Any]
) -> list[dict[str, Any]]:
    """Runs of the same lanes by every model in micro-batches of several sizes."""
    cases = []
    for model, sizes in MICRO_BATCHES[processes].items():
        for size in sizes:
            name = f"{model}-{size}"
            configure(folder / name, model, f"train.micro_batch={size}")
            cases.append(case(folder, name))
    return cases


def case(folder: Path, name: str, kind: str = "train", **more: object) -> dict[str, Any]:
    return {"name": name, "kind": kind, "config": str(folder / name / "run.yaml"), **more}


def resumed_cases(saved: Path, folder: Path, configure: Callable[..., Any]) -> list[dict[str, Any]]:
    """Go on from a copy of what two processes saved after step 2."""
    cases = []
    for model in ("rlt1", "xl"):
        name = f"resume-{model}"
        configure(folder / name, model)
        shutil.copytree(saved / f"save-{model}" / "run", folder / name / "run")
        for later in ("step-00000004", "step-00000005"):
            shutil.rmtree(folder / name / "run" / "checkpoints" / later)
        cases.append(case(folder, name))
    return cases


@pytest.fixture(scope="session")
def on_two(once: Callable[..., Path], configure: Callable[..., Any]) -> Path:
    def make(folder: Path) -> None:
        cases = training_cases(2, folder, configure)
        for model in ("rlt1", "xl"):
            configure(folder / f"save-{model}", model, "checkpoint.every=2")
            cases.append(case(folder, f"save-{model}"))
        configure(folder / "long", *LONG)
        cases.append(case(folder, "long"))
        configure(folder / "spoilt")
        cases.append(case(folder, "spoilt", spoilt_steps=[2, 3]))
        launch(2, [*cases, case(folder, "errors", "errors")], folder)

    return once("two-processes", make)


@pytest.fixture(scope="session")
def on_four(once: Callable[..., Path], configure: Callable[..., Any], on_two: Path) -> Path:
    def make(folder: Path) -> None:
        cases = training_cases(4, folder, configure)
        configure(folder / "undropped", "rlt1", "model.dropout=0.0", "train.steps=2")
        cases.append(case(folder, "undropped"))
        cases += [
            {
                "name": axes,
                "kind": "mesh",
                "axes": axes,
                "shared": [[0, 1]] if axes[2] == "2" else [],
            }
            for axes in ("1x2x2", "2x2x1", "2x1x2")
        ]
        launch(4, [*cases, *resumed_cases(on_two, folder, configure)], folder)

    return once("four-processes", make)


@pytest.fixture(scope="session")
def on_one(
    once: Callable[..., Path], configure: Callable[..., Any], on_two: Path, driver: ModuleType
) -> Path:
    def make(folder: Path) -> None:
        cases = training_cases(1, folder, configure) + resumed_cases(on_two, folder, configure)
        (folder / "cases.json").write_text(json.dumps(cases))
        driver.main(folder / "cases.json", folder)

    return once("one-process", make)


@pytest.fixture
def long_run(configure: Callable[..., Any], tmp_path: Path) -> RunConfig:
    """A run that lasts long enough to be killed; case `long` is the same, uninterrupted."""
    return configure(tmp_path, *LONG)


@pytest.fixture
def result(request: pytest.FixtureRequest) -> Result:
    """`result(processes, name)`: what the driver gathered of a case."""
    fixtures = {1: "on_one", 2: "on_two", 4: "on_four"}

    def read(processes: int, name: str) -> dict[str, Any]:
        return torch.load(request.getfixturevalue(fixtures[processes]) / f"{name}.pt")

    return read


@pytest.fixture
def records(request: pytest.FixtureRequest, metrics: Callable[..., Any]) -> Any:
    """`records(processes, name)`: the metrics of a case."""
    fixtures = {1: "on_one", 2: "on_two", 4: "on_four"}

    def read(processes: int, name: str) -> list[dict[str, Any]]:
        return metrics(request.getfixturevalue(fixtures[processes]) / name / "run")

    return read


@dataclass(frozen=True)
class FirstLoss:
    loss: float
    mean_of_lane_means: float


@pytest.fixture
def first_loss(configure: Callable[..., Any], small_corpus: Path, tmp_path: Path) -> FirstLoss:
    """The loss of the first step, by hand: one lane after the other, without dropout."""
    config = configure(tmp_path, "rlt1", "model.dropout=0.0")
    corpus = load_corpus(small_corpus)
    model = initial_model(config.model, corpus.vocabulary, config.train.seed, torch.float64)
    lanes = [
        LaneLoader(
            corpus.split("train"),
            corpus.end_of_text,
            lanes=8,
            local=range(lane, lane + 1),
            segment=10,
            seed=config.train.seed,
        ).next()
        for lane in range(8)
    ]
    scored = []
    for batch in lanes:
        output, _ = model(batch.tokens[:, :-1], batch.document_start, model.empty_state(1))
        scored.append(model.nll(output, batch.tokens[:, 1:])[batch.loss_mask].detach())
    means = [float(nll.mean()) for nll in scored]
    return FirstLoss(float(torch.cat(scored).mean()), sum(means) / len(means))
