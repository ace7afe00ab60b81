"""What calibration measures on this machine: works, steps and messages of small runs.

This module is also the program of the ranks: `python -m rlt_dist.study.measure_machine FOLDER`,
where FOLDER/request.json says what to run; the leading rank writes FOLDER/measured.json.
"""

import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
from pydantic import BaseModel

from rlt_dist.config.run import RunConfig
from rlt_dist.costs.cluster import UPDATE
from rlt_dist.costs.effort import Transfer
from rlt_dist.costs.run import Run, run_of
from rlt_dist.costs.taken import Taken, demanded, rate_name, taken, updating
from rlt_dist.mesh.local import run_ranks, shown_on_one_rank
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.mesh.world import World, open_world
from rlt_dist.parallel.gradients import complete_gradients
from rlt_dist.parallel.mesh import mesh_of
from rlt_dist.parallel.schedule.instructions import Send, Work
from rlt_dist.train.rehearsal import Rehearsal
from rlt_dist.util.files import write_atomic

REQUEST, MEASURED = "request.json", "measured.json"
_ENDLESS = 1 << 60
"""Mean tokens of a document: all lanes are at the same place, as costs have it."""
_MOST, _LEAST = 40, 3
"""Passes of a run."""
_LONG = 1 << 20
"""Float32 numbers of a long message."""


class Request(BaseModel):
    """What to run, on random tokens.

    Attributes:
        configs: runs; their meshes have the ranks of the launch.
        seconds: of each, after which nothing more is measured.
    """

    configs: list[RunConfig]
    vocabulary: int
    seconds: float


class Sample(BaseModel):
    """Some work of a step, how much it is and how long it takes.

    Attributes:
        name: of its rates in a cluster's file.
    """

    name: str
    taken: Taken
    seconds: float


class Stepped(BaseModel):
    """A run's figures.

    Attributes:
        samples: by kind of work, all of a step.
        computing: seconds of all works of a pass.
        step: seconds of a whole step, its batch being there.
        update: seconds of what follows on the passes of a step, messages included.
        send: mean seconds of a message's sending within a pass; None without a pipeline.
    """

    samples: list[Sample]
    computing: float
    step: float
    update: float
    send: float | None = None


class Machine(BaseModel):
    """Everything that was measured by one launch.

    Attributes:
        bandwidth: bytes per second of a long all-reduce; None of one rank.
    """

    runs: list[Stepped]
    bandwidth: float | None = None


def mean_of(machines: Sequence[Machine]) -> Machine:
    """What a machine did when it was measured several times."""
    bandwidths = [of.bandwidth for of in machines if of.bandwidth is not None]
    return Machine(
        runs=[_mean(runs) for runs in zip(*(of.runs for of in machines), strict=True)],
        bandwidth=fmean(bandwidths) if bandwidths else None,
    )


def _mean(runs: Sequence[Stepped]) -> Stepped:
    sends = [run.send for run in runs if run.send is not None]
    return Stepped(
        samples=[sample for run in runs for sample in run.samples],
        computing=fmean(run.computing for run in runs),
        step=fmean(run.step for run in runs),
        update=fmean(run.update for run in runs),
        send=fmean(sends) if sends else None,
    )


def measure_machine(ranks: int, request: Request, folder: Path) -> Machine:
    """Run it as so many ranks here.

    Raises:
        UserError: a rank failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / REQUEST, request.model_dump_json())
    run_ranks(ranks, ["-m", "rlt_dist.study.measure_machine", str(folder)], folder / "ranks.txt")
    return Machine.model_validate_json((folder / MEASURED).read_text())


def measure_rank(folder: Path) -> None:
    """One rank's part in it."""
    request = Request.model_validate_json((folder / REQUEST).read_text())
    with open_world() as world:
        runs = [_run(config, request, world) for config in request.configs]
        found = Machine(runs=runs, bandwidth=_bandwidth(world) if world.size > 1 else None)
        if world.leads:
            write_atomic(folder / MEASURED, found.model_dump_json())


# -- steps -------------------------------------------------------------------------------------


def _run(config: RunConfig, request: Request, world: World) -> Stepped:
    with mesh_of(config, world) as mesh:
        rehearsal = Rehearsal(config, request.vocabulary, mesh, document=_ENDLESS)
        run = run_of(config, request.vocabulary, mesh.axes)
        for _ in range(run.own.seen // run.own.tokens + 1):
            rehearsal.step()
        works: dict[str, list[float]] = defaultdict(list)
        computing: list[float] = []
        steps: list[float] = []
        sends: list[float] = []
        began = time.perf_counter()
        for done in range(_MOST):
            late = torch.tensor(time.perf_counter() - began > request.seconds)
            dist.all_reduce(late, dist.ReduceOp.MAX, group=world.group)
            if done >= _LEAST and late:
                break
            batch = rehearsal.next_batch()
            steps.append(_timed(partial(rehearsal.step, batch), world))
            passed = rehearsal.pass_through()
            own: dict[str, float] = defaultdict(float)
            for what, start, end in passed.done:
                if isinstance(what, Work):
                    own[what.kind] += end - start
                elif isinstance(what, Send):
                    sends.append(end - start)
            computing.append(sum(own.values()))
            own[UPDATE] = _timed(partial(_update, rehearsal, mesh), world)
            for kind, seconds in own.items():
                works[kind].append(seconds)
    medians = {kind: median(of) for kind, of in works.items()}
    return Stepped(
        samples=_samples(run, mesh, medians) if run.axes.pipeline * run.axes.tensor == 1 else [],
        computing=median(computing),
        step=median(steps),
        update=medians[UPDATE],
        send=fmean(sends) if sends else None,
    )


def _timed(action: Callable[[], Any], world: World) -> float:
    dist.barrier(group=world.group)
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def _update(rehearsal: Rehearsal, mesh: Mesh) -> None:
    """What follows on the passes of a step, from the gradients that a pass has left."""
    complete_gradients(rehearsal.local, mesh)
    norm = float(rehearsal.optimizer.reduce()) ** 0.5
    rehearsal.optimizer.step(1e-6, norm)
    rehearsal.optimizer.zero_gradients()


def _samples(run: Run, mesh: Mesh, seconds: dict[str, float]) -> list[Sample]:
    """What the first stage's works are made of, beside their times."""
    place = mesh.place
    rank = run.rank(place.stage, place.tensor)
    whole = defaultdict(Taken, {UPDATE: demanded(updating(run, place))})
    for work, count in rank.alike():
        own = taken(run, rank, work, stepwise=True).times(count * run.micro_batches)
        whole[work.kind] = whole[work.kind].plus(own)
    return [
        Sample(name=rate_name(run, kind), taken=of, seconds=seconds[kind])
        for kind, of in whole.items()
        if kind in seconds and of != Taken()
    ]


# -- messages ----------------------------------------------------------------------------------


def _bandwidth(world: World) -> float:
    """Bytes that leave a rank in a second of a long all-reduce."""
    values = torch.zeros(_LONG)
    whole = Transfer("world", "all_reduce", values.nbytes).on_wire(world.size)
    reduce = partial(dist.all_reduce, values, group=world.group)
    return whole / median(_timed(reduce, world) for _ in range(15))


if __name__ == "__main__":
    with shown_on_one_rank():
        measure_rank(Path(sys.argv[1]))
