"""A finished run with a checkpoint of every step, to be copied and damaged."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlt_dist.checkpoint.load import find_checkpoint, load_tensors, stored_tensors
from rlt_dist.config.run import RunConfig


@pytest.fixture(scope="session")
def finished(once: Callable[..., Path], configure: Any, driver: Any) -> Path:
    def make(folder: Path) -> None:
        driver.train(configure(folder, "rlt1", "checkpoint.every=1"))

    return once("finished-run", make) / "run"


@pytest.fixture
def run(finished: Path, configure: Any, tmp_path: Path) -> RunConfig:
    """The configuration of a copy of the finished run."""
    config = configure(tmp_path, "rlt1", "checkpoint.every=1")
    shutil.copytree(finished, config.run_folder)
    return config


@pytest.fixture(scope="session")
def stored_model() -> Callable[[Path], dict[str, torch.Tensor]]:
    """`stored_model(run_folder)`: the parameters in its newest checkpoint, by name."""

    def read(run_folder: Path) -> dict[str, torch.Tensor]:
        folder = find_checkpoint(run_folder)
        tensors = {
            name: torch.empty(shape, dtype=dtype)
            for name, (shape, dtype) in stored_tensors(folder).items()
            if name.startswith("model.")
        }
        load_tensors(folder, tensors)
        return {name.removeprefix("model."): tensor for name, tensor in tensors.items()}

    return read


@pytest.fixture(scope="session")
def same() -> Callable[[dict[str, torch.Tensor], dict[str, torch.Tensor]], bool]:
    """Whether two sets of tensors have the same names, types and bits."""

    def compare(x: dict[str, torch.Tensor], y: dict[str, torch.Tensor]) -> bool:
        return x.keys() == y.keys() and all(
            x[name].dtype == y[name].dtype and torch.equal(x[name], y[name]) for name in y
        )

    return compare
