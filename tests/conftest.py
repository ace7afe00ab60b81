"""What the rooms' tests share: one small corpus of real shards, and small runs on it.

Workers of pytest-xdist are processes of their own: `once` makes a thing for all of them. The
helpers that ranks and killed processes use are modules beside the tests, loaded here by path.
"""

import fcntl
import importlib.util
import json
import logging
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import hypothesis
import pytest
import torch

from rlt_dist.cli.main import main
from rlt_dist.config.load import load_typed, write_yaml
from rlt_dist.config.run import RunConfig
from rlt_dist.data.prepare.prepare import prepare_corpus
from rlt_dist.util.signals import SIGNALS

HERE = Path(__file__).parent
REPOSITORY = HERE.parent

# No test is timed: a machine that does other work must not fail one.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")

# Two workers on two cores: threads that wait for each other would take most of the time.
os.environ["OMP_NUM_THREADS"] = "1"
torch.set_num_threads(1)
# Shells start what runs in the background deaf to Ctrl-C, and processes hand that on.
signal.signal(signal.SIGINT, signal.default_int_handler)
# Triton's interpreter runs kernels on a CPU: chosen at its import, so before any file of tests.
if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
# torch's checkpoints log a hundred lines a second, all of which pytest would keep.
logging.getLogger("c10d-NullHandler-dcp_logger").disabled = True

USAGE = ("tokens_per_second", "tokens_per_second_per_device", "mfu")
USAGE += ("waiting", "sent", "bubble", "peak_memory")

Once = Callable[[str, Callable[[Path], object]], Path]
Configure = Callable[..., RunConfig]
MakeStudy = Callable[..., Path]

MODELS: dict[str, dict[str, Any]] = {
    "rlt1": {
        "kind": "rlt",
        "d_model": 16,
        "heads": 2,
        "ffn": 24,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "window": 4,
        "memory_len": 24,
        "feedback": 1,
        "dropout": 0.1,
    },
    "rlt2": {
        "kind": "rlt",
        "d_model": 16,
        "heads": 2,
        "kv_heads": 1,
        "ffn": 24,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "window": 5,
        "memory_groups": 2,
        "memory_len": 24,
        "feedback": 3,
        "tied": True,
        "tie_output": True,
        "dropout": 0.1,
    },
    "xl": {
        "kind": "transformer_xl",
        "d_model": 16,
        "heads": 2,
        "d_inner": 24,
        "layers": 2,
        "memory_len": 12,
        "dropout": 0.1,
        "dropatt": 0.1,
    },
    "gru": {"kind": "gru", "d_model": 16, "layers": 2},
}
MODELS["token"] = MODELS["rlt1"] | {"feedback_from": "token"}
MODELS["transformer"] = MODELS["rlt1"] | {"decoder_layers": 0, "feedback": 0}

WORDS = [
    *("the", "state", "of", "a", "lane", "is", "carried", "on", "over", "its", "segment"),
    *("and", "naïve", "文字", "loops", "return"),
]


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Once:
    """`once(name, make)`: the folder that `make(folder)` fills, one for all workers."""
    base = tmp_path_factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base

    def made(name: str, make: Callable[[Path], object]) -> Path:
        folder = root / f"once-{name}"
        with (root / f"once-{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / ".made").exists():
                assert not folder.exists(), f"{name} could not be made; see the first failure"
                folder.mkdir()
                make(folder)
                (folder / ".made").touch()
        return folder

    return made


def _document(chance: random.Random, number: int) -> bytes:
    """Characters of one to three bytes; one document in six is much longer than the others."""
    words = chance.randint(1, 4) if number % 6 else chance.randint(8, 20)
    return (" ".join(chance.choices(WORDS, k=words)) + "\n").encode()


def _prepare(folder: Path, recipe: str) -> None:
    chance = random.Random(7)
    texts = folder / "texts"
    texts.mkdir()
    for number in range(160):
        (texts / f"{number:03}.txt").write_bytes(_document(chance, number))
    (folder / "recipe.yaml").write_text(recipe)
    shares = {"train": 0.8, "validation": 0.1, "test": 0.1}
    prepare_corpus(
        [texts], folder / "corpus", folder / "recipe.yaml", shares=shares, shard_bytes=800
    )


@pytest.fixture(scope="session")
def small_corpus(once: Once) -> Path:
    """160 documents of 2 to 130 bytes, one id a byte, in several shards; never write to it."""
    return once("bytes", lambda folder: _prepare(folder, "kind: bytes\n")) / "corpus"


@pytest.fixture(scope="session")
def words_corpus(once: Once) -> Path:
    """The same documents as ranked words."""
    recipe = "kind: words\nvocabulary: 16\nlossless: false\n"
    return once("words", lambda folder: _prepare(folder, recipe)) / "corpus"


@pytest.fixture(scope="session")
def other_corpus(once: Once) -> Path:
    """80 other documents, one id a byte."""

    def make(folder: Path) -> None:
        (folder / "texts").mkdir()
        for number in range(80):
            (folder / "texts" / f"{number:02}").write_text(f"another text, number {number}\n")
        (folder / "recipe.yaml").write_text("kind: bytes\n")
        shares = {"train": 0.8, "validation": 0.1, "test": 0.1}
        texts, recipe = folder / "texts", folder / "recipe.yaml"
        prepare_corpus([texts], folder / "corpus", recipe, shares=shares)

    return once("other", make) / "corpus"


@pytest.fixture(scope="session")
def mixed(small_corpus: Path, other_corpus: Path) -> str:
    """The override that reads both corpora, three tokens of the first for one of the other."""
    parts = [f"{{path: {small_corpus}, weight: 3}}", f"{{path: {other_corpus}, weight: 1}}"]
    return f"data.mixture=[{', '.join(parts)}]"


@pytest.fixture(scope="session")
def configure(small_corpus: Path) -> Configure:
    """`configure(folder, model, *overrides)`: a run of a small model in `folder`/run.

    Its file is `folder`/run.yaml. 8 lanes of 10 tokens, 5 steps, float64, dropout 0.1, neither
    validation nor checkpoints before the end, unless overrides say otherwise.
    """

    def make(folder: Path, model: str = "rlt1", *overrides: str) -> RunConfig:
        content = {
            "run_folder": str(folder / "run"),
            "model": MODELS[model],
            "data": {"path": str(small_corpus), "lanes": 8, "segment": 10},
            "optimizer": {"learning_rate": 1e-2},
            "schedule": {"warmup": 2, "minimum": 1e-3},
            "train": {"steps": 5, "precision": "float64"},
            "validation": {"every": None, "segments": 3},
            "checkpoint": {"every": 1000, "keep": 1000},
        }
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "run.yaml"
        file.write_text(write_yaml(content))
        config = load_typed(file, RunConfig, overrides)
        file.write_text(config.to_yaml())
        return config

    return make


@pytest.fixture(scope="session")
def make_study(configure: Configure) -> MakeStudy:
    """`make_study(folder, ...)`: the file of a study of 6 steps over 1 and 2 nodes in `folder`.

    Its own keys can be given; its runs are `configure`'s, with these overrides.
    """

    def make(folder: Path, *overrides: str, **keys: Any) -> Path:
        configure(folder, "rlt1", *overrides)
        content = {
            "title": "A small study",
            "config": "run.yaml",
            "cluster": str(REPOSITORY / "configs" / "clusters" / "local.yaml"),
            "nodes": [1, 2],
            "steps": 6,
            "warmup": 2,
        }
        file = folder / "study.yaml"
        file.write_text(write_yaml(content | keys))
        return file

    return make


def _load(path: Path) -> ModuleType:
    name = f"helper_{path.stem}"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec and spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    return sys.modules[name]


@pytest.fixture(scope="session")
def driver() -> ModuleType:
    """tests/distributed/driver.py: runs that are watched from outside, on any number of ranks."""
    return _load(HERE / "distributed" / "driver.py")


@pytest.fixture(scope="session")
def seams() -> ModuleType:
    """tests/ops/seams.py: processes that share weights, simulated by threads."""
    return _load(HERE / "ops" / "seams.py")


@pytest.fixture(scope="session")
def authors() -> ModuleType:
    """tests/checkpoint/authors.py: Transformer-XL as its authors' code names it."""
    return _load(HERE / "checkpoint" / "authors.py")


def _steps(run_folder: Path) -> list[dict[str, Any]]:
    lines = (run_folder / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    for record in records:
        # Which step sees the end of a save is the clock's, too.
        for of_the_machine in ("seconds", "checkpoint", *USAGE):
            record.pop(of_the_machine, None)
    return records


@pytest.fixture(scope="session")
def metrics() -> Callable[[Path], list[dict[str, Any]]]:
    """`metrics(run_folder)`: the run's records, all that depends on the machine left out."""
    return _steps


@pytest.fixture(scope="session")
def repository() -> Path:
    return REPOSITORY


@pytest.fixture(scope="session")
def strict_json() -> Callable[[str], Any]:
    """Parse JSON as the standard has it: NaN and Infinity are no numbers there."""

    def refuse(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    return lambda text: json.loads(text, parse_constant=refuse)


@pytest.fixture
def command(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """`command("eval", ...)`: exit code, output and errors of `rlt-dist eval ...`, run in here."""

    def run(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["rlt-dist", *map(str, arguments)])
        monkeypatch.setenv("COLUMNS", "200")
        capfd.readouterr()
        before = {number: signal.getsignal(number) for number in SIGNALS}
        with pytest.raises(SystemExit) as raised:
            main()
        for number, handler in before.items():
            signal.signal(number, handler)
        shown = capfd.readouterr()
        code = raised.value.code
        return (code if isinstance(code, int) else int(bool(code))), shown.out, shown.err

    return run


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the package and of `slurm/`, which `rlt-dist submit` takes for its own.

    Its jobs start no ranks: `supervise` is tests/jobs/stand_in.py. It is the working folder, too.
    """
    folder = tmp_path / "checkout"
    for name in ("rlt_dist", "slurm"):
        shutil.copytree(REPOSITORY / name, folder / name)
    shutil.copy(HERE / "jobs" / "stand_in.py", folder / "rlt_dist" / "jobs" / "supervise.py")
    for module in ("freeze", "submit"):
        monkeypatch.setattr(f"rlt_dist.jobs.{module}.PACKAGE", folder / "rlt_dist")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="session")
def is_one_error() -> Callable[..., None]:
    """`is_one_error(result, *parts)`: one line that has these parts, non-zero, no traceback."""

    def check(result: tuple[int, str, str], *parts: str) -> None:
        code, _, err = result
        lines = err.splitlines()
        assert code != 0
        assert len(lines) == 1, err
        assert lines[0].startswith("rlt-dist: error: ")
        for part in parts:
            assert part in lines[0]

    return check
