"""A cluster file of this machine, from short measured runs of one rank, of two and of four."""

import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch

from rlt_dist.bench.timing import Disturbance
from rlt_dist.config.load import write_yaml
from rlt_dist.config.run import RunConfig
from rlt_dist.costs.cluster import ClusterConfig, LinkConfig, Precision
from rlt_dist.mesh.axes import Axes
from rlt_dist.study.calibration import AT_ONCE, COLLECTIVES, CUT, ONE, RING, VOCABULARY
from rlt_dist.study.fitted import fitted
from rlt_dist.study.measure_machine import Machine, Request, mean_of, measure_machine

_TURNS = 2
"""How often all is measured, in turn: a machine is not equally fast at all times."""
_TRIES, _QUIET = 3, 0.1
"""How often something is measured, and the cores that others may keep busy the while."""
_PRODUCT = 1024
"""Rows and columns of the square product whose FLOP/s are the peak."""
_COPIED = 1 << 25
"""Numbers of the array whose copying tells the bandwidth of memory."""
_RESERVED = 500_000_000

Say = Callable[[str], None]


def calibrate(folder: Path, seconds: float, say: Say) -> ClusterConfig:
    """Measure this machine.

    Args:
        folder: for what is measured on the way.
        seconds: of each run, of which there are about 50, each time.
        say: told what is measured.

    Raises:
        UserError: a rank failed.
    """
    ring = [given.config(Axes(1, 2, 1)) for given in RING]
    alone = [given.config(Axes(1, 1, 1)) for given in ONE]
    runs = {1: alone, 2: [*_at_once(2), *ring], 4: _at_once(4)}
    found: dict[int, list[Machine]] = {ranks: [] for ranks in runs}
    for turn in range(_TURNS):
        for ranks, configs in runs.items():
            say(f"{len(configs)} runs of {ranks} at once, {turn + 1} of {_TURNS}")
            found[ranks].append(_measure(ranks, configs, seconds, folder, say))
    one, two, four = map(mean_of, found.values())
    return fitted(_cluster(two, four), one, two, four)


def _at_once(ranks: int) -> list[RunConfig]:
    """What so many ranks do, each by itself, and cut by the tensor axis."""
    meshes = [axes for axes in COLLECTIVES.values() if axes.size == ranks]
    at_once = [given.config(Axes(ranks, 1, 1)) for given in AT_ONCE]
    return at_once + [given.config(axes) for axes in meshes for given in CUT]


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


def _cluster(two: Machine, four: Machine) -> ClusterConfig:
    """What is not fitted."""
    sends = [run.send for run in two.runs if run.send is not None]
    assert two.bandwidth is not None
    assert four.bandwidth is not None
    # A short message's: what else a long one's sender waits for is its copying.
    link = LinkConfig(latency=0.0, bandwidth=two.bandwidth, overhead=min(sends))
    cores = len(os.sched_getaffinity(0))
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    figures: dict[str, Any] = {
        "devices_per_node": 1,
        "cores": cores,
        "contention": 1.0,
        "crowding": 1.0,
        "memory": memory // cores,
        "reserved": _RESERVED,
        "flops": _peaks(),
        "memory_bandwidth": _bandwidth(),
        "launch": 0.0,
        "within_node": link,
        "between_nodes": link,
        "collectives": {},
        "bandwidths": {"2 of 2": two.bandwidth, "4 of 4": four.bandwidth},
        "exchanges": {},
        "rates": {},
    }
    told = {
        "devices_per_node": "a choice: an emulated node is a process",
        "cores": "told by the system",
        "memory": "told by the system, shared out over the cores",
        "reserved": "an assumption, of Python and torch",
        "launch": "in the rates",
    }
    if cores not in (2, 4):
        told["contention"] = "an assumption: never as many ranks as cores were measured"
    if cores >= 4:
        told["crowding"] = "an assumption: never more ranks than cores were measured"
    sources = {name: told.get(name, "measured") for name in figures}
    return ClusterConfig(name="this machine", sources=sources, **figures)


def _peaks() -> dict[Precision, float]:
    """FLOP/s of a square product on one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    found: dict[Precision, float] = {}
    for precision in get_args(Precision):
        a = torch.ones(_PRODUCT, _PRODUCT, dtype=getattr(torch, precision))
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
