"""Simulated passes: the executor's order, cores that are shared, and long passes from short."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.config.run import RunConfig
from rlt_dist.costs.cluster import ClusterConfig, load_cluster
from rlt_dist.costs.run import Rank, Run, run_of
from rlt_dist.costs.time import Clock, Seconds
from rlt_dist.mesh.axes import Axes
from rlt_dist.mesh.local import run_ranks
from rlt_dist.parallel.schedule.instructions import Kind, Schedule, Work
from rlt_dist.parallel.schedule.looped import looped
from rlt_dist.parallel.schedule.pipeline import one_f_one_b
from rlt_dist.parallel.schedule.simulate import simulate
from rlt_dist.study import passes
from rlt_dist.study.cores import Cores, simulate_shared
from rlt_dist.study.passes import Passes, end_of, schedule_of

ORDERS = Path(__file__).parent / "orders.py"
H100 = load_cluster(Path(__file__).parents[2] / "configs/clusters/h100.yaml")
VOCABULARY, STAGES = 41, 2
RLT = {
    **{"kind": "rlt", "d_model": 8, "heads": 2, "ffn": 12, "memory_len": 6},
    **{"encoder_layers": 2, "decoder_layers": 2, "window": 3},
}
XL = {"kind": "transformer_xl", "d_model": 8, "heads": 2, "d_inner": 12, "layers": 2}
XL |= {"memory_len": 6}
CASES: dict[str, dict[str, Any]] = {
    "rlt0": {"model": RLT | {"feedback": 0}, "recompute": {"decoder_chunk": 3}},
    "rlt1": {"model": RLT},
    "rlt1 in groups and parts": {
        "model": RLT,
        "pipeline": {"group": 2},
        "recompute": {"decoder_chunk": 4},
    },
    "rlt2": {"model": RLT | {"feedback": 4}, "pipeline": {"group": 2, "in_flight": 1}},
    "xl": {"model": XL},
    "xl, gpipe": {"model": XL, "pipeline": {"schedule": "gpipe"}},
}


def content(case: str) -> dict[str, Any]:
    base = {
        "run_folder": "none",
        "data": {"path": "none", "lanes": 8, "segment": 12},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"steps": 1, "micro_batch": 2},
        "mesh": {"data": 1, "pipeline": STAGES, "tensor": 1},
    }
    return base | CASES[case]


def test_stages_carry_out_the_instructions_that_are_simulated(tmp_path: Path) -> None:
    (tmp_path / "cases.json").write_text(json.dumps([content(case) for case in CASES]))
    run_ranks(STAGES, [str(ORDERS), str(tmp_path)], tmp_path / "ranks.txt")
    done = [json.loads((tmp_path / f"{stage}.json").read_text()) for stage in range(STAGES)]
    for number, case in enumerate(CASES):
        config = RunConfig.model_validate(content(case))
        run = run_of(config, VOCABULARY, Axes(1, STAGES, 1), seen=0)
        timeline = Passes(Clock(run, H100)).timeline()
        simulated = [[str(timed.instruction) for timed in stage] for stage in timeline]
        assert [done[stage][number] for stage in range(STAGES)] == simulated, case


# -- cores -------------------------------------------------------------------------------------

SCHEDULES = st.one_of(
    st.builds(one_f_one_b, st.integers(1, 5), st.integers(1, 6)),
    st.builds(
        lambda stages, micro, parts: looped(stages, [parts] * micro),
        st.integers(1, 4),
        st.integers(1, 4),
        st.lists(st.integers(1, 3), min_size=1, max_size=2),
    ),
)
ANY = dict.fromkeys(Kind, 1.0) | {Kind.DECODE: 0.7, Kind.ENCODE: 2.3, Kind.FORWARD: 1.3}


def cost(stage: int, work: Any) -> float:
    return ANY[work.kind] * work.count * (1 + 0.1 * stage)


@given(schedule=SCHEDULES, hop=st.sampled_from([0.0, 0.4]))
@settings(max_examples=25, deadline=None)
def test_with_enough_cores_nobody_slows_another_down(schedule: Schedule, hop: float) -> None:
    shared = simulate_shared(schedule, cost, lambda _: hop, Cores(len(schedule)))
    for own, plain in zip(shared, simulate(schedule, cost, hop), strict=True):
        assert [timed.instruction for timed in own] == [timed.instruction for timed in plain]
        assert [timed.end for timed in own] == pytest.approx([timed.end for timed in plain])


@given(schedule=SCHEDULES)
@settings(max_examples=25, deadline=None)
def test_one_core_does_all_work_one_after_the_other(schedule: Schedule) -> None:
    shared = simulate_shared(schedule, cost, lambda _: 0.0, Cores(1))
    alone = simulate(schedule, cost)
    work = sum(t.end - t.start for stage in alone for t in stage if hasattr(t.instruction, "kind"))
    assert end_of(shared) == pytest.approx(work)


def test_two_stages_of_two_ranks_on_two_cores_take_twice_as_long() -> None:
    cores = Cores(2, contention=1.25, crowding=1.5, ranks=2)
    assert cores.slowdown(1) == 1.25
    assert cores.slowdown(2) == 2 * 1.5
    assert Cores(4, contention=1.25, ranks=2).slowdown(1) == 1.0


# -- long passes -------------------------------------------------------------------------------


def big(model: dict[str, Any], stages: int, lanes: int, more: dict[str, Any]) -> Run:
    base = {
        "run_folder": "none",
        "model": model,
        "data": {"path": "none", "lanes": lanes, "segment": 96},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"steps": 1, "micro_batch": 1, "precision": "bfloat16"},
    }
    config = RunConfig.model_validate(base | more)
    return run_of(config, 32000, Axes(1, stages, 1), compiled=False)


WIDE = {
    **{"kind": "rlt", "d_model": 512, "heads": 8, "ffn": 1024, "memory_len": 64},
    **{"encoder_layers": 8, "decoder_layers": 8},
}
PARTS = {"recompute": {"decoder_chunk": 16, "layers": True}}
LONG = {
    "ring": big(WIDE, 4, 7, {}),
    "ring in parts": big(WIDE, 4, 4, PARTS),
    "ring, fewer micro-batches than stages": big(WIDE, 8, 3, PARTS),
    "ring, many micro-batches": big(WIDE | {"feedback": 8}, 4, 30, {}),
    "groups": big(WIDE | {"feedback": 4}, 2, 24, {"pipeline": {"group": 3}}),
    "xl": big(
        {
            **{"kind": "transformer_xl", "d_model": 512, "heads": 8, "d_inner": 2048},
            **{"layers": 8, "memory_len": 96},
        },
        4,
        60,
        {},
    ),
}


@pytest.mark.parametrize("case", LONG)
def test_a_long_pass_takes_what_short_ones_tell(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Passes(Clock(LONG[case], H100))
    exact = end_of(whole.timeline())
    monkeypatch.setattr(passes, "_WORKS", 0)
    assert whole.seconds == pytest.approx(exact, rel=0.01)
    assert whole.least <= exact


def test_work_is_that_of_the_whole_pass() -> None:
    run = LONG["ring in parts"]
    whole = Passes(Clock(run, H100))
    timeline = whole.timeline()
    for stage, works in enumerate(whole.works):
        spent = sum(t.end - t.start for t in timeline[stage] if hasattr(t.instruction, "kind"))
        assert spent == pytest.approx(works.total)
    assert [len(stage) for stage in timeline] == [len(stage) for stage in schedule_of(run)]


def test_work_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[tuple[Rank, Work]] = []
    work = Clock.work

    def time(clock: Clock, rank: Rank, what: Work) -> Seconds:
        timed.append((rank, what))
        return work(clock, rank, what)

    monkeypatch.setattr(Clock, "work", time)
    run = LONG["ring in parts"]
    whole = Passes(Clock(run, H100))
    assert whole.least > 0
    assert whole.seconds > 0
    assert sorted(map(str, timed)) == sorted({str(each) for each in timed})


def test_contention_slows_a_pass_down() -> None:
    def on(cluster: ClusterConfig) -> float:
        return Passes(Clock(LONG["xl"], cluster)).seconds

    shared = H100.model_copy(update={"cores": 4, "contention": 1.5})
    assert 1.1 * on(H100) < on(shared) < 1.5 * on(H100)
