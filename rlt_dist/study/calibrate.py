"""A cluster file of this machine, from short measured runs.

Every kind of work is given rates by non-negative least squares of relative errors (Lawson, Hanson,
"Solving Least Squares Problems", 1974, chapter 23): seconds of a product's FLOPs with weights and
without, of numbers read and written, of operators started. A roofline has no such sums; on a
processor whose caches, not its memory, hold these models, they tell time better.
"""

import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlt_dist.bench.timing import Disturbance
from rlt_dist.config.load import validate, write_yaml
from rlt_dist.config.run import RunConfig
from rlt_dist.costs.cluster import ClusterConfig, LinkConfig, Precision, RateConfig
from rlt_dist.costs.run import run_of
from rlt_dist.costs.time import STEP, Taken
from rlt_dist.mesh.axes import Axes
from rlt_dist.study.measure_machine import Machine, Request, Sample, measure_machine
from rlt_dist.study.step import Step

VOCABULARY = 2048
_SWEEPS = 2000
_SHORTEST, _LONGEST = 1e-6, 1e-2
"""Seconds between which those of a message are sought."""
_HALVINGS = 24
_TRIES, _QUIET = 3, 0.1
"""How often something is measured, and the cores that others may keep busy the while."""
_NONE = RateConfig(flop=0.0, attention=0.0, number=0.0, operation=0.0, call=0.0)
_PRODUCT = 1024
"""Rows and columns of the square product whose FLOP/s are the peak."""

_COPIED = 1 << 25
"""Numbers of the array whose copying tells the bandwidth of memory."""
_RESERVED = 500_000_000
_TYPES: dict[Precision, torch.dtype] = {
    "float32": torch.float32,
    "float64": torch.float64,
    "bfloat16": torch.bfloat16,
}

Say = Callable[[str], None]
Given = tuple[dict[str, Any], int, int]
"""A model and what else is configured, lanes, and tokens of a segment."""


def _rlt(d: int, heads: int, encoder: int, decoder: int, **more: Any) -> dict[str, Any]:
    stacks = {"encoder_layers": encoder, "decoder_layers": decoder}
    base = {"kind": "rlt", "d_model": d, "heads": heads, "ffn": 8 * d // 3, "memory_len": 64}
    return {"model": base | stacks | more}


def _xl(d: int, heads: int, layers: int, **more: Any) -> dict[str, Any]:
    base = {"kind": "transformer_xl", "d_model": d, "heads": heads, "d_inner": 4 * d}
    return {"model": base | {"layers": layers, "memory_len": 64} | more}


_PYTHON = {"ops": {"recurrence": "python"}}
_PARTS = {"recompute": {"decoder_chunk": 16, "layers": True}}
_RUNS: list[Given] = [
    (_rlt(64, 4, 2, 2), 16, 32),
    (_rlt(256, 4, 2, 2), 8, 32),
    (_rlt(128, 4, 2, 2, memory_len=256), 16, 64),
    (_rlt(32, 2, 6, 6), 64, 8),
    (_rlt(64, 4, 5, 5, memory_len=192), 32, 48),
    (_rlt(160, 5, 2, 2, memory_len=128), 32, 48),
    (_rlt(128, 4, 3, 3, feedback=8), 8, 64),
    (_rlt(192, 4, 2, 3, feedback=0), 8, 64),
    (_rlt(96, 4, 2, 2, feedback=4) | _PARTS, 16, 64),
    (_rlt(192, 4, 1, 2) | _PARTS, 8, 32),
    (_rlt(64, 4, 2, 2) | _PYTHON, 8, 32),
    (_rlt(128, 4, 2, 2) | _PYTHON, 16, 16),
    (_rlt(256, 8, 1, 2, feedback=4) | _PYTHON, 8, 32),
    (_rlt(64, 4, 2, 4, feedback=0) | _PYTHON | _PARTS, 16, 48),
    (_xl(64, 4, 2), 16, 32),
    (_xl(128, 4, 4, memory_len=128), 8, 64),
    (_xl(256, 8, 2), 8, 64),
    (_xl(128, 4, 6, pre_norm=True) | {"recompute": {"layers": True}}, 32, 32),
    (_xl(32, 2, 4), 16, 16),
]
"""Models, lanes and segments that rates are fitted to."""
_AT_ONCE = (1, 2, 5, 15)
"""Those that two and four ranks run at once, by their number."""
_RING = (_rlt(64, 4, 2, 2), 16, 32)
"""What messages are measured on."""
_CUT = (_rlt(64, 4, 1, 1), 8, 16)
"""What collectives are: many short ones."""
_COLLECTIVES = {"2 of 2": Axes(1, 1, 2), "4 of 4": Axes(1, 1, 4), "2 of 4": Axes(2, 1, 2)}
"""Meshes whose steps tell what a collective takes, in an order in which each has one unknown."""


def calibrate(folder: Path, seconds: float, say: Say) -> ClusterConfig:
    """Measure this machine.

    Args:
        folder: for what is measured on the way.
        seconds: of each run, of which there are about 30.
        say: told what is measured.

    Raises:
        UserError: a rank failed.
    """
    alone, pair, ring = Axes(1, 1, 1), Axes(2, 1, 1), Axes(1, 2, 1)
    say(f"{len(_RUNS)} runs of one rank")
    one = _measure(1, [_config(run, alone) for run in _RUNS], seconds, folder, say)
    say("two ranks at once, and their messages")
    both = [_config(_times(2, _RUNS[number]), pair) for number in _AT_ONCE]
    two = _measure(2, [*both, _config(_RING, ring), *_cut_over(2)], seconds, folder, say)
    say("four ranks at once, and their messages")
    crowd = [_config(_times(4, _RUNS[number]), Axes(4, 1, 1)) for number in _AT_ONCE]
    return fitted(one, two, _measure(4, [*crowd, *_cut_over(4)], seconds, folder, say))


def _cut_over(ranks: int) -> list[RunConfig]:
    return [_config(_CUT, axes) for axes in _COLLECTIVES.values() if axes.size == ranks]


def _config(run: Given, axes: Axes) -> RunConfig:
    content, lanes, segment = run
    content = content | {
        "run_folder": "none",
        "data": {"path": "none", "lanes": lanes, "segment": segment},
        "optimizer": {"learning_rate": 1e-4},
        "train": {"steps": 1},
        "mesh": {"data": axes.data, "pipeline": axes.pipeline, "tensor": axes.tensor},
    }
    return validate(content, RunConfig, "calibration")


def _times(ranks: int, run: Given) -> Given:
    """So many lanes that each rank has those of one."""
    content, lanes, segment = run
    return content, ranks * lanes, segment


def _measure(
    ranks: int, configs: list[RunConfig], seconds: float, folder: Path, say: Say
) -> Machine:
    """Measure, once more where others disturbed it; the quietest time counts."""
    request = Request(configs=configs, vocabulary=VOCABULARY, seconds=seconds)
    found: list[tuple[float, Machine]] = []
    for _ in range(_TRIES):
        with Disturbance() as others:
            machine = measure_machine(ranks, request, folder / f"ranks{ranks}")
        found.append((others.cores or 0.0, machine))
        if found[-1][0] <= _QUIET:
            break
        say(f"others kept {found[-1][0]:.1f} cores busy meanwhile")
    return min(found, key=lambda of: of[0])[1]


# -- fitting -----------------------------------------------------------------------------------


def fitted(one: Machine, two: Machine, four: Machine) -> ClusterConfig:
    """The cluster that measurements describe: of one rank, of two and of four at once."""
    rates = {name: rate_of(of) for name, of in _by_name(one).items()}
    ring = two.runs[len(_AT_ONCE)]
    cluster = _cluster({**rates, STEP: _NONE}, one, two, four)
    around = _around(one, cluster)
    cluster = cluster.model_copy(update={"rates": {**rates, STEP: around}})
    steps = [run.step for run in (*two.runs[len(_AT_ONCE) + 1 :], *four.runs[len(_AT_ONCE) :])]
    for (key, axes), step in zip(_COLLECTIVES.items(), steps, strict=True):
        cluster = _fitting(cluster, _CUT, axes, step, partial(_with_collective, key))
    return _fitting(cluster, _RING, Axes(1, 2, 1), ring.step, _with_latency)


def _fitting(
    cluster: ClusterConfig,
    given: Given,
    axes: Axes,
    measured: float,
    change: Callable[[ClusterConfig, float], ClusterConfig],
) -> ClusterConfig:
    """The cluster, changed by so many seconds that a step takes as long as it was measured to."""
    run = run_of(_config(given, axes), VOCABULARY, axes)
    low, high = _SHORTEST, _LONGEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if Step(run, change(cluster, middle)).seconds < measured:
            low = middle
        else:
            high = middle
    return change(cluster, low)


def _with_collective(key: str, cluster: ClusterConfig, seconds: float) -> ClusterConfig:
    return cluster.model_copy(update={"collectives": {**cluster.collectives, key: seconds}})


def _with_latency(cluster: ClusterConfig, seconds: float) -> ClusterConfig:
    link = cluster.within_node.model_copy(update={"latency": seconds})
    return cluster.model_copy(update={"within_node": link, "between_nodes": link})


def _by_name(machine: Machine) -> Mapping[str, list[Sample]]:
    found: dict[str, list[Sample]] = defaultdict(list)
    for run in machine.runs:
        for sample in run.samples:
            found[sample.name].append(sample)
    return found


def rate_of(samples: Sequence[Sample]) -> RateConfig:
    """The rates that tell samples' times best, by relative error."""
    return _rate([(sample.taken, sample.seconds) for sample in samples])


def _rate(pairs: Iterable[tuple[Taken, float]]) -> RateConfig:
    pairs = list(pairs)
    made = [astuple(of) for of, _ in pairs]
    seconds = np.array([each for _, each in pairs])
    found = non_negative_least_squares(np.array(made) / seconds[:, None], np.ones(len(pairs)))
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


def _slowdown(one: Machine, several: Machine, share: float) -> float:
    """Times as long that works take while other ranks compute too, each on its share of a core."""
    together = sum(run.computing for run in several.runs[: len(_AT_ONCE)])
    alone = sum(one.runs[number].computing for number in _AT_ONCE)
    return max(1.0, share * together / alone)


def _around(one: Machine, cluster: ClusterConfig) -> RateConfig:
    """What steps take beyond their works: rates of a step and of its tokens."""
    pairs, weights = [], []
    for given, measured in zip(_RUNS, one.runs, strict=True):
        config = _config(given, Axes(1, 1, 1))
        run = run_of(config, VOCABULARY, Axes(1, 1, 1))
        works = Step(run, cluster).seconds
        pairs.append((1.0, float(run.lanes * run.own.tokens), measured.step - works))
        weights.append(measured.step)
    made = np.array(pairs) / np.array(weights)[:, None]
    step, token = non_negative_least_squares(made[:, :2], made[:, 2])
    return _NONE.model_copy(update={"number": float(token), "call": float(step)})


def _cluster(
    rates: Mapping[str, RateConfig], one: Machine, two: Machine, four: Machine
) -> ClusterConfig:
    """All but latency, collectives and what surrounds a step, which are found with it."""
    bandwidth, send = two.bandwidth, two.runs[len(_AT_ONCE)].send
    assert bandwidth is not None
    assert send is not None
    link = LinkConfig(latency=0.0, bandwidth=bandwidth, overhead=send)
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    figures: dict[str, Any] = {
        "devices_per_node": 1,
        "cores": cores,
        "contention": _slowdown(one, two, min(1.0, cores / 2)),
        "crowding": _slowdown(one, four, min(1.0, cores / 4)),
        "memory": memory // cores,
        "reserved": _RESERVED,
        "flops": _peaks(),
        "memory_bandwidth": _bandwidth(),
        "launch": 0.0,
        "within_node": link,
        "between_nodes": link,
        "collectives": {},
        "bandwidths": {"2 of 2": bandwidth, "4 of 4": four.bandwidth},
        "rates": dict(rates),
    }
    told = {
        "devices_per_node": "a choice: an emulated node is a process",
        "cores": "told by the system",
        "memory": "told by the system, shared out over the cores",
        "reserved": "an assumption, of Python and torch",
        "launch": "in the rates",
    }
    sources = {name: told.get(name, "measured") for name in figures}
    return ClusterConfig(name="this machine", sources=sources, **figures)


def _peaks() -> dict[Precision, float]:
    """FLOP/s of a square product on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict[Precision, float] = {}
    for precision, dtype in _TYPES.items():
        a = torch.ones(_PRODUCT, _PRODUCT, dtype=dtype)
        found[precision] = 2 * _PRODUCT**3 / _least(partial(torch.mm, a, a))
    torch.set_num_threads(threads)
    return found


def _bandwidth() -> float:
    """Bytes read and written in a second by a copy that no cache holds."""
    a = torch.ones(_COPIED)
    return 2 * a.nbytes / _least(a.clone)


def _least(action: Callable[[], Any]) -> float:
    def once() -> float:
        began = time.perf_counter()
        action()
        return time.perf_counter() - began

    return min(once() for _ in range(5))


def cluster_yaml(cluster: ClusterConfig) -> str:
    """The cluster's file."""
    head = "# This machine, as `rlt-dist scale calibrate` has measured it.\n"
    return head + write_yaml(cluster.model_dump(mode="json", exclude_unset=True))
