"""A timeline as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is "Trace Event Format" (Google, 2016): slices are complete events X, arrows are flow
events s and f, names are metadata M. Perfetto colours a slice by its name without the figures, so
each kind of work has its colour.
"""

import json
from collections.abc import Iterator
from itertools import count
from typing import Any

from rlt_dist.parallel.schedule.instructions import Message, Receive, Send, Work
from rlt_dist.parallel.schedule.simulate import Timed, Timeline


def chrome_trace(timeline: Timeline, unit: float = 1e6) -> str:
    """JSON with a process a stage, a slice per work and wait, an arrow per message.

    Args:
        timeline: of a simulation, or what the executor recorded.
        unit: microseconds in a unit of the timeline's time: 1e6 where that is seconds.
    """
    numbers = count()
    flows: dict[Message, int] = {}
    events: list[dict[str, Any]] = []
    for stage, timed in enumerate(timeline):
        events += _names(stage, len(timeline))
        events += (_slice(stage, t, unit) for t in timed if t.end > t.start)
        for message, kind, middle in _ends_of_messages(timed):
            if message not in flows:
                flows[message] = next(numbers)
            events.append(_flow(stage, message, kind, middle * unit, flows[message]))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(stage: int, stages: int) -> list[dict[str, Any]]:
    label = f"stage {stage} of {stages}"
    return [
        {"ph": "M", "name": "process_name", "pid": stage, "args": {"name": label}},
        {"ph": "M", "name": "process_sort_index", "pid": stage, "args": {"sort_index": stage}},
    ]


def _slice(stage: int, timed: Timed, unit: float) -> dict[str, Any]:
    what = timed.instruction
    return {
        "ph": "X",
        "name": str(what),
        "cat": what.kind if isinstance(what, Work) else "messages",
        "pid": stage,
        "tid": 0,
        "ts": timed.start * unit,
        "dur": (timed.end - timed.start) * unit,
    }


def _flow(stage: int, message: Message, kind: str, time: float, number: int) -> dict[str, Any]:
    event = {"ph": kind, "name": str(message.value), "cat": "messages", "id": number}
    return event | {"pid": stage, "tid": 0, "ts": time} | ({"bp": "e"} if kind == "f" else {})


def _ends_of_messages(timed: tuple[Timed, ...]) -> Iterator[tuple[Message, str, float]]:
    """Where arrows start (s), in the work before a send, and end (f), in that after a receive.

    An arrow belongs to the slice that its time lies in, so the middle cannot be mistaken.
    """
    middle = None
    for t in timed:
        if isinstance(t.instruction, Work) and t.end > t.start:
            middle = (t.start + t.end) / 2
        elif isinstance(t.instruction, Send) and middle is not None:
            yield t.instruction.message, "s", middle
    middle = None
    for t in reversed(timed):
        if isinstance(t.instruction, Work) and t.end > t.start:
            middle = (t.start + t.end) / 2
        elif isinstance(t.instruction, Receive) and middle is not None:
            yield t.instruction.message, "f", middle
