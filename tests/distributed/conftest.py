"""Two launches of ranks for all tests here: two processes, then four."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from rlt_dist.config.run import RunConfig
from rlt_dist.data.corpus.index import load_corpus
from rlt_dist.data.stream.loader import LaneLoader
from rlt_dist.data.stream.mixture import Share
from rlt_dist.data.stream.reading import Reading
from rlt_dist.models.build import initial_model

HERE = Path(__file__).parent
MICRO_BATCHES = {
    1: {"rlt1": ("null", "1", "2"), "rlt2": ("null",), "xl": ("null", "1", "2")},
    2: {"rlt1": ("null", "1", "2"), "rlt2": ("null", "2"), "xl": ("null", "1", "2")},
    4: {"rlt1": ("null", "1"), "rlt2": ("null",), "xl": ("null", "1")},
}
"""By processes and model; null: all of a rank's lanes at once, which are two on four ranks."""

AXES = ("data", "pipeline", "tensor")
SHORT = ("data.segment=5", "checkpoint.every=2", "train.steps=3")
GUARDED = (
    *("train.steps=8", "checkpoint.every=2", "optimizer.learning_rate=0.1", "guard.state_norm=3"),
    "guard.spike={deviations: 0.5, window: 2}",
)
LONG = ("rlt1", "train.steps=30", "checkpoint.every=2", "checkpoint.keep=2")

MESHES = {
    1: dict.fromkeys(("rlt1", "rlt2", "xl"), ("1x1x1",)),
    2: dict.fromkeys(("rlt1", "rlt2", "xl"), ("2x1x1", "1x2x1", "1x1x2")),
    4: {
        "rlt1": ("1x2x2", "2x2x1", "2x1x2", "1x4x1", "1x1x4"),
        "rlt2": ("1x2x2", "2x2x1", "2x1x2"),
        "xl": ("4x1x1", "1x2x2", "2x1x2", "1x1x4"),
    },
}
"""By processes and model: data x pipeline x tensor."""

WIDER = {
    "rlt1": (
        *("encoder_layers=4", "decoder_layers=5", "memory_groups=2"),
        *("heads=4", "kv_heads=2", "ffn=26"),
    ),
    "rlt2": ("encoder_layers=4", "decoder_layers=4", "heads=4", "ffn=26"),
    "xl": ("layers=5", "heads=4", "d_inner=26", "cutoffs=[3,8]"),
}
"""Layers and heads for four stages or tensor ranks: uneven stages, key/value heads that two or four
tensor ranks hold, inner columns that do not divide, a vocabulary of three parts."""

Result = Callable[[int, str], dict[str, Any]]


def launch(processes: int, cases: list[dict[str, Any]], folder: Path, seconds: int = 200) -> None:
    """Run cases of the driver under torchrun."""
    (folder / "cases.json").write_text(json.dumps(cases))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(processes), str(HERE / "driver.py")]
    done = subprocess.run(
        [*command, str(folder / "cases.json"), str(folder)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]


def training_cases(
    processes: int, folder: Path, configure: Callable[..., Any], mixed: str
) -> list[dict[str, Any]]:
    """Runs of the same lanes by every model in micro-batches of several sizes; and a mixture."""
    workers = f"data.workers={processes // 2}"
    configure(folder / "mixed", "rlt1", "data.path=null", mixed, workers, "data.segment=220")
    cases = [case(folder, "mixed")]
    for model, sizes in MICRO_BATCHES[processes].items():
        for size in sizes:
            name = f"{model}-{size}"
            configure(folder / name, model, f"train.micro_batch={size}")
            cases.append(case(folder, name))
    return cases


def case(folder: Path, name: str, kind: str = "train", **more: object) -> dict[str, Any]:
    return {"name": name, "kind": kind, "config": str(folder / name / "run.yaml"), **more}


def mesh_cases(
    processes: int, folder: Path, configure: Callable[..., Any], words: Path
) -> list[dict[str, Any]]:
    """Models on meshes: a run, and the end of it once more from a checkpoint."""
    cases = []
    for model, meshes in MESHES[processes].items():
        for mesh in meshes:
            name, axes = f"again-{mesh}-{model}", zip(AXES, mesh.split("x"), strict=True)
            choices = [f"model.{choice}" for choice in WIDER[model]]
            choices += [f"mesh.{axis}={size}" for axis, size in axes]
            choices += [f"data.path={words}"] if model == "xl" else []
            configure(folder / name, model, *choices, *SHORT)
            cases.append(case(folder, name, "resume"))
    return cases


def guarded_cases(
    processes: int, folder: Path, configure: Callable[..., Any]
) -> list[dict[str, Any]]:
    """A run whose guard skips steps and restarts lanes, on meshes, and its end once more."""
    cases = []
    for mesh in MESHES[processes]["rlt1"]:
        name, axes = f"guarded-{mesh}", zip(AXES, mesh.split("x"), strict=True)
        choices = [f"model.{choice}" for choice in WIDER["rlt1"]]
        choices += [f"mesh.{axis}={size}" for axis, size in axes]
        configure(folder / name, "rlt1", *choices, *GUARDED)
        cases.append(case(folder, name, "resume"))
    return cases


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
def on_two(
    once: Callable[..., Path], configure: Callable[..., Any], words_corpus: Path, mixed: str
) -> Path:
    def make(folder: Path) -> None:
        cases = training_cases(2, folder, configure, mixed)
        cases += mesh_cases(2, folder, configure, words_corpus)
        cases += guarded_cases(2, folder, configure)
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
def on_four(
    once: Callable[..., Path],
    configure: Callable[..., Any],
    words_corpus: Path,
    mixed: str,
    on_two: Path,
) -> Path:
    def make(folder: Path) -> None:
        cases = training_cases(4, folder, configure, mixed)
        cases += mesh_cases(4, folder, configure, words_corpus)
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
    once: Callable[..., Path],
    configure: Callable[..., Any],
    words_corpus: Path,
    mixed: str,
    on_two: Path,
    driver: ModuleType,
) -> Path:
    def make(folder: Path) -> None:
        cases = training_cases(1, folder, configure, mixed) + resumed_cases(
            on_two, folder, configure
        )
        cases += mesh_cases(1, folder, configure, words_corpus)
        cases += guarded_cases(1, folder, configure)
        (folder / "cases.json").write_text(json.dumps(cases))
        driver.main(folder / "cases.json", folder)

    return once("one-process", make)


@pytest.fixture(scope="session")
def with_deepspeed(once: Callable[..., Path], configure: Callable[..., Any]) -> Path:
    """Runs in float32 by both engines, and their ends once more from a checkpoint."""

    def make(folder: Path) -> None:
        for processes, meshes in ((2, ("2x1x1",)), (4, ("2x1x2", "2x2x1"))):
            cases = []
            for name, choices in deepspeed_runs(meshes):
                configure(folder / name, *choices)
                cases.append(case(folder, name, "resume"))
            launch(processes, cases, folder, seconds=600)

    return once("with-deepspeed", make)


def deepspeed_runs(meshes: Iterable[str]) -> Iterator[tuple[str, list[str]]]:
    for mesh, model in itertools.product(meshes, WIDER):
        axes = [f"mesh.{axis}={n}" for axis, n in zip(AXES, mesh.split("x"), strict=True)]
        wider = [f"model.{choice}" for choice in WIDER[model] if "cutoffs" not in choice]
        common = [model, *axes, *wider, "train.precision=float32", "checkpoint.every=2"]
        yield f"{mesh}-{model}-torch", common
        engine = "optimizer.engine=deepspeed"
        yield f"{mesh}-{model}-1", [*common, engine]
        if "mesh.pipeline=1" in axes:
            yield f"{mesh}-{model}-2", [*common, engine, "optimizer.zero_stage=2"]


@pytest.fixture
def long_run(configure: Callable[..., Any], tmp_path: Path) -> RunConfig:
    """A run that lasts long enough to be killed; case `long` is the same, uninterrupted."""
    return configure(tmp_path, *LONG)


@pytest.fixture
def folder(request: pytest.FixtureRequest) -> Callable[[int, str], Path]:
    """`folder(processes, name)`: where a case was run."""
    fixtures = {1: "on_one", 2: "on_two", 4: "on_four"}
    return lambda processes, name: request.getfixturevalue(fixtures[processes]) / name


@pytest.fixture
def result(folder: Callable[[int, str], Path]) -> Result:
    """`result(processes, name)`: what the driver gathered of a case."""
    return lambda processes, name: torch.load(folder(processes, f"{name}.pt"))


@pytest.fixture
def records(folder: Callable[[int, str], Path], metrics: Callable[..., Any]) -> Any:
    """`records(processes, name)`: the metrics of a case."""
    return lambda processes, name: metrics(folder(processes, name) / "run")


@dataclass(frozen=True)
class FirstLoss:
    loss: float
    mean_of_lane_means: float


@pytest.fixture
def first_loss(configure: Callable[..., Any], small_corpus: Path, tmp_path: Path) -> FirstLoss:
    """The loss of the first step, by hand: one lane after the other, without dropout."""
    config = configure(tmp_path, "rlt1", "model.dropout=0.0")
    corpus = load_corpus(small_corpus)
    seed = config.train.seed
    model = initial_model(config.model, corpus.tokenizer.vocabulary, seed, torch.float64)
    reading = Reading((Share(corpus.split("train"), 1),), 8, 10, seed)
    lanes = [LaneLoader(reading, range(lane, lane + 1)).next() for lane in range(8)]
    scored = []
    for batch in lanes:
        output, _ = model(batch.tokens[:, :-1], batch.document_start, model.empty_state(1))
        scored.append(model.nll(output, batch.tokens[:, 1:])[batch.loss_mask].detach())
    means = [float(nll.mean()) for nll in scored]
    return FirstLoss(float(torch.cat(scored).mean()), sum(means) / len(means))
