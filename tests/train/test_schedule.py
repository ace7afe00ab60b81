"""The learning rate: a pure function of the step."""

from pathlib import Path
from typing import Any

import pytest

from rlt_dist.train.schedule import learning_rate

WARM = ("train.steps=100", "schedule.warmup=10")


def test_it_rises_linearly_to_the_peak_at_the_end_of_the_warm_up(
    configure: Any, tmp_path: Path
) -> None:
    config = configure(tmp_path, "rlt1", *WARM)
    rates = [learning_rate(config, step) for step in range(1, 11)]
    assert rates == pytest.approx([1e-3 * step for step in range(1, 11)], rel=1e-12)


def test_it_falls_as_a_cosine_to_the_minimum_at_the_last_step(
    configure: Any, tmp_path: Path
) -> None:
    config = configure(tmp_path, "rlt1", *WARM)
    rates = [learning_rate(config, step) for step in range(10, 101)]
    assert rates[0] == 1e-2
    assert rates[45] == pytest.approx((1e-2 + 1e-3) / 2, rel=1e-12)
    assert rates[90] == pytest.approx(1e-3, rel=1e-12)
    assert rates == sorted(rates, reverse=True)


def test_without_warm_up_it_starts_near_the_peak(configure: Any, tmp_path: Path) -> None:
    config = configure(tmp_path, "rlt1", "train.steps=1000", "schedule.warmup=0")
    assert learning_rate(config, 1) == pytest.approx(1e-2, rel=1e-4)


def test_a_run_that_only_warms_up_ends_at_the_peak(configure: Any, tmp_path: Path) -> None:
    config = configure(tmp_path, "rlt1", "train.steps=10", "schedule.warmup=10")
    assert learning_rate(config, 10) == 1e-2


def test_it_depends_on_nothing_but_the_step(configure: Any, tmp_path: Path) -> None:
    config = configure(tmp_path, "rlt1", *WARM)
    forwards = [learning_rate(config, step) for step in range(1, 101)]
    backwards = [learning_rate(config, step) for step in range(100, 0, -1)]
    assert forwards == backwards[::-1]
