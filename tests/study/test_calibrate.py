"""Rates from measurements, and the file they are written to."""

from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.costs.cluster import UPDATE, ClusterConfig, RateConfig, load_cluster
from rlt_dist.costs.taken import Taken, demanded, rate_name, taken, updating
from rlt_dist.costs.time import measured
from rlt_dist.costs.traffic import traffic_around
from rlt_dist.mesh.axes import Axes, Place
from rlt_dist.study import calibrate
from rlt_dist.study.calibrate import cluster_yaml
from rlt_dist.study.calibration import AT_ONCE, COLLECTIVES, CUT, ONE, RING, Given
from rlt_dist.study.fitted import fitted, non_negative_least_squares, rate_of
from rlt_dist.study.measure_machine import Machine, Sample, Stepped
from rlt_dist.study.step import Step

LOCAL = load_cluster(Path(__file__).parents[2] / "configs/clusters/local.yaml")
RATE = RateConfig(flop=2e-11, attention=5e-11, score=4e-9, number=3e-10, operation=1e-5, call=1e-4)


def made(seed: int) -> Taken:
    chance = np.random.default_rng(seed)
    return Taken(*(int(size * chance.uniform(0.2, 3)) for size in (1e9, 3e8, 4e6, 1e7, 1e3, 1e2)))


def sample(seed: int, name: str = "forward") -> Sample:
    own = made(seed)
    return Sample(name=name, taken=own, seconds=measured(own, RATE).total)


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


def as_told(given: Given, axes: Axes, machine: ClusterConfig) -> Stepped:
    """What a run would measure on a machine that is just as a cluster's file says."""
    run = given.run(axes)
    step, rank, whole = Step(run, machine), run.rank(0), defaultdict[str, Taken](Taken)
    whole[UPDATE] = demanded(updating(run, Place(0, 0, 0)))
    for work, count in rank.alike():
        own = taken(run, rank, work, stepwise=True).times(count * run.micro_batches)
        whole[rate_name(run, work.kind)] = whole[rate_name(run, work.kind)].plus(own)
    samples = [
        Sample(name=name, taken=of, seconds=measured(of, machine.rates[name]).total)
        for name, of in whole.items()
        if of != Taken()
    ]
    assert machine.cores is not None
    update = step.clock.update(Place(0, 0, 0)).total * max(1, axes.size / machine.cores)
    for transfer in traffic_around(run, Place(0, 0, 0)):
        if transfer.kind != "all_reduce" and axes.data > 1:
            update += transfer.on_wire(axes.data) / machine.exchanges[f"{axes.data} of {axes.data}"]
    computing = step.passes.works[0].total
    return Stepped(samples=samples, computing=computing, step=step.seconds, update=update)


def found_of(machine: ClusterConfig, monkeypatch: pytest.MonkeyPatch) -> ClusterConfig:
    """What calibration makes of such a machine."""
    assert machine.cores is not None
    affinity = set(range(machine.cores))
    monkeypatch.setattr(calibrate, "_peaks", lambda: dict(machine.flops))
    monkeypatch.setattr(calibrate, "_bandwidth", lambda: machine.memory_bandwidth)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: affinity)
    one = Machine(runs=[as_told(given, Axes(1, 1, 1), machine) for given in ONE])
    runs: dict[int, list[Stepped]] = {}
    for ranks in (2, 4):
        runs[ranks] = [as_told(given, Axes(ranks, 1, 1), machine) for given in AT_ONCE]
        meshes = [axes for axes in COLLECTIVES.values() if axes.size == ranks]
        runs[ranks] += [as_told(given, axes, machine) for axes in meshes for given in CUT]
    sending = {"send": machine.within_node.overhead}
    ring = (as_told(given, Axes(1, 2, 1), machine) for given in RING)
    runs[2] += [of.model_copy(update=sending) for of in ring]
    two, four = (
        Machine(runs=runs[ranks], bandwidth=machine.bandwidths[f"{ranks} of {ranks}"])
        for ranks in (2, 4)
    )
    return fitted(calibrate._cluster(two, four), one, two, four)


def test_a_machine_that_is_as_its_file_says_is_found_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = found_of(LOCAL, monkeypatch)
    assert cluster.contention == pytest.approx(LOCAL.contention, rel=0.02)
    assert cluster.crowding == pytest.approx(LOCAL.crowding, rel=0.02)
    for figures in ("collectives", "bandwidths", "exchanges"):
        assert getattr(cluster, figures) == pytest.approx(getattr(LOCAL, figures), rel=0.05)
    for of, axes in ((RING[0], Axes(1, 2, 1)), (CUT[1], Axes(2, 1, 2)), (ONE[7], Axes(1, 1, 1))):
        run = of.run(axes)
        assert Step(run, cluster).seconds == pytest.approx(Step(run, LOCAL).seconds, rel=0.02)
    file = tmp_path / "local.yaml"
    file.write_text(cluster_yaml(cluster))
    assert load_cluster(file) == cluster


@pytest.mark.parametrize("cores", [1, 4, 8])
def test_what_a_machine_s_cores_cannot_tell_is_called_an_assumption(
    monkeypatch: pytest.MonkeyPatch, cores: int
) -> None:
    given = {"contention": 1.1, "crowding": 1.25}
    cluster = found_of(LOCAL.model_copy(update={"cores": cores, **given}), monkeypatch)
    told = {1: {"crowding"}, 4: {"contention"}, 8: set[str]()}[cores]
    for name, value in given.items():
        known = name in told
        assert getattr(cluster, name) == (pytest.approx(value, rel=0.02) if known else 1.0)
        assert cluster.sources[name].startswith("measured" if known else "an assumption")
