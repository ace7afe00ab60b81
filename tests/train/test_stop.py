"""What a person may write as a deadline."""

from datetime import datetime

import pytest

from rlt_dist.train.stop import JOB_END, deadline_of
from rlt_dist.util.errors import UserError

NOON = datetime(2026, 5, 1, 12).timestamp()


@pytest.mark.parametrize(
    ("wished", "seconds"),
    [
        *[("90s", 90), ("90m", 5400), ("2h", 7200), ("1.5h", 5400), ("1d", 86400)],
        *[("1h30m", 5400), ("2026-05-01T13:00", 3600), ("2026-05-01 12:00:30", 30)],
    ],
)
def test_a_deadline_is_a_duration_or_a_local_time(wished: str, seconds: float) -> None:
    assert deadline_of(wished, NOON, {}) == NOON + seconds


def test_a_time_may_name_its_zone() -> None:
    expected = datetime.fromisoformat("2030-01-01T00:00+00:00").timestamp()
    assert deadline_of("2030-01-01T01:00+01:00", NOON, {}) == expected


@pytest.mark.parametrize("wished", ["", "soon", "90", "1h 30m", "-5m", "2026-13-01", "1e3s"])
def test_anything_else_is_one_line_that_says_what_to_write(wished: str) -> None:
    with pytest.raises(UserError, match="give a duration such as 90m"):
        deadline_of(wished, NOON, {})


def test_a_time_that_is_past_is_refused() -> None:
    with pytest.raises(UserError, match="is past"):
        deadline_of("2026-05-01T11:59", NOON, {})


def test_the_end_of_the_job_counts_by_itself_and_the_earlier_of_both() -> None:
    job = {JOB_END: str(int(NOON) + 3600)}
    assert deadline_of(None, NOON, {}) is None
    assert deadline_of(None, NOON, job) == NOON + 3600
    assert deadline_of("30m", NOON, job) == NOON + 1800
    assert deadline_of("2h", NOON, job) == NOON + 3600
