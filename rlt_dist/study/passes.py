"""A step's pass through a pipeline on paper: the executor's own schedules with a cluster's costs.

A long pass is periodic but for its ends: its time is linear in the number of micro-batches, in that
of the parts of a segment, and in the chunk steps of a part. What is too long to be simulated whole
is simulated at two smaller sizes of each and extended along the lines between them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import groupby, product
from math import ceil
from typing import NamedTuple

from rlt_dist.costs.cluster import LinkConfig
from rlt_dist.costs.looped import LoopedRank
from rlt_dist.costs.run import Rank, Run
from rlt_dist.costs.time import Clock, Seconds, together
from rlt_dist.mesh.axes import Place
from rlt_dist.parallel.schedule.instructions import Kind, Message, Schedule, Send, Value, Work
from rlt_dist.parallel.schedule.looped import looped
from rlt_dist.parallel.schedule.pipeline import gpipe, one_f_one_b
from rlt_dist.parallel.schedule.simulate import Timeline, simulate
from rlt_dist.study.cores import Cores, simulate_shared

_WORKS = 12_000
"""Work of all stages up to which a pass is simulated whole."""
_LANES = (Value.S, Value.DS)
"""Values of one token a lane."""
_STEPS = (Value.U, Value.DU)
"""Values of a chunk step's tokens."""


class Size(NamedTuple):
    """How long a pass is.

    Attributes:
        micro_batches: of a data-parallel rank.
        parts: of a segment's decoder; 1 where it has none.
        steps: chunk steps of a part, on average.
    """

    micro_batches: int
    parts: int
    steps: float

    def works(self, stages: int) -> float:
        """About how much work all stages do."""
        return stages * self.micro_batches * self.parts * (2 * self.steps + 3)


def size_of(run: Run) -> Size:
    """Of a whole pass."""
    rank = run.rank(0)
    if not isinstance(rank, LoopedRank):
        return Size(run.micro_batches, 1, 1)
    return Size(run.micro_batches, len(rank.parts), len(rank.steps) / len(rank.parts))


def schedule_of(run: Run, size: Size | None = None) -> Schedule:
    """What the executor's stages are told to do.

    Args:
        size: of a shorter pass, in whole numbers; None: the run's own.
    """
    stages, pipeline = run.axes.pipeline, run.config.pipeline
    count = run.micro_batches if size is None else size.micro_batches
    rank = run.rank(0)
    if not isinstance(rank, LoopedRank):
        return (gpipe if pipeline.schedule == "gpipe" else one_f_one_b)(stages, count)
    if size is None:
        parts = tuple(len(list(of)) for _, of in groupby(rank.steps, lambda step: step.part))
    else:
        parts = (int(size.steps),) * size.parts
    feedback = rank.share.config.feedback > 0
    return _looped(stages, parts, count, feedback, pipeline.group, pipeline.in_flight)


@lru_cache(maxsize=64)
def _looped(
    stages: int,
    parts: tuple[int, ...],
    count: int,
    feedback: bool,
    group: int | None,
    in_flight: int,
) -> Schedule:
    """Kept: arranging a long one takes longer than simulating it, and runs that differ in width
    alone have the same."""
    return looped(stages, (parts,) * count, feedback=feedback, group=group, in_flight=in_flight)


@dataclass(frozen=True)
class Passes:
    """The simulated pass of a run on a cluster.

    Attributes:
        clock: of the run.
    """

    clock: Clock

    @property
    def run(self) -> Run:
        """Which."""
        return self.clock.run

    @cached_property
    def ranks(self) -> list[Rank]:
        """By stage."""
        return list(self.run.ranks())

    @cached_property
    def per_step(self) -> list[dict[Kind, Seconds]]:
        """By stage and kind of work, what one of the chunk steps that it covers takes, on average.

        So work that covers a shorter segment takes its share.
        """
        known = {rank: _per_step(timed) for rank, timed in self._timed.items()}
        return [known[rank] for rank in self.ranks]

    @cached_property
    def works(self) -> list[Seconds]:
        """By stage, all work on all micro-batches, alone."""
        count = self.run.micro_batches
        known = {
            rank: together(all_of for *_, all_of in timed).times(count)
            for rank, timed in self._timed.items()
        }
        return [known[rank] for rank in self.ranks]

    @cached_property
    def _timed(self) -> dict[Rank, list[tuple[Work, int, Seconds]]]:
        """All work on a micro-batch: how often it is done, and seconds of all of these together."""
        return {
            rank: [(work, n, self.clock.work(rank, work).times(n)) for work, n in rank.alike()]
            for rank in set(self.ranks)
        }

    @property
    def least(self) -> float:
        """Seconds that the pass cannot take less than: the busiest stage's work, and the ring."""
        busiest = max(of.total for of in self.works)
        rank, stages = self.ranks[0], self.run.axes.pipeline
        if not isinstance(rank, LoopedRank) or not rank.share.config.feedback or stages == 1:
            return busiest
        turn = sum(of[k].total for of in self.per_step for k in (Kind.DECODE, Kind.DECODE_BACKWARD))
        hops = sum(self._hop_seconds(Value.U, p, p + 1) for p in range(stages - 1))
        hops += self._hop_seconds(Value.S, stages - 1, 0)
        return max(busiest, len(rank.steps) * (turn + 2 * hops))

    @cached_property
    def seconds(self) -> float:
        """Of the pass."""
        return self._seconds(messages=True)

    @cached_property
    def without_messages(self) -> float:
        """Seconds of it if messages took no time."""
        return self._seconds(messages=False)

    def _seconds(self, *, messages: bool) -> float:
        stages, whole = self.run.axes.pipeline, size_of(self.run)
        if stages == 1:
            return self.works[0].total * self.cores.slowdown(1)
        if whole.works(stages) <= _WORKS:
            return end_of(self.timeline(messages=messages))
        sizes = self._sizes(whole)
        further = 0.0
        if self._is_even and whole.micro_batches > sizes[0][-1]:
            # Each more is one more turn of the busiest stage.
            each = max(of.total for of in self.works) / whole.micro_batches
            further = (whole.micro_batches - sizes[0][-1]) * each
            whole = whole._replace(micro_batches=sizes[0][-1])
        return further + _extended(
            whole, sizes, lambda of: end_of(self.timeline(of, messages=messages))
        )

    @property
    def _is_even(self) -> bool:
        """Whether the busiest stage alone sets the pace: no groups of micro-batches, own cores."""
        return self.run.config.pipeline.group is None and self.cores.count is None

    @cached_property
    def busy(self) -> float:
        """Seconds that the mean stage works, slowed down by others where cores are shared."""
        stages = self.run.axes.pipeline
        if stages == 1 or self.cores.count is None:
            alone = sum(of.total for of in self.works) / stages
            return alone * self.cores.slowdown(1)
        timed = (t for stage in self.timeline() for t in stage if isinstance(t.instruction, Work))
        return sum(t.end - t.start for t in timed) / stages

    @cached_property
    def cores(self) -> Cores:
        """What stages share: a stage stands for its ranks of all replicas."""
        cluster, axes = self.clock.cluster, self.run.axes
        ranks = axes.data * axes.tensor
        return Cores(cluster.cores, cluster.contention, cluster.crowding, ranks)

    def timeline(self, size: Size | None = None, *, messages: bool = True) -> Timeline:
        """When every instruction starts and ends.

        Args:
            size: of a shorter pass; None: the whole one.
            messages: false: as if they took no time.
        """
        schedule = schedule_of(self.run, size)
        handling = self._handling(schedule) if messages else {}

        def cost(stage: int, work: Work) -> float:
            own = self.per_step[stage][work.kind].total * work.count
            return own + handling.get((stage, work), 0.0)

        def hop(message: Message) -> float:
            return self._hop(message) if messages else 0.0

        if self.cores.count is None:
            return simulate(schedule, cost, hop)
        return simulate_shared(schedule, cost, hop, self.cores)

    def drawn(self) -> Timeline:
        """A timeline of no more than some thousand works: the whole pass, or a shorter one."""
        whole = size_of(self.run)
        if whole.works(self.run.axes.pipeline) <= _WORKS:
            return self.timeline()
        return self.timeline(Size(*(of[0] for of in self._sizes(whole))))

    def _sizes(self, whole: Size) -> list[tuple[int, ...]]:
        """Of micro-batches, parts and steps: the number itself, or two smaller ones."""
        stages, pipeline = self.run.axes.pipeline, self.run.config.pipeline
        # As many micro-batches as fill the pipeline, messages on their way included.
        filling = stages + ceil(stages / 4) + 2
        if self._is_even:
            micro_batches: tuple[int, ...] = (min(filling, whole.micro_batches),)
        else:
            group = pipeline.group or 1
            least = (ceil(filling / group) + pipeline.in_flight) * group
            micro_batches = _two(whole.micro_batches, least, group)
        return [micro_batches, _two(whole.parts, 1, 1), _two(whole.steps, 4, 3)]

    def _handling(self, schedule: Schedule) -> dict[tuple[int, Work], float]:
        """Seconds for which messages keep stages from computing, by the work before a send or
        after a receive."""
        overhead = self._link_of_stages().overhead
        found: dict[tuple[int, Work], float] = defaultdict(float)
        if not overhead:
            return found
        for stage, instructions in enumerate(schedule):
            received, last = 0, None
            for what in instructions:
                if isinstance(what, Work):
                    found[stage, what] += received * overhead
                    received, last = 0, what
                elif isinstance(what, Send) and last is not None:
                    found[stage, last] += overhead
                else:
                    received += 1
        return found

    def _link_of_stages(self) -> LinkConfig:
        """What joins the stages of a replica at worst."""
        return self.clock.link(self.run.axes.members("pipeline", Place(0, 0, 0)))

    def _hop(self, message: Message) -> float:
        return self._hop_seconds(message.value, message.source, message.target)

    def _hop_seconds(self, value: Value, source: int, target: int) -> float:
        run, tokens = self.run, self.run.own.tokens
        if value in _LANES:
            tokens = 1
        if value in _STEPS:
            rank = self.ranks[source]
            assert isinstance(rank, LoopedRank)
            tokens = ceil(sum(step.count for step in rank.steps) / len(rank.steps))
        bytes_ = run.own.lanes * tokens * run.config.model.d_model * run.numbers.real
        return self.clock.hop(bytes_, source, target)


def _two(count: float, least: int, more: int) -> tuple[int, ...]:
    """The number itself, or two smaller ones."""
    if count <= least + more and count == int(count):
        return (int(count),)
    return least, least + more


def end_of(timeline: Timeline) -> float:
    """When the last stage ends."""
    return max(stage[-1].end for stage in timeline)


def _per_step(timed: Iterable[tuple[Work, int, Seconds]]) -> dict[Kind, Seconds]:
    parts: dict[Kind, list[Seconds]] = defaultdict(list)
    covered: dict[Kind, int] = defaultdict(int)
    for work, count, all_of in timed:
        parts[work.kind].append(all_of)
        covered[work.kind] += count * work.count
    return {kind: together(of).times(1 / covered[kind]) for kind, of in parts.items()}


def _extended(
    whole: Size, sizes: Sequence[tuple[int, ...]], seconds: Callable[[Size], float]
) -> float:
    """The multilinear function through values at all combinations of two sizes of each axis."""
    total = 0.0
    for corner in product(*sizes):
        weight = 1.0
        for at, of, wanted in zip(corner, sizes, whole, strict=True):
            if len(of) > 1:
                low, high = of
                share = (wanted - low) / (high - low)
                weight *= share if at == high else 1 - share
        total += weight * seconds(Size(*corner))
    return total
