"""A cluster's rates, from measurements.

Every kind of work is given rates by non-negative least squares of relative errors (Lawson, Hanson,
"Solving Least Squares Problems", 1974, chapter 23): seconds of a product's FLOPs with weights and
without, of numbers read and written, of operators started. A roofline has no such sums; on a
processor whose caches, not its memory, hold these models, they tell time better.

What ranks cost each other is then sought by false position, so that steps take as long as measured.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from statistics import fmean

import numpy as np

from rlt_dist.costs.cluster import STEP, UPDATE, ClusterConfig, RateConfig
from rlt_dist.costs.run import Run
from rlt_dist.costs.taken import demanded, updating
from rlt_dist.costs.time import measured
from rlt_dist.costs.traffic import traffic_around
from rlt_dist.mesh.axes import Axes, Place
from rlt_dist.study.calibration import AT_ONCE, COLLECTIVES, CUT, ONE, RING, Given
from rlt_dist.study.measure_machine import Machine, Sample, Stepped
from rlt_dist.study.step import Step

_SWEEPS = 2000
_ROUNDS = 3
"""How often what ranks cost each other is sought: each part depends on the others."""
_DRAWN = 4
"""Straight lines that are drawn through two errors to find where there is none."""
_SECONDS = (1e-6, 1e-2)
"""Between which those of a message are sought."""
_SLOWER = (1.0, 3.0)
"""Between which the times are sought that work takes as long."""
_NONE = RateConfig(flop=0.0, attention=0.0, score=0.0, number=0.0, operation=0.0, call=0.0)

Change = Callable[[ClusterConfig, float], ClusterConfig]


def fitted(cluster: ClusterConfig, one: Machine, two: Machine, four: Machine) -> ClusterConfig:
    """A cluster with the rates of all work, and of what ranks cost each other.

    Args:
        cluster: the rest, which is measured directly.
        one, two, four: what that many ranks took: of `ONE`; of `AT_ONCE`, `CUT` and `RING`; of
            `AT_ONCE`, and `CUT` on each mesh.
    """
    rates = {name: rate_of(of) for name, of in _by_name(one).items()}
    cluster = _with(cluster, rates=rates | {STEP: _around(one)})
    several = {2: two, 4: four}
    for ranks, machine in several.items():
        exchange = {f"{ranks} of {ranks}": _exchange(cluster, ranks, machine)}
        cluster = _with(cluster, exchanges={**cluster.exchanges, **exchange})
    for _ in range(_ROUNDS):
        cluster = _slowed(cluster, one, several)
        cluster = _collectives(cluster, several)
        ring = _steps(RING, Axes(1, 2, 1), two.runs[len(AT_ONCE) + len(CUT) :])
        cluster = _sought(cluster, ring, _with_latency, _SECONDS)
    return cluster


def _with(cluster: ClusterConfig, **figures: object) -> ClusterConfig:
    return cluster.model_copy(update=figures)


# -- one rank ----------------------------------------------------------------------------------


def _by_name(machine: Machine) -> Mapping[str, list[Sample]]:
    found: dict[str, list[Sample]] = defaultdict(list)
    for run in machine.runs:
        for sample in run.samples:
            found[sample.name].append(sample)
    return found


def rate_of(samples: Sequence[Sample]) -> RateConfig:
    """The rates that tell samples' times best, by relative error."""
    made = np.array([astuple(sample.taken) for sample in samples])
    seconds = np.array([sample.seconds for sample in samples])
    found = non_negative_least_squares(made / seconds[:, None], np.ones(len(samples)))
    return RateConfig(**dict(zip(RateConfig.model_fields, map(float, found), strict=True)))


def non_negative_least_squares(matrix: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """x >= 0 that makes |matrix x - wanted| least, one coordinate after another until all rest.

    Args:
        matrix: [n, k], of numbers that are not negative; a column of zeros is given 0.
        wanted: [n].
    """
    scale = np.linalg.norm(matrix, axis=0)
    scale[scale == 0] = np.inf
    scaled = matrix / scale
    gram, aim, x = scaled.T @ scaled, scaled.T @ wanted, np.zeros(matrix.shape[1])
    for _ in range(_SWEEPS):
        for k in np.flatnonzero(np.isfinite(scale)):
            x[k] = max(0.0, x[k] - (gram[k] @ x - aim[k]) / gram[k, k])
    return x / scale


def _around(one: Machine) -> RateConfig:
    """What steps take beyond their works: rates of a step and of its tokens."""
    steps = np.array([run.step for run in one.runs])
    left = np.array([run.step - run.computing - run.update for run in one.runs])
    tokens = [given.lanes * given.segment for given in ONE]
    made = np.column_stack((np.ones(len(steps)), tokens)) / steps[:, None]
    call, number = non_negative_least_squares(made, left / steps)
    return _NONE.model_copy(update={"number": float(number), "call": float(call)})


# -- several ranks -----------------------------------------------------------------------------


def _exchange(cluster: ClusterConfig, ranks: int, machine: Machine) -> float:
    """Bytes that a rank sends in a second of the exchange of gradients and parameters."""
    sent = seconds = 0.0
    for given, run in zip(AT_ONCE, machine.runs, strict=False):
        own, place = given.run(Axes(ranks, 1, 1)), Place(0, 0, 0)
        work = measured(demanded(updating(own, place)), cluster.rates[UPDATE]).total
        seconds += max(run.update - work * _share(cluster, ranks), 0.1 * run.update)
        sent += sum(
            transfer.on_wire(ranks)
            for transfer in traffic_around(own, place)
            if transfer.kind in ("all_to_all", "all_gather")
        )
    return sent / seconds


def _share(cluster: ClusterConfig, ranks: int) -> float:
    """Times as long that work takes on a rank's share of the cores."""
    return max(1.0, ranks / (cluster.cores or ranks))


def _slowed(cluster: ClusterConfig, one: Machine, several: Mapping[int, Machine]) -> ClusterConfig:
    """With what computing at once costs: on as many ranks as there are cores, and on more."""
    cores = cluster.cores or 1
    # By how much these runs differ from what rates say of them is not what is sought.
    alone = _steps(AT_ONCE, Axes(1, 1, 1), one.runs)
    told = [Step(run, cluster).seconds / seconds for run, seconds in alone]
    crowded = {n for n in several if n > cores}
    for key, chosen in (("contention", {cores}), ("crowding", crowded)):
        steps = [
            (run, seconds * scale)
            for n in chosen & several.keys()
            for (run, seconds), scale in zip(
                _steps(AT_ONCE, Axes(n, 1, 1), several[n].runs), told, strict=True
            )
        ]
        if steps:
            cluster = _sought(cluster, steps, partial(_with_figure, key), _SLOWER)
    return cluster


def _with_figure(key: str, cluster: ClusterConfig, times: float) -> ClusterConfig:
    return _with(cluster, **{key: times})


def _collectives(cluster: ClusterConfig, several: Mapping[int, Machine]) -> ClusterConfig:
    """With what short ones take."""
    measured_runs = {n: iter(machine.runs[len(AT_ONCE) :]) for n, machine in several.items()}
    for key, axes in COLLECTIVES.items():
        runs = [next(measured_runs[axes.size]) for _ in CUT]
        cluster = _sought(
            cluster, _steps(CUT, axes, runs), partial(_with_collective, key), _SECONDS
        )
    return cluster


def _with_collective(key: str, cluster: ClusterConfig, seconds: float) -> ClusterConfig:
    return _with(cluster, collectives={**cluster.collectives, key: seconds})


def _with_latency(cluster: ClusterConfig, seconds: float) -> ClusterConfig:
    link = cluster.within_node.model_copy(update={"latency": seconds})
    return _with(cluster, within_node=link, between_nodes=link)


def _steps(given: Sequence[Given], axes: Axes, runs: Sequence[Stepped]) -> list[tuple[Run, float]]:
    """Runs and the seconds that their steps took."""
    return [(of.run(axes), run.step) for of, run in zip(given, runs, strict=False)]


def _sought(
    cluster: ClusterConfig,
    steps: Sequence[tuple[Run, float]],
    change: Change,
    between: tuple[float, float],
) -> ClusterConfig:
    """The cluster, changed by so much that steps take as long as measured, on average."""

    def error(x: float) -> float:
        changed = change(cluster, x)
        return fmean(Step(run, changed).seconds / seconds for run, seconds in steps) - 1

    low, high = between
    below, above = error(low), error(high)
    if not below < 0 < above:
        return change(cluster, low if below >= 0 else high)
    for _ in range(_DRAWN):
        # Steps are nearly linear in it: a straight line's zero is as good as there.
        middle = low - below * (high - low) / (above - below)
        if (found := error(middle)) < 0:
            low, below = middle, found
        else:
            high, above = middle, found
    return change(cluster, low if -below < above else high)
