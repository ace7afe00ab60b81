"""What a run is said to need, held to what runs of the same configuration take."""

from pathlib import Path
from typing import Any

import pytest

from rlt_dist.checkpoint.manifest import latest, read_manifest
from rlt_dist.jobs.estimate import estimate, size
from rlt_dist.mesh.axes import Axes
from rlt_dist.parallel.plan.counts import count_parameters

COUNTERS = 1000  # bytes: lanes' cursors and positions


@pytest.mark.parametrize("model", ["rlt1", "rlt2", "xl"])
def test_a_checkpoint_is_as_large_as_said(
    configure: Any, command: Any, tmp_path: Path, model: str
) -> None:
    config = configure(tmp_path, model)
    assert command("train", tmp_path / "run.yaml")[0] == 0
    saved = latest(config.run_folder / "checkpoints")
    assert saved is not None
    found = read_manifest(saved).tensor_bytes
    said = estimate(config, 257, Axes(1, 1, 1)).checkpoint
    assert abs(found - said) < COUNTERS < found / 100


@pytest.mark.parametrize("model", ["rlt1", "rlt2", "xl"])
def test_a_rank_holds_its_share(configure: Any, tmp_path: Path, model: str) -> None:
    config = configure(tmp_path, model, *["model.encoder_layers=2"] * (model == "rlt1"))
    alone = estimate(config, 257, Axes(1, 1, 1))
    assert alone.weights == 8 * count_parameters(config.model, 257, Axes(1, 1, 1)).parameters
    assert (alone.gradients, alone.optimizer) == (alone.weights, 2 * alone.weights)
    assert alone.checkpoint == 3 * alone.weights + alone.state
    wide = estimate(config, 257, Axes(4, 1, 1))
    assert (wide.weights, wide.gradients) == (alone.weights, 2 * alone.gradients)
    assert 4 * wide.state == alone.state
    assert 0 <= 4 * wide.optimizer - alone.optimizer < 4 * 16  # a number more, where one is over
    cut = estimate(config, 257, Axes(1, 2, 2))
    assert cut.weights < alone.weights
    assert cut.state < alone.state
    assert cut.checkpoint == alone.checkpoint


def test_bytes_are_shown_in_the_unit_that_fits() -> None:
    shown = [size(number) for number in (0, 5 << 10, 3 << 29, 7 << 30, 9 << 41)]
    assert shown == ["0.0 KiB", "5.0 KiB", "1.5 GiB", "7.0 GiB", "18.0 TiB"]
