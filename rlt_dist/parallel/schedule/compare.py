"""What was run beside what was planned, in numbers."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from statistics import median
from typing import NamedTuple

from rlt_dist.parallel.schedule.costs import Cost, ticks
from rlt_dist.parallel.schedule.instructions import Instruction, Kind, Receive, Schedule, Send, Work
from rlt_dist.parallel.schedule.simulate import Timeline, full_use, simulate, use

_ROADS = (
    {Kind.DECODE},
    {Kind.DECODE_BACKWARD},
    {Kind.FORWARD, Kind.BACKWARD},
)
"""Work that goes from stage to stage and whose use a formula tells."""


class Use(NamedTuple):
    """The part of the time, from first to last, that stages spend on some kinds of work.

    Attributes:
        planned: in ticks.
        formula: what `planned` should be; None where several groups of micro-batches overlap or
            micro-batches differ in length.
        run: in time, as it was.
    """

    kinds: str
    planned: float
    formula: float | None
    run: float


class Share(NamedTuple):
    """Parts of the time from the first stage's start to the last one's end."""

    working: float
    receiving: float
    sending: float


def uses(planned: Schedule, run: Timeline, group: int | None) -> Iterator[Use]:
    """Of every road of a schedule.

    Args:
        group: micro-batches that go round together; None: all.
    """
    in_ticks = simulate(planned, ticks)
    for kinds in _ROADS:
        if kinds & {what.kind for what in planned[0] if isinstance(what, Work)}:
            name = " and ".join(kind for kind in Kind if kind in kinds)
            formula = _formula(planned, kinds, group)
            yield Use(name, use(in_ticks, kinds), formula, use(run, kinds))


def _formula(planned: Schedule, kinds: Collection[Kind], group: int | None) -> float | None:
    works = [what for what in planned[0] if isinstance(what, Work)]
    kind = next(work.kind for work in works if work.kind in kinds)
    steps = Counter(work.micro for work in works if work.kind == kind)
    if len(set(steps.values())) > 1 or (group is not None and group < len(steps)):
        return None
    feedback = any(work.kind == Kind.CARRY for work in works)
    return full_use(len(planned), len(steps), steps[0], feedback=feedback)


def shares(run: Timeline) -> list[Share]:
    """By stage, how it spent the time."""
    timed = [t for stage in run for t in stage]
    whole = max(t.end for t in timed) - min(t.start for t in timed)

    def spent(stage: int, kind: type[Instruction]) -> float:
        return sum(t.end - t.start for t in run[stage] if isinstance(t.instruction, kind)) / whole

    return [
        Share(*(spent(stage, kind) for kind in (Work, Receive, Send))) for stage in range(len(run))
    ]


def measured(run: Timeline) -> Cost:
    """What work did cost: by stage and kind the median, per chunk step."""
    found: dict[tuple[int, Kind], list[float]] = defaultdict(list)
    for stage, timed in enumerate(run):
        for what, start, end in timed:
            if isinstance(what, Work):
                found[stage, what.kind].append((end - start) / what.count)
    medians = {key: median(costs) for key, costs in found.items()}
    return lambda stage, work: medians[stage, work.kind] * work.count
