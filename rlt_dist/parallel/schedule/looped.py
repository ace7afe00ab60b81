"""The looped transformer over stages: encoder, decoder as a ring or a second pass, and backward.

One group of m micro-batches, in ticks, for P = 3 stages, m = 3 and n = 2 chunk steps. E is the
encoder, i:c the decoder's chunk step c of micro-batch i, and brackets are backward. Stage 0 goes on
with i:1 when i:0 has left stage 2 and come back to it.

    0  E0  E1  E2  0:0 1:0 2:0 0:1 1:1 2:1  .   .   .   .  [0:1][1:1][2:1][0:0][1:0][2:0] ...
    1  .   E0  E1  E2  0:0 1:0 2:0 0:1 1:1 2:1  .   .  [0:1][1:1][2:1][0:0][1:0][2:0] .   ...
    2  .   .   E0  E1  E2  0:0 1:0 2:0 0:1 1:1 2:1 [0:1][1:1][2:1][0:0][1:0][2:0] .   .   ...

With m >= P a ring has no idle ticks but P - 1 at its ends: its use is m n / (m n + P - 1). With
m < P a stage waits for the round to come back: m n / (P n + m - 1), which is near m / P.

RLT-0 feeds nothing back: what is above a ring is a second pass through the same stages.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from rlt_dist.parallel.schedule.arrange import arrange
from rlt_dist.parallel.schedule.costs import TOKEN_BY_TOKEN, WHOLE_SEGMENTS, Cost
from rlt_dist.parallel.schedule.graph import Graph, Need, Task, wire
from rlt_dist.parallel.schedule.instructions import Kind, Schedule, Value, Work

Parts = Sequence[int]
"""A micro-batch's chunk steps by part of its segment. Backward goes from the last part, which is as
forward left it, to the first, and computes each part again before. One part: nothing is."""


def looped(
    stages: int,
    micro_batches: Sequence[Parts],
    *,
    feedback: bool = True,
    group: int | None = None,
    in_flight: int = 2,
    backward: bool = True,
    cost: Cost | None = None,
    hop: float = 0.0,
) -> Schedule:
    """The schedule of one step of RLT-0, RLT-1 or RLT-2.

    Args:
        stages: P.
        micro_batches: the parts of each; RLT-0 has one step a part.
        feedback: false: RLT-0.
        group: m, how many go round together; None: all.
        in_flight: groups that a stage may hold at a time: 1 is one after the other, with 2 the next
            group fills the bubbles of one.
        backward: false: a pass for losses and states alone, as in validation.
        cost, hop: time of work and of a message, which decide what fills idle time and no result;
            every rank must give the same. None: rough ones.
    """
    size = len(micro_batches) if group is None else group
    _check(stages, micro_batches, size, in_flight)
    graph: Graph = {}
    ends: dict[tuple[int, int], list[Need]] = defaultdict(list)
    for micro, parts in enumerate(micro_batches):
        one = _MicroBatch(stages, micro, parts, feedback)
        one.forward()
        if backward:
            one.backward()
        for stage in range(stages):
            one.graph[one.beginning(stage)] += ends[micro // size - in_flight, stage]
        for task in one.ends():
            ends[micro // size, task.stage].append(Need(task))
        graph |= one.graph
    cost = cost or (TOKEN_BY_TOKEN if feedback else WHOLE_SEGMENTS)
    return wire(graph, arrange(graph, stages, lambda work: work.micro // size, cost, hop))


def _check(stages: int, micro_batches: Sequence[Parts], size: int, in_flight: int) -> None:
    if min(stages, len(micro_batches), size, in_flight) < 1:
        raise ValueError(
            f"{stages} stages, {len(micro_batches)} micro-batches in groups of {size}, "
            f"{in_flight} groups in flight: each must be at least 1"
        )
    for micro, parts in enumerate(micro_batches):
        if not parts or min(parts) < 1:
            raise ValueError(f"micro-batch {micro} has parts of {list(parts)} steps")


class _MicroBatch:
    """The graph of one micro-batch; p is a stage."""

    def __init__(self, stages: int, micro: int, parts: Parts, feedback: bool) -> None:
        self.graph: Graph = {}
        self._stages, self._last = range(stages), stages - 1
        self._micro, self._steps, self._feedback = micro, sum(parts), feedback
        self._parts = [(sum(parts[:i]), count) for i, count in enumerate(parts)]

    def forward(self) -> None:
        """Encoder, e to all stages, decoder, loss."""
        self._add(self._whole(Kind.EMBED, 0))
        for p in self._stages:
            self._add(self._whole(Kind.ENCODE, p), self._encoder_input(p))
        for p in self._stages:
            e = Need(self._whole(Kind.ENCODE, self._last), Value.E)
            self._add(self._whole(Kind.MEMORY, p), e)
        for step in range(self._steps):
            for p in self._stages:
                self._add(self._decode(p, step), *self._decoder_inputs(p, step))
        end = self._decode(self._last, self._steps - 1)
        if self._feedback:
            self._add(self._carry(), Need(end, Value.S))
        self._add(self._whole(Kind.HEAD, self._last), Need(end))

    def backward(self) -> None:
        """The decoder the other way, part by part; all gradients of e; the encoder."""
        freed: list[Need] = []
        for first, count in reversed(self._parts):
            for p in self._stages if freed else ():
                mine = [need for need in freed if need.task.stage == p]
                self._add(self._part(Kind.REPLAY, p, first, count), *mine)
            self._decode_backwards(first, count)
            freed = self._gradients(first, count)
        for p in self._stages:
            summed = self._part(Kind.MEMORY_GRADIENT, p, *self._parts[0])
            self._add(self._whole(Kind.MEMORY_BACKWARD, p), Need(summed))
        for p in reversed(self._stages):
            self._add(self._whole(Kind.ENCODE_BACKWARD, p), *self._encoder_gradients(p))
        self._add(self._whole(Kind.EMBED_BACKWARD, 0), Need(self._whole(Kind.ENCODE_BACKWARD, 0)))

    def beginning(self, p: int) -> Task:
        """What the stage does first."""
        return self._whole(Kind.ENCODE if p else Kind.EMBED, p)

    def ends(self) -> Iterator[Task]:
        """What nothing waits for on the stage that does it."""
        waited = {
            n.task for t, needs in self.graph.items() for n in needs if n.task.stage == t.stage
        }
        return (task for task in self.graph if task not in waited)

    def _decode_backwards(self, first: int, count: int) -> None:
        for step in reversed(range(first, first + count)):
            for p in reversed(self._stages):
                needs = self._decoder_gradients(p, step)
                replay = self._part(Kind.REPLAY, p, first, count)
                if step == first + count - 1 and replay in self.graph:
                    needs.append(Need(replay))
                self._add(self._decode_backward(p, step), *needs)

    def _gradients(self, first: int, count: int) -> list[Need]:
        """What is formed of a part as a whole, after which its activations can go."""
        formed = [
            self._part(kind, p, first, count)
            for p in self._stages
            for kind in (Kind.MEMORY_GRADIENT, Kind.WEIGHTS)
        ]
        for task in formed:
            self._add(task, Need(self._decode_backward(task.stage, first)))
        return [Need(task) for task in formed]

    # What a stage needs, from the stages around it and from its own steps before.

    def _encoder_input(self, p: int) -> Need:
        if p:
            return Need(self._whole(Kind.ENCODE, p - 1), Value.X)
        return Need(self._whole(Kind.EMBED, 0))

    def _decoder_inputs(self, p: int, step: int) -> Iterator[Need]:
        yield Need(self._decode(p, step - 1) if step else self._whole(Kind.MEMORY, p))
        if p:
            yield Need(self._decode(p - 1, step), Value.U)
        elif step and self._feedback:
            yield Need(self._decode(self._last, step - 1), Value.S)

    def _decoder_gradients(self, p: int, step: int) -> list[Need]:
        ended = step == self._steps - 1
        needs = [] if ended else [Need(self._decode_backward(p, step + 1))]
        if ended and p == 0 and self._feedback:  # it reads what backward lets go
            needs.append(Need(self._carry()))
        if p < self._last:
            needs.append(Need(self._decode_backward(p + 1, step), Value.DU))
        elif ended:
            needs.append(Need(self._whole(Kind.HEAD, p)))
        elif self._feedback:
            needs.append(Need(self._decode_backward(0, step + 1), Value.DS))
        return needs

    def _encoder_gradients(self, p: int) -> list[Need]:
        if p < self._last:
            return [Need(self._whole(Kind.ENCODE_BACKWARD, p + 1), Value.DX)]
        return [Need(self._whole(Kind.MEMORY_BACKWARD, q), Value.DE) for q in self._stages]

    def _add(self, task: Task, *needs: Need) -> None:
        self.graph[task] = list(needs)

    def _whole(self, kind: Kind, p: int) -> Task:
        return self._part(kind, p, 0, self._steps)

    def _part(self, kind: Kind, p: int, first: int, count: int) -> Task:
        return Task(p, Work(kind, self._micro, first, count))

    def _carry(self) -> Task:
        return Task(0, Work(Kind.CARRY, self._micro, self._steps))

    def _decode(self, p: int, step: int) -> Task:
        return Task(p, Work(Kind.DECODE, self._micro, step))

    def _decode_backward(self, p: int, step: int) -> Task:
        return Task(p, Work(Kind.DECODE_BACKWARD, self._micro, step))
