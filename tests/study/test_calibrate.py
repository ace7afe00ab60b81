"""Rates from measurements, and the file they are written to."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.costs.cluster import RateConfig, load_cluster
from rlt_dist.costs.run import run_of
from rlt_dist.costs.time import Taken
from rlt_dist.mesh.axes import Axes
from rlt_dist.study import calibrate
from rlt_dist.study.calibrate import cluster_yaml, fitted, non_negative_least_squares, rate_of
from rlt_dist.study.measure_machine import Machine, Sample, Stepped
from rlt_dist.study.step import Step

RATE = RateConfig(flop=2e-11, attention=5e-11, number=3e-10, operation=1e-5, call=1e-4)


def made(seed: int) -> Taken:
    chance = np.random.default_rng(seed)
    return Taken(*(int(size * chance.uniform(0.2, 3)) for size in (1e9, 3e8, 1e7, 1e3, 1e2)))


def sample(seed: int, name: str = "forward") -> Sample:
    own = made(seed)
    return Sample(name=name, taken=own, seconds=own.seconds(RATE).total)


def test_rates_are_found_again() -> None:
    found = rate_of([sample(seed) for seed in range(8)])
    for name in RateConfig.model_fields:
        assert getattr(found, name) == pytest.approx(getattr(RATE, name), rel=1e-3)


@given(seed=st.integers(0, 10_000), rows=st.integers(1, 8), columns=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_no_other_non_negative_numbers_are_nearer(seed: int, rows: int, columns: int) -> None:
    """The conditions of Karush, Kuhn and Tucker: no gradient leads to less."""
    chance = np.random.default_rng(seed)
    matrix, wanted = chance.uniform(0, 1, (rows, columns)), chance.normal(1, 1, rows)
    matrix[:, chance.integers(columns)] *= chance.integers(2)
    x = non_negative_least_squares(matrix, wanted)
    gradient = matrix.T @ (matrix @ x - wanted)
    assert (x >= 0).all()
    assert (gradient >= -1e-6).all()
    assert np.abs(gradient[x > 0]).max(initial=0) < 1e-6


def test_a_measured_machine_is_a_cluster_that_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "_peaks", lambda: {"float32": 5e10})
    monkeypatch.setattr(calibrate, "_bandwidth", lambda: 1e10)

    def stepped(number: int, slower: float) -> Stepped:
        own = sample(number)
        slowed = own.model_copy(update={"seconds": slower * own.seconds})
        return Stepped(samples=[slowed], computing=slowed.seconds, step=1.0)

    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    ring = Stepped(samples=[], computing=1.0, step=1.6, send=3e-5)
    cut = Stepped(samples=[], computing=1.0, step=2.0)
    one = [stepped(number, 1.0) for number in range(len(calibrate._RUNS))]
    two = [*(stepped(number, 1.2) for number in calibrate._AT_ONCE), ring, cut]
    four = [*(stepped(number, 2.6) for number in calibrate._AT_ONCE), cut, cut]
    cluster = fitted(
        Machine(runs=one), Machine(runs=two, bandwidth=2e9), Machine(runs=four, bandwidth=1e9)
    )
    for key, axes in calibrate._COLLECTIVES.items():
        run = run_of(calibrate._config(calibrate._CUT, axes), calibrate.VOCABULARY, axes)
        assert Step(run, cluster).seconds == pytest.approx(2.0, rel=1e-3), key
    assert cluster.contention == pytest.approx(1.2)
    assert cluster.crowding == pytest.approx(1.3)
    assert cluster.within_node.overhead == 3e-5
    axes = Axes(1, 2, 1)
    run = run_of(calibrate._config(calibrate._RING, axes), calibrate.VOCABULARY, axes)
    assert Step(run, cluster).seconds == pytest.approx(1.6, rel=1e-3)
    file = tmp_path / "local.yaml"
    file.write_text(cluster_yaml(cluster))
    assert load_cluster(file) == cluster
