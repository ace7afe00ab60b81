"""What Slurm's words about a job mean; tests/slurm asks a real one."""

from pathlib import Path
from typing import Any

import pytest

from rlt_dist.jobs.slurm import Queued, Unanswered, last_word, requeue, submit, was_cancelled
from rlt_dist.util.errors import UserError


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


def controller(restarts: Path, refuses: str) -> str:
    """A scontrol whose job has begun as often as a file says; `refuses` is what requeueing does."""
    shown = f'*show*) echo "JobId=7 Restarts=$(cat {restarts})"'
    return f'case "$*" in {shown};; *) {refuses}; echo "not now" >&2; exit 1;; esac'


def test_what_slurm_has_requeued_by_itself_is_left_alone(stand_in: Any, tmp_path: Path) -> None:
    restarts = tmp_path / "restarts"
    restarts.write_text("2")
    called = stand_in("scontrol", controller(restarts, "true"))
    requeue("7", 1)
    assert "requeue" not in called.read_text()
    with pytest.raises(UserError, match="scontrol refuses: not now"):
        requeue("7", 2)
    stand_in("scontrol", controller(restarts, f"echo 3 > {restarts}"))  # it does so just now
    requeue("7", 2)


LOST = {
    "time": "echo 'sbatch: error: Batch job submission failed: Socket timed out' >&2; exit 1",
    "killed": "kill -KILL $$",
}


@pytest.mark.parametrize("answer", LOST)
def test_a_lost_answer_is_no_refusal(stand_in: Any, tmp_path: Path, answer: str) -> None:
    stand_in("sbatch", LOST[answer])
    with pytest.raises(Unanswered):
        submit(tmp_path / "script", (), tmp_path)
    stand_in("sbatch", "echo 'sbatch: error: no such partition' >&2; exit 1")
    with pytest.raises(UserError, match="refuses: no such partition") as raised:
        submit(tmp_path / "script", (), tmp_path)
    assert not isinstance(raised.value, Unanswered)


def test_slurm_has_the_last_word_on_a_job_that_had_none(stand_in: Any) -> None:
    assert last_word("7", Queued("FAILED", "NonZeroExitCode", 0)) == (
        "Slurm says FAILED (NonZeroExitCode)"
    )
    stand_in("sacct", "echo 'OUT_OF_MEMORY|0:125'")
    assert last_word("7", None) == "Slurm says OUT_OF_MEMORY (0:125)"
    for nothing in ("true", "echo 'Slurm accounting storage is disabled' >&2; exit 1"):
        stand_in("sacct", nothing)
        assert last_word("7", None) is None
