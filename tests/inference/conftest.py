"""Small trained models to evaluate and to sample from; made once, copied where they are written."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlt_dist.data.corpus.index import SplitIndex, load_corpus
from rlt_dist.inference.load import Trained, load_trained

FORMS = {
    "rlt1": ("rlt1",),
    "rlt2": ("rlt2",),
    "xl": ("xl", "model.same_length=true"),
    "free": ("xl", "model.memory_len=64"),
    "token": ("token",),
    "transformer": ("transformer",),
    "gru": ("gru",),
}
"""`xl` sees as far at the beginning of a segment as at its end, `free` does not."""


@pytest.fixture(scope="session")
def trained_runs(once: Callable[..., Path], configure: Any, driver: Any) -> Path:
    """A folder with a run folder `NAME/run` for each of FORMS."""

    def make(folder: Path) -> None:
        for name, (model, *overrides) in FORMS.items():
            configuration = configure(folder / name, model, "train.steps=20", *overrides)
            driver.train(configuration)

    return once("trained-runs", make)


@pytest.fixture
def run_of(trained_runs: Path, tmp_path: Path) -> Callable[[str], Path]:
    """`run_of(name)`: a copy of a trained run's folder, which may be written to."""

    def copy(name: str) -> Path:
        return Path(shutil.copytree(trained_runs / name / "run", tmp_path / name))

    return copy


@pytest.fixture
def trained(trained_runs: Path) -> Callable[..., Trained]:
    """`trained(name, **choices)`: a trained model."""
    return lambda name, **choices: load_trained(trained_runs / name / "run", choices)


@pytest.fixture(scope="session")
def documents(small_corpus: Path) -> Callable[[str], list[np.ndarray]]:
    """`documents(split)`: the tokens of its documents, end-of-text included."""
    corpus = load_corpus(small_corpus)

    def read(name: str) -> list[np.ndarray]:
        split: SplitIndex = corpus.split(name)
        return [tokens for shard in split.shards for tokens in shard.read(0, shard.entry.documents)]

    return read
