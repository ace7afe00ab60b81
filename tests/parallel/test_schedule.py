"""What the lists hold: all work once, messages in order, fair turns, the use of the formulas."""

import os
import subprocess
import sys
from bisect import bisect_left
from collections import Counter, defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.parallel.schedule.costs import TOKEN_BY_TOKEN, ticks
from rlt_dist.parallel.schedule.instructions import (
    Kind,
    Message,
    Receive,
    Schedule,
    Send,
    Value,
    Work,
)
from rlt_dist.parallel.schedule.looped import looped
from rlt_dist.parallel.schedule.pipeline import gpipe, one_f_one_b
from rlt_dist.parallel.schedule.simulate import DeadlockError, Timed, Timeline, simulate, use

STAGES = st.integers(1, 8)
PARTS = st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=3), min_size=1, max_size=12)
RING = (Kind.DECODE, Kind.DECODE_BACKWARD)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    """Of any family."""
    stages = draw(STAGES)
    if draw(st.booleans()):
        make = draw(st.sampled_from((gpipe, one_f_one_b)))
        return make(stages, draw(st.integers(1, 12)))
    group, in_flight = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    options = {"group": group, "in_flight": in_flight, "backward": draw(st.booleans())}
    return looped(stages, draw(PARTS), feedback=draw(st.booleans()), **options)


def works(schedule: Schedule, stage: int) -> list[Work]:
    return [what for what in schedule[stage] if isinstance(what, Work)]


@settings(max_examples=60)
@given(schedules())
def test_messages_are_received_once_and_in_the_order_of_sending(schedule):
    sent, received = defaultdict(list), defaultdict(list)
    for stage, instructions in enumerate(schedule):
        for what in instructions:
            if isinstance(what, Send):
                assert what.message.source == stage
                sent[stage, what.message.target].append(what.message)
            elif isinstance(what, Receive):
                assert what.message.target == stage
                received[what.message.source, stage].append(what.message)
    assert sent == received
    messages = [m for channel in sent.values() for m in channel]
    assert len(set(messages)) == len(messages)
    assert all(m.source != m.target for m in messages)


@settings(max_examples=60)
@given(schedules(), st.randoms(use_true_random=False))
def test_no_schedule_deadlocks_whatever_the_costs(schedule, luck):
    costs = {kind: luck.choice((0.0, 0.5, 1.0, 7.0)) for kind in Kind}
    timeline = simulate(
        schedule, lambda stage, work: costs[work.kind] * (1 + stage % 2), luck.random()
    )
    assert [[t.instruction for t in stage] for stage in timeline] == [list(s) for s in schedule]


@settings(max_examples=40)
@given(STAGES, PARTS, st.booleans(), st.integers(1, 12))
def test_every_stage_does_each_piece_of_work_once(stages, parts, feedback, group):
    schedule = looped(stages, parts, feedback=feedback, group=group)
    for p in range(stages):
        wanted: list[Work] = []
        for i, counts in enumerate(parts):
            steps = sum(counts)
            begins = [sum(counts[:q]) for q in range(len(counts))]
            cut = list(zip(begins, counts, strict=True))
            whole = [Kind.ENCODE, Kind.MEMORY, Kind.MEMORY_BACKWARD, Kind.ENCODE_BACKWARD]
            whole += [Kind.EMBED, Kind.EMBED_BACKWARD] if p == 0 else []
            whole += [Kind.HEAD] if p == stages - 1 else []
            wanted += [Work(kind, i, 0, steps) for kind in whole]
            wanted += [Work(kind, i, step) for kind in RING for step in range(steps)]
            wanted += [
                Work(kind, i, *part)
                for kind in (Kind.MEMORY_GRADIENT, Kind.WEIGHTS)
                for part in cut
            ]
            wanted += [Work(Kind.REPLAY, i, *part) for part in cut[:-1]]
            wanted += [Work(Kind.CARRY, i, steps)] if p == 0 and feedback else []
        assert Counter(works(schedule, p)) == Counter(wanted)


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, lambda p, m: looped(p, [(3, 2)] * m)])
def test_one_stage_sends_nothing(make):
    (only,) = make(1, 3)
    assert all(isinstance(what, Work) for what in only)


def test_two_stages_two_micro_batches_two_steps():
    """The whole ring of the first stage, as the executor reads it."""
    first, _ = looped(2, [(2,), (2,)], cost=ticks, backward=False)
    assert [str(what) for what in first] == [
        "embed 0:0..1",
        "embed 1:0..1",
        "encode 0:0..1",
        "send x 0:0 to 1",
        "encode 1:0..1",
        "send x 1:0 to 1",
        "receive e 0:0 from 1",
        "memory 0:0..1",
        "decode 0:0",
        "send u 0:0 to 1",
        "receive e 1:0 from 1",
        "memory 1:0..1",
        "decode 1:0",
        "send u 1:0 to 1",
        "receive s 0:0 from 1",
        "decode 0:1",
        "send u 0:1 to 1",
        "receive s 1:0 from 1",
        "decode 1:1",
        "send u 1:1 to 1",
        "receive s 0:1 from 1",
        "carry 0:2",
        "receive s 1:1 from 1",
        "carry 1:2",
    ]


# The ring's use


@settings(max_examples=60, deadline=None)
@given(STAGES, st.integers(1, 12), st.integers(1, 40))
def test_the_rings_use_in_ticks_is_the_formulas(stages, m, n):
    timeline = simulate(looped(stages, [(n,)] * m, cost=ticks))
    wanted = m * n / (m * n + stages - 1) if m >= stages else m * n / (stages * n + m - 1)
    for kind in RING:
        assert use(timeline, {kind}) == pytest.approx(wanted, rel=1e-12)
    if m < stages and n * stages > 100 * m:
        assert wanted == pytest.approx(m / stages, rel=0.01)


@pytest.mark.parametrize(("m", "share"), [(4, 0.4), (8, 0.8), (10, 1.0), (12, 1.0)])
def test_a_hop_costs_what_the_formula_says(m, share):
    """use = min(1, m / (P (1 + h))), less the bubble of (P - 1) (1 + h); P = 8, h = 0.25."""
    n = 200
    schedule = looped(8, [(n,)] * m, cost=ticks, hop=0.25, backward=False)
    round_trip = 7 * 1.25
    wanted = share * m * n / (m * n + share * round_trip)
    assert use(simulate(schedule, hop=0.25), {Kind.DECODE}) == pytest.approx(wanted, rel=0.01)


@settings(max_examples=40, deadline=None)
@given(STAGES, st.integers(1, 12), st.integers(1, 12), st.booleans())
def test_micro_batches_of_one_length_take_turns(stages, m, n, two_parts):
    parts = (n, n) if two_parts else (n,)
    schedule = looped(stages, [parts] * m, cost=ticks)
    for kind in RING:
        for p in range(stages):
            turns = [0] * m
            for work in works(schedule, p):
                turns[work.micro] += work.kind == kind
                assert max(turns) - min(turns) <= 1


@settings(max_examples=30, deadline=None)
@given(STAGES, PARTS)
def test_nobody_waits_for_more_than_a_round_and_what_others_have_further_to_go(stages, parts):
    timeline = simulate(looped(stages, parts, cost=ticks))
    steps = list(map(sum, parts))
    for kind in RING:
        turns = turns_of(timeline, kind)
        starts = [sorted(t.start for (q, *_), t in turns.items() if q == p) for p in range(stages)]
        for (p, micro, step), turn in turns.items():
            before = turns.get(came_from(kind, p, micro, step, stages))
            if before is not None:
                passed = bisect_left(starts[p], turn.start) - bisect_left(starts[p], before.end)
                further = sum(max(0, other - steps[micro]) for other in steps)
                assert passed <= len(parts) - 1 + further


def turns_of(timeline: Timeline, kind: Kind) -> dict[tuple[int, int, int], Timed]:
    """By stage, micro-batch and step."""
    return {
        (p, t.instruction.micro, t.instruction.step): t
        for p, stage in enumerate(timeline)
        for t in stage
        if isinstance(t.instruction, Work) and t.instruction.kind == kind
    }


def came_from(kind: Kind, p: int, micro: int, step: int, stages: int) -> tuple[int, int, int]:
    """Which turn comes before a turn on its way round."""
    if kind == Kind.DECODE:
        return (p - 1, micro, step) if p else (stages - 1, micro, step - 1)
    return (p + 1, micro, step) if p < stages - 1 else (0, micro, step + 1)


# Filling idle time


def test_a_second_group_fills_the_bubbles_of_the_first_and_never_delays_it():
    def ends(timeline: Timeline, group: range) -> list[list[float]]:
        return [
            [
                t.end
                for t in stage
                if isinstance(t.instruction, Work) and t.instruction.micro in group
            ]
            for stage in timeline
        ]

    alone = simulate(looped(4, [(8,)] * 4), TOKEN_BY_TOKEN)
    one_by_one = simulate(looped(4, [(8,)] * 8, group=4, in_flight=1), TOKEN_BY_TOKEN)
    both = simulate(looped(4, [(8,)] * 8, group=4), TOKEN_BY_TOKEN)
    for stage_alone, stage in zip(ends(alone, range(4)), ends(both, range(4)), strict=True):
        assert all(now <= then + 1e-9 for then, now in zip(stage_alone, stage, strict=True))
    assert end(both) < 0.97 * end(one_by_one)


def end(timeline: Timeline) -> float:
    return max(stage[-1].end for stage in timeline)


@settings(max_examples=30)
@given(STAGES, st.integers(2, 12), st.integers(1, 4), st.integers(1, 2))
def test_a_stage_holds_no_more_groups_than_it_may(stages, count, group, in_flight):
    schedule = looped(stages, [(2,)] * count, group=group, in_flight=in_flight)
    for p in range(stages):
        left = Counter(work.micro // group for work in works(schedule, p))
        begun = set()
        for work in works(schedule, p):
            begun.add(work.micro // group)
            left[work.micro // group] -= 1
            assert sum(left[g] > 0 for g in begun) <= in_flight


def test_weight_gradients_fill_the_time_in_which_a_stage_waits():
    schedule = looped(4, [(8,)] * 5)
    for p in range(3):  # the last stage has its idle time filled by the memory's gradients
        order = works(schedule, p)
        before_encoder = order[: order.index(Work(Kind.ENCODE_BACKWARD, 0, 0, 8))]
        assert any(work.kind == Kind.WEIGHTS for work in before_encoder)

    def but_weights(stage: int, work: Work) -> float:
        return 0.0 if work.kind == Kind.WEIGHTS else TOKEN_BY_TOKEN(stage, work)

    with_weights, without = (
        end(simulate(schedule, TOKEN_BY_TOKEN)),
        end(simulate(schedule, but_weights)),
    )
    formed = 5 * 8 * 0.25
    assert with_weights - without < formed / 2


# One stack


@settings(max_examples=40)
@given(st.sampled_from((gpipe, one_f_one_b)), STAGES, st.integers(1, 12))
def test_a_pipelines_use_is_the_formulas(make, stages, count):
    timeline = simulate(make(stages, count))
    assert end(timeline) == 2 * (count + stages - 1)
    wanted = count / (count + stages - 1)
    assert use(timeline, {Kind.FORWARD, Kind.BACKWARD}) == pytest.approx(wanted)


@given(STAGES, st.integers(1, 12))
def test_one_f_one_b_holds_no_more_micro_batches_than_stages_follow(stages, count):
    schedule = one_f_one_b(stages, count)
    for p in range(stages):
        held = most = 0
        for work in works(schedule, p):
            held += (work.kind == Kind.FORWARD) - (work.kind == Kind.BACKWARD)
            most = max(most, held)
        assert most == min(stages - p, count)


# Mistakes


def message(value: Value, source: int, target: int) -> Message:
    return Message(value, 0, 0, source, target)


def test_a_deadlock_names_who_waits_for_what():
    x, dx = message(Value.X, 0, 1), message(Value.DX, 1, 0)
    schedule = ((Receive(dx), Send(x)), (Receive(x), Send(dx)))
    with pytest.raises(DeadlockError) as error:
        simulate(schedule)
    assert str(error.value) == (
        "stage 0 waits for dx 0:0 of stage 1, which waits for x 0:0; "
        "stage 1 waits for x 0:0 of stage 0, which waits for dx 0:0"
    )


def test_waiting_for_what_was_never_sent_is_a_deadlock():
    with pytest.raises(DeadlockError, match="stage 1 waits for x 0:0 of stage 0, which has ended"):
        simulate(((), (Receive(message(Value.X, 0, 1)),)))


def test_messages_that_cross_or_are_left_are_refused():
    x, e = message(Value.X, 0, 1), message(Value.E, 0, 1)
    with pytest.raises(ValueError, match="stage 1 receives e 0:0 from stage 0, which sends x 0:0"):
        simulate(((Send(x), Send(e)), (Receive(e), Receive(x))))
    with pytest.raises(ValueError, match="stage 1 never receives x 0:0 of stage 0"):
        simulate(((Send(x),), ()))


@pytest.mark.parametrize(
    "make",
    [
        lambda: looped(0, [(1,)]),
        lambda: looped(2, []),
        lambda: looped(2, [(1,)], group=0),
        lambda: looped(2, [(1,)], in_flight=0),
        lambda: looped(2, [()]),
        lambda: looped(2, [(2, 0)]),
        lambda: gpipe(0, 1),
        lambda: one_f_one_b(1, 0),
    ],
)
def test_nothing_to_schedule_is_refused(make):
    with pytest.raises(ValueError, match=r"0|\[\]"):
        make()


def test_every_process_makes_the_same_schedule():
    """Nothing hangs on the order of a set, which differs between processes."""
    code = (
        "from rlt_dist.parallel.schedule.looped import looped;"
        "print([str(i) for s in looped(3, [(2, 1), (4,), (1,)] * 3, group=3) for i in s])"
    )
    texts = {
        subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(texts) == 1
