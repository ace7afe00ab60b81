"""An optimizer step on paper: the passes of its micro-batches, sums of gradients, the update."""

from collections import defaultdict
from dataclasses import asdict, dataclass
from functools import cached_property

from rlt_dist.costs.cluster import ClusterConfig
from rlt_dist.costs.fit import fullest_rank
from rlt_dist.costs.run import Run
from rlt_dist.costs.time import Clock, Seconds, together
from rlt_dist.costs.traffic import traffic_around
from rlt_dist.mesh.axes import AXES, Place
from rlt_dist.study.passes import Passes

SHARES = ("compute", "memory", "launch", "tensor", "pipeline", "data", "bubble", "other")


@dataclass(frozen=True, eq=False)
class Step:
    """An optimizer step of a run on a cluster."""

    run: Run
    cluster: ClusterConfig

    @cached_property
    def clock(self) -> Clock:
        """Tells its time."""
        return Clock(self.run, self.cluster)

    @cached_property
    def passes(self) -> Passes:
        """Forward and backward of all micro-batches."""
        return Passes(self.clock)

    @cached_property
    def peak_memory(self) -> int:
        """Bytes of the fullest rank."""
        return fullest_rank(self.run)[1].peak

    @cached_property
    def least(self) -> float:
        """Seconds that it cannot take less than."""
        return self.passes.least + self._updated.total + sum(self._messages.values())

    @cached_property
    def seconds(self) -> float:
        """Of the whole step: passes, sums of gradients, update."""
        return self.passes.seconds + self._after

    @cached_property
    def shares(self) -> dict[str, float]:
        """See `Prediction.shares`."""
        passes = self.passes
        alone, whole = together(passes.works), passes.seconds
        messages = max(0.0, min(whole - passes.without_messages, whole - passes.busy))
        parts = [alone.times(passes.busy / alone.total), self._updated.times(self._slowdown)]
        spent = asdict(together(parts))
        spent |= {"pipeline": messages, "bubble": whole - passes.busy - messages}
        for share, seconds in self._messages.items():
            spent[share] = spent.get(share, 0.0) + seconds
        around = self.clock.around().total * self._slowdown
        spent["other"] = spent.get("other", 0.0) + around
        return {name: spent.get(name, 0.0) / self.seconds for name in SHARES}

    @property
    def _after(self) -> float:
        alone = self._updated.total + self.clock.around().total
        return alone * self._slowdown + sum(self._messages.values())

    @property
    def _slowdown(self) -> float:
        """Of what all ranks do at once."""
        return self.passes.cores.slowdown(self.run.axes.pipeline)

    @cached_property
    def _updated(self) -> Seconds:
        """Of the stage that has most parameters."""
        places = (Place(0, stage, 0) for stage in self._ends)
        return max(map(self.clock.update, places), key=lambda seconds: seconds.total)

    @cached_property
    def _messages(self) -> dict[str, float]:
        """By share, seconds of messages around the passes, as the end stages send them."""
        found: dict[str, float] = {}
        for stage in self._ends:
            place, own = Place(0, stage, 0), defaultdict[str, float](float)
            for transfer in traffic_around(self.run, place):
                ranks = self.run.axes.members(transfer.group, place)
                share = transfer.axis if transfer.axis in AXES else "other"
                own[share] += self.clock.transfer(transfer, ranks)
            found |= {share: max(found.get(share, 0.0), seconds) for share, seconds in own.items()}
        return found

    @property
    def _ends(self) -> set[int]:
        """The stages that have more than others: the first and the last."""
        return {0, self.run.axes.pipeline - 1}
