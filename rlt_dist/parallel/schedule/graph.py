"""What needs what, and how that becomes messages."""

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rlt_dist.parallel.schedule.instructions import (
    Instruction,
    Message,
    Receive,
    Schedule,
    Send,
    Value,
    Work,
)


class Task(NamedTuple):
    """Work and the stage that does it."""

    stage: int
    work: Work


class Need(NamedTuple):
    """Something that must be done before; `value` names what it gives, where that may travel."""

    task: Task
    value: Value | None = None


Graph = dict[Task, list[Need]]
"""Everything that is to be done and its needs; each task stands after the tasks that it needs."""
Orders = Sequence[Sequence[Work]]
"""By stage, its work from first to last."""


def wire(graph: Graph, orders: Orders) -> Schedule:
    """Add the messages: a value is sent as soon as it is made and received when it is needed.

    What a stage needs may have been sent behind messages that it needs later: it receives those
    first, so the order of receiving is the order of sending. That adds no waiting, as they were
    sent before.
    """
    made = _made(graph)
    sent: dict[tuple[int, int], deque[Message]] = defaultdict(deque)
    for message in _in_order_of_sending(orders, made):
        sent[message.source, message.target].append(message)
    return tuple(
        tuple(_stage(stage, order, graph, made, sent)) for stage, order in enumerate(orders)
    )


def _stage(
    stage: int,
    order: Iterable[Work],
    graph: Graph,
    made: dict[Task, list[Message]],
    sent: dict[tuple[int, int], deque[Message]],
) -> Iterator[Instruction]:
    received = set()
    for work in order:
        task = Task(stage, work)
        for need in graph[task]:
            message = _message(task, need)
            while message and message not in received:
                received.add(first := sent[message.source, stage].popleft())
                yield Receive(first)
        yield work
        yield from map(Send, made[task])


def _made(graph: Graph) -> dict[Task, list[Message]]:
    """The messages that each task gives rise to."""
    made: dict[Task, list[Message]] = {task: [] for task in graph}
    for task, needs in graph.items():
        for need in needs:
            if message := _message(task, need):
                made[need.task].append(message)
    return made


def _in_order_of_sending(orders: Orders, made: dict[Task, list[Message]]) -> Iterator[Message]:
    for stage, order in enumerate(orders):
        for work in order:
            yield from made[Task(stage, work)]


def _message(task: Task, need: Need) -> Message | None:
    """How a need of a task travels; None where it stays on the stage.

    It belongs to the earlier of both steps: s is fed to a later one, ds is that road back.
    """
    source = need.task.stage
    if source == task.stage:
        return None
    if need.value is None:
        raise ValueError(
            f"{task.work} on stage {task.stage} needs {need.task}, which gives nothing"
        )
    step = min(task.work.step, need.task.work.step)
    return Message(need.value, task.work.micro, step, source, task.stage)
