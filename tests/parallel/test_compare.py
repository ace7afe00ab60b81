"""A run beside its plan: uses against the formulas, shares of the time, costs measured again."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.parallel.schedule.compare import measured, shares, uses
from rlt_dist.parallel.schedule.costs import TOKEN_BY_TOKEN, WHOLE_SEGMENTS
from rlt_dist.parallel.schedule.instructions import Kind, Message, Receive, Send, Value, Work
from rlt_dist.parallel.schedule.looped import looped
from rlt_dist.parallel.schedule.pipeline import gpipe, one_f_one_b
from rlt_dist.parallel.schedule.simulate import Timed, simulate

EXAMPLES = [(4, 4, 32), (4, 8, 32), (4, 2, 32), (3, 5, 7), (8, 8, 64), (8, 3, 64), (2, 6, 17)]


@pytest.mark.parametrize("halves", [False, True])
@pytest.mark.parametrize(("stages", "m", "n"), EXAMPLES)
def test_the_ring_that_stages_are_told_to_run_has_the_use_of_the_formula(stages, m, n, halves):
    """It was arranged for rough costs, not for ticks: 1 % at most is lost by that."""
    schedule = looped(stages, [(n // 2, n - n // 2) if halves else (n,)] * m)
    wanted = m * n / (m * n + stages - 1) if m >= stages else m * n / (stages * n + m - 1)
    found = list(uses(schedule, simulate(schedule), None))
    assert [use.kinds for use in found] == ["decode", "decode backward"]
    for use in found:
        assert use.formula == pytest.approx(wanted, rel=1e-12)
        assert use.planned == use.run == pytest.approx(wanted, rel=0.01)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b])
def test_a_pipeline_has_the_use_of_its_formula(make):
    schedule = make(4, 6)
    (found,) = uses(schedule, simulate(schedule, WHOLE_SEGMENTS), None)
    assert found.kinds == "forward and backward"
    assert found.formula == pytest.approx(6 / 9)
    assert found.planned == pytest.approx(6 / 9)


def test_two_passes_have_the_use_of_a_pipeline_also_in_parts():
    schedule = looped(4, [(1, 1)] * 2, feedback=False)
    decode, _ = uses(schedule, simulate(schedule, WHOLE_SEGMENTS), None)
    assert decode.formula == pytest.approx(2 * 2 / (2 * 2 + 3))


def test_no_formula_is_given_for_groups_or_lengths_that_differ():
    groups = looped(3, [(4,)] * 6, group=3)
    lengths = looped(3, [(4,), (3,), (4,)])
    for schedule, group in ((groups, 3), (lengths, None)):
        found = list(uses(schedule, simulate(schedule, TOKEN_BY_TOKEN), group))
        assert [use.formula for use in found] == [None, None]
    assert all(use.formula for use in uses(groups, simulate(groups), 6))


@settings(max_examples=20, deadline=None)
@given(
    st.integers(1, 5),
    st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=2), min_size=1, max_size=5),
    st.randoms(use_true_random=False),
)
def test_costs_measured_in_a_run_plan_that_run(stages, parts, luck):
    schedule = looped(stages, parts)
    costs = {(p, kind): luck.choice((0.5, 1.0, 4.0)) for p in range(stages) for kind in Kind}
    run = simulate(schedule, lambda p, work: costs[p, work.kind] * work.count)
    again = simulate(schedule, measured(run))
    assert [t.end for stage in again for t in stage] == pytest.approx(
        [t.end for stage in run for t in stage]
    )


def test_shares_are_of_the_whole_pass():
    x = Message(Value.X, 0, 0, 0, 1)
    first = (Timed(Work(Kind.FORWARD, 0), 10.0, 14.0), Timed(Send(x), 14.0, 15.0))
    second = (Timed(Receive(x), 10.0, 15.0), Timed(Work(Kind.FORWARD, 0), 15.0, 20.0))
    assert shares((first, second)) == [(0.4, 0.0, 0.1), (0.5, 0.5, 0.0)]
