"""What becomes of a job, from what is remembered of its starts."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt_dist.jobs.decide import decide, fruitless
from rlt_dist.jobs.job import Start

HOWS = ("finished", "stopped", "guard", "mistake", "failed", "sick")


def start(how: str, before: int = 0, after: int = 0, **more: Any) -> Start:
    return Start(
        job_id="7",
        nodes=("n0", "n1"),
        mesh="2x1x1",
        began=1,
        from_step=before,
        ended=2,
        how=how,
        to_step=after,
        **more,
    )


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
    decision = decide([start(how)], 3, wanted=wanted)
    assert decision.again is again
    assert again or decision.status == status


def test_a_job_that_was_never_started_is_started() -> None:
    assert decide([], 1, wanted=True).again


def test_a_job_is_given_up_after_starts_without_a_new_checkpoint() -> None:
    history = [start("failed", 0, 4), start("failed", 4, 4), start("stopped", 4, 4, why="out")]
    assert decide(history, 3, wanted=True).again
    given_up = decide([*history, start("failed", 4, 4, why="rank 1: oh")], 3, wanted=True)
    assert (given_up.again, given_up.status) == (False, 1)
    assert given_up.why == (
        "given up, since 3 starts in a row made no new checkpoint; failed at step 4: rank 1: oh"
    )
    assert decide([*history, start("failed", 4, 6)], 3, wanted=True).again


def test_a_start_that_finds_a_sick_node_is_not_in_vain_but_finding_the_same_again_is() -> None:
    found = [start("sick", sick=("n0",)), start("sick", sick=("n1",))]
    assert fruitless(found) == 0
    assert fruitless([*found, start("sick", sick=("n0", "n1"))]) == 1


@given(HISTORIES, st.integers(1, 4), st.booleans())
def test_no_history_goes_on_for_ever(history: list[Start], attempts: int, wanted: bool) -> None:
    """However it began: a job that goes on without a checkpoint ends, and never before its time."""
    decision = decide(history, attempts, wanted=wanted)
    if decision.again:
        assert wanted
        assert fruitless(history) < attempts
        left = attempts - fruitless(history) - 1
        assert decide([*history, *[start("failed")] * left], attempts, wanted=True).again
        assert not decide([*history, *[start("failed")] * (left + 1)], attempts, wanted=True).again
    else:
        assert decision.status in (0, 1, 2, 75)
        assert (decision.status == 0) is (history[-1].how == "finished")
