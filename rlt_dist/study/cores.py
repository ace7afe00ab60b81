"""A schedule on ranks that share processor cores: who computes at once slows the others down."""

from collections import defaultdict, deque
from dataclasses import dataclass
from math import inf

from rlt_dist.parallel.schedule.costs import Cost
from rlt_dist.parallel.schedule.instructions import Instruction, Message, Schedule, Send, Work
from rlt_dist.parallel.schedule.simulate import DeadlockError, Hop, Timed, Timeline

_INSTANT = 1e-12
"""Seconds that are none."""


@dataclass(frozen=True)
class Cores:
    """Processor cores.

    Attributes:
        count: how many; None: every rank has its own.
        contention: times as long that work takes while all of them are busy.
        crowding: times as long, its share of a core apart, while ranks outnumber them.
        ranks: how many of them a stage stands for, which compute at the same times.
    """

    count: int | None
    contention: float = 1.0
    crowding: float = 1.0
    ranks: int = 1

    def slowdown(self, stages: int) -> float:
        """Times as long that work takes while so many stages compute, each of them."""
        if self.count is None:
            return 1.0
        busy = stages * self.ranks
        if busy > self.count:
            return busy / self.count * self.crowding
        return self.contention if busy == self.count > 1 else 1.0


def simulate_shared(schedule: Schedule, cost: Cost, hop: Hop, cores: Cores) -> Timeline:
    """As `simulate`, where stages that compute at once share the cores evenly.

    Raises:
        DeadlockError: stages wait for ever.
    """
    run = _Run(schedule, cost, hop, cores)
    while run.go_on():
        pass
    return tuple(map(tuple, run.done))


class _Run:
    """A simulation on its way.

    Attributes:
        done: the timeline so far.
    """

    def __init__(self, schedule: Schedule, cost: Cost, hop: Hop, cores: Cores) -> None:
        self.done: list[list[Timed]] = [[] for _ in schedule]
        self._schedule, self._cost, self._hop, self._cores = schedule, cost, hop, cores
        self._way: dict[tuple[int, int], deque[tuple[Message, float]]] = defaultdict(deque)
        self._now = 0.0
        self._began = [0.0] * len(schedule)
        self._left: dict[int, float] = {}
        for stage in range(len(schedule)):
            self._start(stage)

    def go_on(self) -> bool:
        """To the next moment at which something ends or arrives; false at the end of all."""
        arrivals = {stage: at for stage in self._waiting() if (at := self._arrival(stage)) < inf}
        if not self._left and not arrivals:
            self._check_ended()
            return False
        slowdown = self._cores.slowdown(len(self._left))
        ends = self._now + min(self._left.values(), default=inf) * slowdown
        then = max(self._now, min(ends, *arrivals.values()) if arrivals else ends)
        for stage in self._left:
            self._left[stage] -= (then - self._now) / slowdown
        self._now = then
        for stage in [s for s, left in self._left.items() if left <= _INSTANT]:
            del self._left[stage]
            self._finish(stage)
        for stage, at in arrivals.items():
            if at <= then:
                self._way[self._receiving(stage).source, stage].popleft()
                self._finish(stage)
        return True

    def _finish(self, stage: int) -> None:
        """An instruction is carried out; begin what follows."""
        self.done[stage].append(Timed(self._next(stage), self._began[stage], self._now))
        self._start(stage)

    def _start(self, stage: int) -> None:
        """Send what is to be sent; begin to work or to wait."""
        self._began[stage] = self._now
        while len(self.done[stage]) < len(self._schedule[stage]):
            what = self._next(stage)
            if isinstance(what, Work):
                self._left[stage] = self._cost(stage, what)
                return
            if not isinstance(what, Send):
                return
            arrival = self._now + self._hop(what.message)
            self._way[stage, what.message.target].append((what.message, arrival))
            self.done[stage].append(Timed(what, self._now, self._now))

    def _next(self, stage: int) -> Instruction:
        return self._schedule[stage][len(self.done[stage])]

    def _waiting(self) -> list[int]:
        """Stages that wait for a message."""
        return [
            stage
            for stage, instructions in enumerate(self._schedule)
            if stage not in self._left and len(self.done[stage]) < len(instructions)
        ]

    def _receiving(self, stage: int) -> Message:
        what = self._next(stage)
        assert not isinstance(what, Work)
        return what.message

    def _arrival(self, stage: int) -> float:
        """When what a stage waits for is there; inf: it has not been sent."""
        way = self._way[self._receiving(stage).source, stage]
        return way[0][1] if way else inf

    def _check_ended(self) -> None:
        if waiting := self._waiting():
            stages = ", ".join(f"stage {p} for {self._receiving(p)}" for p in waiting)
            raise DeadlockError(f"waiting for ever: {stages}")
