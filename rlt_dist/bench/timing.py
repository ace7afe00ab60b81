"""Seconds of steps that are run in turn, and what the rest of the machine did meanwhile."""

import gc
import os
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

Step = Callable[[], object]
LEAST_ROUNDS, MOST_ROUNDS = 3, 100


def time_in_rounds(
    steps: Mapping[str, Step], budget: float, watch: Callable[[int], None]
) -> dict[str, list[float]]:
    """Run every step once a round, in an order drawn anew for each, after one run to warm up.

    A machine that slows down for a while then slows all of them, and none always follows the same
    other. Python's garbage collector runs between rounds only.

    Args:
        budget: seconds after which no round begins, once there are three.
        watch: called with the number of rounds done; 0 once all are warm.

    Returns:
        by step, the seconds of each run.
    """
    for step in steps.values():
        step()
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    chance, began = random.Random(0), time.perf_counter()
    for done in range(MOST_ROUNDS):
        watch(done)
        if done >= LEAST_ROUNDS and time.perf_counter() - began > budget:
            break
        with _collected():
            for name in chance.sample(list(steps), len(steps)):
                seconds[name].append(_seconds(steps[name]))
    return seconds


def _seconds(step: Step) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


@contextmanager
def _collected() -> Iterator[None]:
    """Collect garbage before a block, none inside it."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class Disturbance:
    """How many cores other processes kept busy while a `with` block ran; one's own workers do not.

    Attributes:
        cores: their mean; None where the system does not say.
    """

    cores: float | None = None

    def __enter__(self) -> "Disturbance":
        self._before = _busy_seconds()
        self._own, self._began = _own_seconds(), time.perf_counter()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        after = _busy_seconds()
        if after is None or self._before is None:
            return
        others = after - self._before - (_own_seconds() - self._own)
        self.cores = max(0.0, others) / (time.perf_counter() - self._began)


def _busy_seconds() -> float | None:
    """Seconds that all cores together were busy since the system started (proc(5), `stat`)."""
    facts = Path("/proc/stat")
    if not facts.is_file():
        return None
    user, nice, system, _idle, _wait, irq, softirq, steal = map(
        int, facts.read_text().split("\n", 1)[0].split()[1:9]
    )
    return (user + nice + system + irq + softirq + steal) / _ticks_per_second()


def _own_seconds() -> float:
    """Seconds that this process and all below it were busy, those included that have ended."""
    times = os.times()
    ended = times.children_user + times.children_system
    children: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for parent, child in _processes():
        children[parent].append(child)
    ticks, ahead = 0, children[os.getpid()]
    while ahead:
        process, busy = ahead.pop()
        ticks += busy
        ahead += children[process]
    return time.process_time() + ended + ticks / _ticks_per_second()


def _processes() -> Iterator[tuple[int, tuple[int, int]]]:
    """Each process's parent, and itself with its ticks and those of the children it waited for."""
    for facts in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            # proc(5): its name, which may hold anything, stands in brackets before these
            fields = facts.read_text().rpartition(")")[2].split()
            yield int(fields[1]), (int(facts.parent.name), sum(map(int, fields[11:15])))


def _ticks_per_second() -> int:
    return os.sysconf("SC_CLK_TCK")
