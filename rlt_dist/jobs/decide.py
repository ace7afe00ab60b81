"""What becomes of a job whose ranks have ended: pure, from what is remembered of its starts."""

from collections.abc import Sequence
from dataclasses import dataclass

from rlt_dist.jobs.job import Start
from rlt_dist.util.ending import STATUS, How


@dataclass(frozen=True)
class Decision:
    """What is to be done.

    Attributes:
        again: the ranks are to be started once more.
        status: the job's exit status, if not.
        why: one line.
    """

    again: bool
    status: int
    why: str


def decide(starts: Sequence[Start], attempts: int, *, unwanted: str | None) -> Decision:
    """Whether a job's ranks are to be started, after these starts.

    Args:
        starts: oldest first.
        attempts: starts in a row without a new checkpoint, after which the job is given up.
        unwanted: what a person or a signal has done to the job, such as "cancelled", so that it is
            not to go on; None: nothing.
    """
    if not starts:
        if unwanted is not None:
            return _over("stopped", f"{unwanted} before its first start")
        return Decision(True, STATUS["stopped"], "the first start")
    last = starts[-1]
    told = f"{last.how} at step {last.to_step}" + (f": {last.why}" if last.why else "")
    if last.how == "finished":
        return _over("finished", told)
    if last.how in ("mistake", "guard"):
        return _over("mistake", f"{told}; the same again would end in the same way")
    if unwanted is not None:
        how: How = "stopped" if last.how == "stopped" else "failed"
        return _over(how, f"{told}; {unwanted}, so not started again")
    if fruitless(starts) >= attempts:
        many = f"{attempts} starts in a row" if attempts > 1 else "a start"
        return _over("failed", f"given up, since {many} made no new checkpoint; {told}")
    return Decision(True, STATUS["stopped"], f"{told}; goes on from there")


def _over(how: How, why: str) -> Decision:
    return Decision(False, STATUS[how], why)


def fruitless(starts: Sequence[Start]) -> int:
    """How many starts, counted from the last one back, were in vain.

    In vain is a start that brought no new checkpoint. One that found a sick node is not, if no
    start before had found that node: the next one does without it. Where it found all nodes sick,
    it may not be the nodes.
    """
    in_vain = 0
    known: set[str] = set()
    for start in starts:
        found = set(start.sick) - known
        known |= found
        if start.to_step > start.from_step:
            in_vain = 0
        elif not found or found == set(start.nodes):
            in_vain += 1
    return in_vain
