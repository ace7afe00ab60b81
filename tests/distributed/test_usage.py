"""What a step on a mesh tells of messages and waiting; the runs are those that others here need."""

from itertools import product
from typing import Any

import pytest

from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.costs.run import run_of
from rlt_dist.costs.traffic import step_traffic
from rlt_dist.mesh.axes import Axes, Place, parse_axes
from rlt_dist.util.records import read_records

RUNS = [
    *[(2, mesh, model) for mesh in ("2x1x1", "1x2x1", "1x1x2") for model in ("rlt1", "xl")],
    *[(4, mesh, "rlt1") for mesh in ("1x2x2", "2x2x1", "2x1x2")],
]
BYTES = 257


def by_axis(axes: Axes) -> dict[str, int]:
    replica = axes.pipeline * axes.tensor
    sizes = {"data": axes.data, "pipeline": axes.pipeline, "tensor": axes.tensor}
    return sizes | {"replica": replica, "world": axes.size}


@pytest.mark.parametrize(("processes", "mesh", "model"), RUNS)
def test_messages_are_told_by_axis(folder: Any, processes: int, mesh: str, model: str) -> None:
    axes = parse_axes(mesh)
    here = folder(processes, f"again-{mesh}-{model}")
    last = read_records(here / "run" / "metrics.jsonl")[-1]
    for axis, size in by_axis(axes).items():
        assert (last["sent"][axis] > 0) == (size > 1), axis
        assert (last["waiting"][axis] > 0) == (size > 1), axis
        assert last["waiting"][axis] < last["seconds"]
    assert (last["bubble"] > 0) == (axes.pipeline > 1)
    assert last["bubble"] < 1
    assert last["peak_memory"] > 0
    each = last["tokens_per_second_per_device"]
    assert each * processes == pytest.approx(last["tokens_per_second"])


@pytest.mark.parametrize("mesh", ["2x2x1", "2x1x2"])
def test_the_rank_that_sends_most_is_told(folder: Any, mesh: str) -> None:
    axes = parse_axes(mesh)
    here = folder(4, f"again-{mesh}-rlt1")
    config = load_typed(here / "run.yaml", RunConfig)
    run = run_of(config, BYTES, axes)
    places = [Place(*at) for at in product(*map(range, (axes.data, axes.pipeline, axes.tensor)))]
    sent = [
        sum(t.bytes * t.calls for t in step_traffic(run, place) if t.axis == "data")
        for place in places
    ]
    last = read_records(here / "run" / "metrics.jsonl")[-1]
    assert last["sent"]["data"] == max(sent)
    assert len(set(sent)) > (axes.pipeline > 1), "stages should differ"
