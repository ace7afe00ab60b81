"""A finished run with a checkpoint of every step, to be copied and damaged."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

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
