"""What becomes of a job, from what is remembered of its starts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt_dist.jobs.decide import decide, fruitless
from rlt_dist.jobs.job import Start

HOWS = ("finished", "stopped", "guard", "mistake", "failed", "sick")


def start(how: str, before: int = 0, after: int = 0, **more: Any) -> Start:
    known = {"job_id": "7", "nodes": ("n0", "n1"), "mesh": "2x1x1", "began": 1, "ended": 2}
    return Start(**known | more, from_step=before, how=how, to_step=after)


HISTORIES = st.lists(
    st.builds(
        start,
        st.sampled_from(HOWS),
        st.integers(0, 2),
        st.integers(0, 2),
        sick=st.sets(st.sampled_from(["n0", "n1"])).map(tuple),
    ),
    min_size=1,
    max_size=8,
)


def test_the_first_start_is_made_unless_the_job_was_cancelled() -> None:
    assert decide([], 3, unwanted=None).again
    decision = decide([], 3, unwanted="cancelled")
    assert (decision.again, decision.status) == (False, 75)


@pytest.mark.parametrize(
    ("how", "wanted", "again", "status"),
    [
        ("finished", True, False, 0),
        ("finished", False, False, 0),
        ("mistake", True, False, 2),
        ("guard", True, False, 2),
        ("mistake", False, False, 2),
        ("stopped", True, True, None),
        ("failed", True, True, None),
        ("sick", True, True, None),
        ("stopped", False, False, 75),
        ("failed", False, False, 1),
        ("sick", False, False, 1),
    ],
)
def test_what_comes_after_a_start(how: str, wanted: bool, again: bool, status: int | None) -> None:
    decision = decide([start(how)], 3, unwanted=None if wanted else "cancelled")
    assert decision.again is again
    assert again or decision.status == status


def test_it_is_said_what_kept_a_job_from_going_on() -> None:
    sent = decide([start("failed", 0, 4, why="oh")], 3, unwanted="was sent SIGINT")
    assert sent.why == "failed at step 4: oh; was sent SIGINT, so not started again"


def test_a_job_that_was_never_started_is_started() -> None:
    assert decide([], 1, unwanted=None).again


def test_a_job_is_given_up_after_starts_without_a_new_checkpoint() -> None:
    history = [start("failed", 0, 4), start("failed", 4, 4), start("stopped", 4, 4, why="out")]
    assert decide(history, 3, unwanted=None).again
    given_up = decide([*history, start("failed", 4, 4, why="rank 1: oh")], 3, unwanted=None)
    assert (given_up.again, given_up.status) == (False, 1)
    assert given_up.why == (
        "given up, since 3 starts in a row made no new checkpoint; failed at step 4: rank 1: oh"
    )
    assert decide([*history, start("failed", 4, 6)], 3, unwanted=None).again


def test_a_start_that_finds_a_sick_node_is_not_in_vain_but_finding_the_same_again_is() -> None:
    found = [start("sick", sick=("n0",)), start("sick", sick=("n1",))]
    assert fruitless(found) == 0
    assert fruitless([*found, start("sick", sick=("n0",))]) == 1


def test_where_every_node_is_sick_it_may_not_be_the_nodes() -> None:
    """A job of one node would leave out one after the other."""
    found = [start("sick", nodes=(node,), sick=(node,)) for node in ("n0", "n1", "n2")]
    assert [decide(found[:n], 3, unwanted=None).again for n in (1, 2, 3)] == [True, True, False]


@given(HISTORIES, st.integers(1, 4), st.booleans())
def test_no_history_goes_on_for_ever(history: list[Start], attempts: int, wanted: bool) -> None:
    """However it began: a job that goes on without a checkpoint ends, and never before its time."""
    decision = decide(history, attempts, unwanted=None if wanted else "cancelled")
    if decision.again:
        assert wanted
        assert fruitless(history) < attempts
        left = attempts - fruitless(history) - 1
        assert decide([*history, *[start("failed")] * left], attempts, unwanted=None).again
        assert not decide(
            [*history, *[start("failed")] * (left + 1)], attempts, unwanted=None
        ).again
    else:
        assert decision.status in (0, 1, 2, 75)
        assert (decision.status == 0) is (history[-1].how == "finished")
