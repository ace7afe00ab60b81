"""Run a schedule on paper: when each instruction starts and ends, and what waits for ever."""

from collections import defaultdict, deque
from collections.abc import Callable, Collection
from typing import NamedTuple, cast

from rlt_dist.parallel.schedule.costs import Cost, ticks
from rlt_dist.parallel.schedule.instructions import (
    Instruction,
    Kind,
    Message,
    Receive,
    Schedule,
    Send,
    Work,
)


class Timed(NamedTuple):
    """An instruction and when it was carried out; a receive starts when its stage is ready."""

    instruction: Instruction
    start: float
    end: float


Timeline = tuple[tuple[Timed, ...], ...]
"""By stage, its instructions in the order in which it carried them out."""


Hop = Callable[[Message], float]
"""The time from a message's sending to its arrival."""


class DeadlockError(RuntimeError):
    """Some stages wait for messages that will never come."""


def simulate(schedule: Schedule, cost: Cost = ticks, hop: float | Hop = 0.0) -> Timeline:
    """Carry out every stage's list from front to back.

    Args:
        schedule: what to run.
        cost: the time of work; sending takes none, receiving takes waiting.
        hop: from a message's sending to its arrival; a number: of any message.

    Raises:
        DeadlockError: stages wait for ever; each is named with what it waits for.
        ValueError: a stage would receive another message than the one that was sent.
    """
    run = _Run(schedule, cost, hop if callable(hop) else lambda _: hop)
    while any(run.advance(stage) for stage in range(len(schedule))):
        pass
    run.check_ended()
    return tuple(map(tuple, run.done))


def use(timeline: Timeline, kinds: Collection[Kind]) -> float:
    """The part of the time, from first start to last end of such work, that stages spend on it."""
    spans = [t for stage in timeline for t in stage if _kind(t.instruction) in kinds]
    whole = max(t.end for t in spans) - min(t.start for t in spans)
    return sum(t.end - t.start for t in spans) / (whole * len(timeline))


def full_use(stages: int, micro_batches: int, steps: int, *, feedback: bool = True) -> float:
    """What `use` is in ticks, for one direction of one group of micro-batches of equal lengths.

    m n / (m n + P - 1); a ring with m < P waits for the round to come back: m n / (P n + m - 1).

    Args:
        stages, micro_batches, steps: P, m and n; Transformer-XL has one step.
        feedback: whether a step needs the one before from the last stage.
    """
    work = micro_batches * steps
    if feedback and micro_batches < stages:
        return work / (stages * steps + micro_batches - 1)
    return work / (work + stages - 1)


def _kind(instruction: Instruction) -> Kind | None:
    return instruction.kind if isinstance(instruction, Work) else None


class _Run:
    """A simulation on its way; `done` is the timeline so far."""

    def __init__(self, schedule: Schedule, cost: Cost, hop: Hop) -> None:
        self.done: list[list[Timed]] = [[] for _ in schedule]
        self._schedule, self._cost, self._hop = schedule, cost, hop
        self._way: dict[tuple[int, int], deque[tuple[Message, float]]] = defaultdict(deque)
        self._clock = [0.0] * len(schedule)

    def advance(self, stage: int) -> bool:
        """Go on until the stage has to wait for another; true if it moved."""
        instructions, done = self._schedule[stage], self.done[stage]
        before = len(done)
        while len(done) < len(instructions):
            start, instruction = self._clock[stage], instructions[len(done)]
            end = self._end(stage, instruction, start)
            if end is None:
                break
            done.append(Timed(instruction, start, end))
            self._clock[stage] = end
        return len(done) > before

    def check_ended(self) -> None:
        """Raise unless every stage has come to its end and every message to its target."""
        waiting = [
            f"stage {stage} waits for {awaited} of stage {(source := awaited.source)}, "
            f"{self._at(source)}"
            for stage in range(len(self.done))
            if (awaited := self._awaited(stage))
        ]
        if waiting:
            raise DeadlockError("; ".join(waiting))
        for (source, target), left in self._way.items():
            if left:
                raise ValueError(f"stage {target} never receives {left[0][0]} of stage {source}")

    def _awaited(self, stage: int) -> Message | None:
        """What the stage stands still for; None if it has come to its end."""
        here = len(self.done[stage])
        if here == len(self._schedule[stage]):
            return None
        # Nothing but a receive ever waits.
        return cast(Receive, self._schedule[stage][here]).message

    def _at(self, stage: int) -> str:
        awaited = self._awaited(stage)
        return f"which waits for {awaited}" if awaited else "which has ended"

    def _end(self, stage: int, instruction: Instruction, start: float) -> float | None:
        """When it ends; None if that depends on what another stage has not done yet."""
        match instruction:
            case Work():
                return start + self._cost(stage, instruction)
            case Send(message):
                self._way[stage, message.target].append((message, start + self._hop(message)))
                return start
            case Receive(message):
                return self._arrival(stage, message, start)

    def _arrival(self, stage: int, message: Message, start: float) -> float | None:
        way = self._way[message.source, stage]
        if not way:
            return None
        sent, arrival = way[0]
        if sent != message:
            raise ValueError(
                f"stage {stage} receives {message} from stage {message.source}, "
                f"which sends {sent} first"
            )
        way.popleft()
        return max(start, arrival)
