"""Seconds of work and messages against the formulas they stand for."""

from pathlib import Path
from typing import Any

import pytest

from rlt_dist.config.run import RunConfig
from rlt_dist.costs.cluster import RateConfig, load_cluster
from rlt_dist.costs.demand import demand_of
from rlt_dist.costs.effort import Product, Transfer
from rlt_dist.costs.run import Run, run_of
from rlt_dist.costs.taken import taken
from rlt_dist.costs.time import Clock, measured
from rlt_dist.mesh.axes import Axes, Place
from rlt_dist.parallel.schedule.instructions import Kind, Work

H100 = load_cluster(Path(__file__).parents[2] / "configs/clusters/h100.yaml")
XL = {
    **{"kind": "transformer_xl", "d_model": 1024, "heads": 16, "d_inner": 4096},
    **{"layers": 8, "memory_len": 512},
}
RLT = {
    **{"kind": "rlt", "d_model": 512, "heads": 16, "ffn": 1024, "memory_len": 64},
    **{"encoder_layers": 4, "decoder_layers": 4},
}


def run_on(
    axes: Axes, model: dict[str, Any] = XL, *, compiled: bool = False, apart: bool = False
) -> Run:
    content = {
        "run_folder": "none",
        "model": model,
        "data": {"path": "none", "lanes": 512, "segment": 512},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"steps": 1, "micro_batch": 8, "precision": "float32" if compiled else "bfloat16"},
    }
    config = RunConfig.model_validate(content)
    return run_of(config, 32000, axes, compiled=compiled, apart=apart)


def test_large_products_wait_for_arithmetic_and_thin_ones_for_memory() -> None:
    clock = Clock(run_on(Axes(1, 1, 1)), H100)
    large, thin = Product(1, 8192, 4096, 4096), Product(1, 8, 4096, 4096)
    flops, bandwidth = 989.4e12 * H100.efficiency, 3.35e12
    assert clock.roofline(large) == (pytest.approx(2 * 8192 * 4096**2 / flops), 0.0)
    assert clock.roofline(thin) == (0.0, pytest.approx(2 * thin.numbers / bandwidth))


def test_a_small_product_takes_as_long_as_a_tile() -> None:
    clock = Clock(run_on(Axes(1, 1, 1)), H100)
    rows = [clock.flop_seconds(Product(1, m, 1 << 16, 64)) for m in (1, 64, 65)]
    assert rows[0] == rows[1] == pytest.approx(rows[2] / 2)


def test_work_takes_its_products_its_other_operators_and_their_starts() -> None:
    run = run_on(Axes(1, 1, 1))
    clock, rank, work = Clock(run, H100), run.rank(0), Work(Kind.FORWARD, 0)
    demand, found = demand_of(rank, work), clock.work(rank, work)
    parts = [clock.roofline(product) for product in rank.effort(work).products]
    assert found.compute == pytest.approx(sum(compute for compute, _ in parts))
    touched = demand.numbers * 4 / 3.35e12
    assert found.memory == pytest.approx(sum(memory for _, memory in parts) + touched)
    assert found.launch == pytest.approx(demand.operations * H100.launch)
    assert found.tensor == 0.0


def test_measured_rates_stand_in_for_the_roofline() -> None:
    rate = RateConfig(
        flop=1e-12, attention=2e-12, score=3e-11, number=1e-10, operation=1e-5, call=1e-4
    )
    cluster = H100.model_copy(update={"rates": {"forward": rate}})
    run = run_on(Axes(1, 1, 1))
    rank, work = run.rank(0), Work(Kind.FORWARD, 0)
    own = taken(run, rank, work, stepwise=False)
    found = Clock(run, cluster).work(rank, work)
    assert found == measured(own, rate)
    pairs = 8 * 16 * 512 * (512 + 512)  # lanes, heads, queries, keys
    products = sum(p.flops for p in rank.effort(work).products if not p.weight)
    assert own.scores == pytest.approx(products / (2 * 64))
    assert own.scores >= 2 * 8 * pairs
    assert found.compute == pytest.approx(
        own.weighted * 1e-12 + own.other * 2e-12 + own.scores * 3e-11
    )


def test_the_compiled_loop_starts_once_for_a_step_of_a_pipeline() -> None:
    rate = RateConfig(flop=0, attention=0, score=0, number=0, operation=0, call=1e-3)
    cluster = H100.model_copy(update={"rates": {"decode, compiled": rate}})
    for stages, seconds in ((1, 0.0), (2, 1e-3)):
        run = run_on(Axes(1, stages, 1), RLT, compiled=True)
        found = Clock(run, cluster).work(run.rank(0), Work(Kind.DECODE, 0, 3))
        assert found.launch == pytest.approx(seconds)


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
def test_collectives_take_the_time_of_a_ring(kind: str) -> None:
    clock, size, ranks = Clock(run_on(Axes(8, 1, 1)), H100), 1 << 30, range(8)
    hops = 14 if kind == "all_reduce" else 7
    wire = {"all_reduce": 2 * size * 7 / 8, "all_gather": size * 7, "all_to_all": size * 7 / 8}
    within = hops * 3e-6 + wire[kind] / 450e9
    transfer = Transfer("data", kind, size, calls=3)
    assert clock.transfer(transfer, ranks) == pytest.approx(3 * within, rel=1e-3)
    between = hops * 5e-6 + wire[kind] / 50e9
    apart = [8 * rank for rank in ranks]
    assert clock.transfer(transfer, apart) == pytest.approx(3 * between, rel=1e-3)


def test_measured_collectives_are_those_of_the_nearest_number_of_ranks() -> None:
    measured = {"2 of 2": 1e-3, "2 of 4": 2e-3, "4 of 4": 5e-3}
    cluster = H100.model_copy(update={"collectives": measured})
    clock = Clock(run_on(Axes(2, 1, 2)), cluster)
    for ranks, seconds in ((2, 2e-3), (4, 5e-3)):
        found = clock.transfer(Transfer("world", "all_reduce", 8), range(ranks))
        assert found == pytest.approx(seconds, rel=1e-3)
    alone = Clock(run_on(Axes(2, 1, 1)), cluster)
    assert alone.transfer(Transfer("data", "all_reduce", 8), range(2)) == pytest.approx(1e-3)


def test_long_messages_have_a_bandwidth_of_the_ranks_that_send() -> None:
    cluster = H100.model_copy(update={"bandwidths": {"2 of 2": 2e9, "4 of 4": 1e9}})
    for axes, bandwidth in ((Axes(2, 1, 1), 2e9), (Axes(2, 1, 2), 1e9), (Axes(4, 1, 1), 1e9)):
        transfer = Transfer("data", "all_reduce", 1 << 30)
        seconds = transfer.on_wire(axes.data) / bandwidth
        found = Clock(run_on(axes), cluster).transfer(transfer, range(axes.data))
        assert found == pytest.approx(seconds, rel=1e-3)


def test_the_compiled_loop_leaves_out_rows_that_lanes_apart_leave_empty() -> None:
    rate = RateConfig(flop=1e-12, attention=0, score=0, number=0, operation=0, call=0)
    cluster = H100.model_copy(update={"rates": {"decode": rate, "decode, compiled": rate}})

    def seconds(*, compiled: bool, apart: bool) -> float:
        run = run_on(Axes(1, 1, 1), RLT | {"feedback": 16}, compiled=compiled, apart=apart)
        rank, clock = run.rank(0), Clock(run, cluster)
        steps = [work for work in rank.works() if work.kind == Kind.DECODE]
        return sum(clock.work(rank, step).total for step in steps)

    compiled = seconds(compiled=True, apart=True)
    assert compiled == pytest.approx(seconds(compiled=True, apart=False), rel=0.02)
    assert seconds(compiled=False, apart=True) > 1.1 * seconds(compiled=False, apart=False)


def test_the_tensor_axis_shares_a_node_and_the_data_axis_does_not() -> None:
    axes = Axes(4, 2, 4)
    clock, place = Clock(run_on(axes), H100), Place(1, 0, 2)
    links = {
        axis: clock.link(axes.members(axis, place))
        for axis in ("tensor", "pipeline", "replica", "data", "world")
    }
    within, between = H100.within_node, H100.between_nodes
    assert links == {
        **{"tensor": within, "pipeline": within, "replica": within},
        **{"data": between, "world": between},
    }
    far = Axes(1, 4, 4)
    assert Clock(run_on(far), H100).hop(0, 0, 1) == within.latency
    assert Clock(run_on(far), H100).hop(0, 1, 2) == between.latency
