"""Timelines as a Chrome trace, which Perfetto (ui.perfetto.dev) and chrome://tracing open.

The format is "Trace Event Format" (Google, 2016): slices are complete events X, arrows are flow
events s and f, names are metadata M. Perfetto colours a slice by its name without the figures, so
each kind of work has its colour.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import count
from typing import Any

from rlt_dist.parallel.schedule.instructions import Message, Receive, Send, Work
from rlt_dist.parallel.schedule.simulate import Timed, Timeline


def chrome_trace(timelines: Mapping[str, Timeline], unit: float = 1e6) -> str:
    """JSON with a process a stage, a slice per work and wait, an arrow per message.

    Args:
        timelines: by name, of a simulation or what the executor recorded; they stand one below the
            other, over one axis of time.
        unit: microseconds in a unit of the timelines' time: 1e6 where that is seconds.
    """
    numbers, processes = count(), count()
    events: list[dict[str, Any]] = []
    for name, timeline in timelines.items():
        flows: dict[Message, int] = defaultdict(lambda: next(numbers))
        for stage, timed in enumerate(timeline):
            process = next(processes)
            events += _names(process, f"{name}: stage {stage} of {len(timeline)}")
            events += (_slice(process, t, unit) for t in timed if t.end > t.start)
            for message, kind, middle in _ends_of_messages(timed):
                events.append(_flow(process, message, kind, middle * unit, flows[message]))
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _names(process: int, label: str) -> list[dict[str, Any]]:
    return [
        {"ph": "M", "name": "process_name", "pid": process, "args": {"name": label}},
        {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}},
    ]


def _slice(process: int, timed: Timed, unit: float) -> dict[str, Any]:
    what = timed.instruction
    return {
        "ph": "X",
        "name": str(what),
        "cat": what.kind if isinstance(what, Work) else "messages",
        "pid": process,
        "tid": 0,
        "ts": timed.start * unit,
        "dur": (timed.end - timed.start) * unit,
    }


def _flow(process: int, message: Message, kind: str, time: float, number: int) -> dict[str, Any]:
    event = {"ph": kind, "name": str(message.value), "cat": "messages", "id": number}
    return event | {"pid": process, "tid": 0, "ts": time} | ({"bp": "e"} if kind == "f" else {})


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
