"""What Slurm's words about a job mean; tests/slurm asks a real one."""

import pytest

from rlt_dist.jobs.slurm import was_cancelled


@pytest.mark.parametrize(
    ("state", "reason", "restarts", "cancelled"),
    [
        ("RUNNING", "None", 1, False),
        ("PENDING", "BeginTime", 2, False),
        ("CANCELLED", "None", 1, True),
        ("TIMEOUT", "TimeLimit", 1, False),
        ("COMPLETING", "None", 1, True),
        ("COMPLETING", "TimeLimit", 1, False),
        ("COMPLETING", "None", 2, False),  # preempted, a node lost, or requeued by hand
    ],
)
def test_a_job_that_a_person_ended_is_told_from_one_that_slurm_ended(
    state: str, reason: str, restarts: int, cancelled: bool
) -> None:
    shown = {"JobState": state, "Reason": reason, "Restarts": str(restarts)}
    assert was_cancelled(shown, 1) is cancelled
