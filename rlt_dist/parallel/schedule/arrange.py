"""A good order for each stage: list scheduling with insertion.

Topcuoglu, Hariri, Wu, "Performance-Effective and Low-Complexity Task Scheduling for Heterogeneous
Computing", IEEE TPDS 2002 (HEFT), with the stage of each task given.
"""

from bisect import bisect_right
from collections.abc import Callable

from rlt_dist.parallel.schedule.costs import Cost
from rlt_dist.parallel.schedule.graph import Graph, Orders, Task
from rlt_dist.parallel.schedule.instructions import Work


def arrange(
    graph: Graph, stages: int, group: Callable[[Work], int], cost: Cost, hop: float
) -> Orders:
    """Place each task into the earliest time in which its stage is free for long enough.

    Tasks are placed by group, then the one with the longest way to the end first. So:

    - in a ring turns are fair: a micro-batch that is a step behind has the longer way to go;
    - what nobody waits for, such as weight gradients, comes last and fills what is left idle;
    - a later group fills the bubbles of an earlier one, and never delays it.

    With the costs it was made for, a stage is never later than planned; with any other, the order
    is as free of deadlock, since it is that of one timeline in which every need is met.

    Args:
        group: of a task's work; no task needs one of a later group.
        cost, hop: time of a task, and of a message on its way.
    """
    way = _ways(graph, cost, hop)
    calendars = [_Calendar() for _ in range(stages)]
    end: dict[Task, float] = {}
    placed: list[list[tuple[float, float, int]]] = [[] for _ in range(stages)]
    # Sorting keeps the graph's order among equals, in which needs come first.
    tasks = sorted(graph, key=lambda task: (group(task.work), -way[task]))
    for number, task in enumerate(tasks):
        stage = task.stage
        ready = max((end[n.task] + _hop(n.task, task, hop) for n in graph[task]), default=0.0)
        length = cost(stage, task.work)
        start = calendars[stage].take(ready, length)
        end[task] = start + length
        placed[stage].append((start, end[task], number))
    return [[tasks[number].work for *_, number in sorted(times)] for times in placed]


def _ways(graph: Graph, cost: Cost, hop: float) -> dict[Task, float]:
    """For each task, the time from its start to the end of all that follows from it."""
    after = dict.fromkeys(graph, 0.0)
    way: dict[Task, float] = {}
    for task, needs in reversed(graph.items()):
        way[task] = cost(task.stage, task.work) + after[task]
        for need in needs:
            then = _hop(need.task, task, hop) + way[task]
            after[need.task] = max(after[need.task], then)
    return way


def _hop(source: Task, target: Task, hop: float) -> float:
    return hop if source.stage != target.stage else 0.0


class _Calendar:
    """When a stage is busy: blocks that neither overlap nor touch, in order of time."""

    def __init__(self) -> None:
        self._starts: list[float] = []
        self._ends: list[float] = []

    def take(self, ready: float, length: float) -> float:
        """The start of the earliest free time of that length from `ready` on, now busy."""
        starts, ends = self._starts, self._ends
        at, start = bisect_right(ends, ready), ready
        while at < len(starts) and starts[at] < start + length:
            start = ends[at]
            at += 1
        if length > 0:
            self._fill(at, start, start + length)
        return start

    def _fill(self, at: int, start: float, end: float) -> None:
        """Make the free time between blocks `at - 1` and `at` busy from start to end."""
        first, last = at, at
        if at and self._ends[at - 1] == start:
            first, start = at - 1, self._starts[at - 1]
        if at < len(self._starts) and self._starts[at] == end:
            last, end = at + 1, self._ends[at]
        self._starts[first:last] = [start]
        self._ends[first:last] = [end]
