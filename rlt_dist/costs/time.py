"""Seconds of a rank's work and of its messages on a cluster.

A product takes the longer of its FLOPs at the reachable peak and its bytes at the memory's
bandwidth: a roofline (Williams, Waterman, Patterson, CACM 2009). Other operators take their bytes.
Each operator adds the time of its start. Where a cluster has measured rates of a kind of work,
these stand in for all of that.

Messages take latency and bandwidth by rings (Thakur, Rabenseifner, Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005), over the links of the ranks that they join:
the tensor axis is innermost, so its ranks are the first to share a node.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from math import ceil

from rlt_dist.config.run import RunConfig
from rlt_dist.costs.cluster import STEP, UPDATE, ClusterConfig, LinkConfig, RateConfig
from rlt_dist.costs.demand import Demand, demand_of
from rlt_dist.costs.effort import Product, Transfer
from rlt_dist.costs.run import Rank, Run
from rlt_dist.costs.taken import Taken, demanded, rate_name, taken, updating
from rlt_dist.mesh.axes import Place
from rlt_dist.parallel.schedule.instructions import Work


@dataclass(frozen=True, slots=True)
class Seconds:
    """Of a rank, by what they go into.

    Attributes:
        compute: products that wait for arithmetic.
        memory: products and other operators that wait for memory.
        launch: starting operators.
        tensor: sums over the tensor axis.
    """

    compute: float = 0.0
    memory: float = 0.0
    launch: float = 0.0
    tensor: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.compute + self.memory + self.launch + self.tensor

    def times(self, factor: float) -> "Seconds":
        """As much work again and again."""
        return Seconds(*(getattr(self, field.name) * factor for field in fields(self)))


def together(parts: Iterable[Seconds]) -> Seconds:
    """One after the other."""
    parts = list(parts)
    return Seconds(*(sum(getattr(p, f.name) for p in parts) for f in fields(Seconds)))


def measured(of: Taken, rate: RateConfig) -> Seconds:
    """Of some work, by measured rates."""
    return Seconds(
        of.weighted * rate.flop + of.other * rate.attention + of.scores * rate.score,
        of.numbers * rate.number,
        of.operations * rate.operation + of.calls * rate.call,
    )


@dataclass(frozen=True)
class Clock:
    """Tells the time of a run on a cluster."""

    run: Run
    cluster: ClusterConfig

    @cached_property
    def _peak(self) -> float:
        config: RunConfig = self.run.config
        return self.cluster.flops[config.train.precision] * self.cluster.efficiency

    # -- work ----------------------------------------------------------------------------------

    def work(self, rank: Rank, work: Work) -> Seconds:
        """Some work of a stage, with the sums over the tensor axis inside it."""
        found, within = self._work(rank, work), range(self.run.axes.tensor)
        sums = sum(self.transfer(sent, within) for sent in rank.effort(work).sums)
        return Seconds(found.compute, found.memory, found.launch, sums)

    def _work(self, rank: Rank, work: Work) -> Seconds:
        rate = self.cluster.rates.get(rate_name(self.run, work.kind))
        if rate is not None:
            stepwise = self.run.axes.pipeline > 1
            return measured(taken(self.run, rank, work, stepwise=stepwise), rate)
        demand = demand_of(rank, work)
        parts = [self.roofline(product) for product in rank.effort(work).products]
        memory = demand.numbers * self.run.numbers.real / self.cluster.memory_bandwidth
        return Seconds(
            compute=sum(compute for compute, _ in parts),
            memory=sum(reading for _, reading in parts) + memory,
            launch=demand.operations * self.cluster.launch,
        )

    def roofline(self, product: Product) -> tuple[float, float]:
        """Seconds for which a product waits for arithmetic, and for memory: one of them is 0."""
        busy = self.flop_seconds(product)
        reading = product.numbers * self.run.numbers.narrow / self.cluster.memory_bandwidth
        return (busy, 0.0) if busy >= reading else (0.0, reading)

    def flop_seconds(self, product: Product) -> float:
        """At the reachable peak, in whole tiles; the summed dimension has none."""
        tile = self.cluster.tile
        m, n = (ceil(size / tile) * tile for size in (product.m, product.n))
        return 2 * product.repeats * product.batch * m * n * product.k / self._peak

    def update(self, place: Place) -> Seconds:
        """What follows on the passes of a rank besides messages: see `updating`."""
        return self._other(UPDATE, updating(self.run, place))

    def around(self) -> Seconds:
        """What a step has besides passes, sums of gradients and update."""
        return self._other(STEP, Demand(0, self.run.lanes * self.run.own.tokens))

    def _other(self, kind: str, demand: Demand) -> Seconds:
        rate = self.cluster.rates.get(kind)
        if rate is not None:
            return measured(demanded(demand), rate)
        bytes_ = demand.numbers * self.run.numbers.real
        launch = demand.operations * self.cluster.launch
        return Seconds(memory=bytes_ / self.cluster.memory_bandwidth, launch=launch)

    # -- messages ------------------------------------------------------------------------------

    def transfer(self, transfer: Transfer, ranks: Iterable[int]) -> float:
        """All calls of a message among ranks that go on when it is there."""
        ranks = list(ranks)
        count, link = len(ranks), self.link(ranks)
        hops = {"all_reduce": 2 * (count - 1), "send": 1}.get(transfer.kind, count - 1)
        each, bandwidth = hops * (link.latency + link.overhead), link.bandwidth
        if transfer.kind != "send" and count > 1:
            summed = transfer.kind == "all_reduce"
            long = self.cluster.bandwidths if summed else self.cluster.exchanges
            each = self._measured(self.cluster.collectives, count, each)
            bandwidth = self._measured(long, count, bandwidth)
        return transfer.calls * each + transfer.on_wire(count) / bandwidth

    def _measured(self, of: Mapping[str, float], count: int, otherwise: float) -> float:
        """What was measured of collectives of so many of this run's ranks, or of the nearest."""
        if not of:
            return otherwise
        size = self.run.axes.size

        def apart(key: str) -> tuple[int, int]:
            own, whole = map(int, key.split(" of "))
            return abs(whole - size), abs(own - count)

        return of[min(of, key=apart)]

    def link(self, ranks: Iterable[int]) -> LinkConfig:
        """The slowest that some ranks are joined by."""
        nodes = {rank // self.cluster.devices_per_node for rank in ranks}
        return self.cluster.between_nodes if len(nodes) > 1 else self.cluster.within_node

    def hop(self, bytes_: int, source: int, target: int) -> float:
        """A message's way between two stages of a pipeline."""
        axes = self.run.axes
        ranks = (axes.rank(Place(0, stage, 0)) for stage in (source, target))
        link = self.link(ranks)
        return link.latency + bytes_ / link.bandwidth
