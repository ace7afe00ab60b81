"""One stack of layers cut over stages: GPipe and 1F1B.

Numbers are micro-batches, forward in bare figures, backward in brackets; P = 3, M = 4, a backward
takes as long as a forward. Both take M + P - 1 ticks each way, 1F1B holds at most P - p
micro-batches on stage p instead of M.

    GPipe                                             1F1B
    0  0  1  2  3  .  .  .  . [0][1][2][3]            0  0  1  2  .  . [0] 3 [1] . [2] . [3]
    1  .  0  1  2  3  .  . [0][1][2][3] .             1  .  0  1  . [0] 2 [1] 3 [2] . [3] .
    2  .  .  0  1  2  3 [0][1][2][3] .  .             2  .  .  0 [0] 1 [1] 2 [2] 3 [3] .  .
"""

from collections.abc import Iterable, Iterator

from rlt_dist.parallel.schedule.graph import Graph, Need, Orders, Task, wire
from rlt_dist.parallel.schedule.instructions import Kind, Schedule, Value, Work

_Pass = tuple[bool, int]
"""Whether it is backward, and the micro-batch."""


def gpipe(stages: int, micro_batches: int, *, backward: bool = True) -> Schedule:
    """All forward, then all backward.

    Args:
        stages, micro_batches: P and M, at least 1 each.
        backward: false: a pass for losses alone, as in validation.
    """
    numbers = range(micro_batches)
    passes = [(b, micro) for b in (False, True)[: 1 + backward] for micro in numbers]
    return _schedule(stages, micro_batches, [passes] * stages)


def one_f_one_b(stages: int, micro_batches: int) -> Schedule:
    """One forward, one backward in turns, once a stage has as many forwards as stages follow it.

    Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training", ICML 2021: PipeDream-Flush,
    which ends each step with an empty pipeline.

    Args:
        stages, micro_batches: P and M, at least 1 each.
    """
    return _schedule(
        stages,
        micro_batches,
        [list(_turns(stages - stage, micro_batches)) for stage in range(stages)],
    )


def _turns(held: int, micro_batches: int) -> Iterator[_Pass]:
    """A stage's passes in 1F1B; it holds the activations of at most `held` micro-batches."""
    for turn in range(micro_batches + held - 1):
        if turn < micro_batches:
            yield False, turn
        if turn >= held - 1:
            yield True, turn - held + 1


def _schedule(stages: int, micro_batches: int, passes: list[list[_Pass]]) -> Schedule:
    if stages < 1 or micro_batches < 1:
        raise ValueError(f"a pipeline of {stages} stages and {micro_batches} micro-batches")
    orders = [
        list(_work(stage, stages - 1, passes_here)) for stage, passes_here in enumerate(passes)
    ]
    return wire(_graph(orders), orders)


def _work(stage: int, last: int, passes: Iterable[_Pass]) -> Iterator[Work]:
    """Passes with what comes before and after them at the ends."""
    for backward, micro in passes:
        if stage == 0 and not backward:
            yield Work(Kind.EMBED, micro)
        yield Work(Kind.BACKWARD if backward else Kind.FORWARD, micro)
        if stage == last and not backward:
            yield Work(Kind.HEAD, micro)
        if stage == 0 and backward:
            yield Work(Kind.EMBED_BACKWARD, micro)


def _graph(orders: Orders) -> Graph:
    """Only what crosses stages matters here: on a stage the order is given."""
    graph: Graph = {}
    for stage, order in enumerate(orders):
        for work in order:
            needs = graph[Task(stage, work)] = []
            if work.kind == Kind.FORWARD and stage:
                needs.append(Need(Task(stage - 1, work), Value.X))
            if work.kind == Kind.BACKWARD and stage < len(orders) - 1:
                needs.append(Need(Task(stage + 1, work), Value.DX))
    return graph
