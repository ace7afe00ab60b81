"""Bytes of one rank at the fullest moment of a step.

What stays from step to step is exact: parameters, the optimizer's moments, the carried state. What
comes and goes is followed through the moments that may be the fullest: the head, where logits are
there; the beginning of backward, where all activations still are; the last of backward, where most
gradients are; the exchange of gradients; the update. Of what an operator needs while it runs only
the largest arrays are counted.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from rlt_dist.costs.keep import Kept, kept_of
from rlt_dist.costs.looped import LoopedRank
from rlt_dist.costs.run import Run
from rlt_dist.costs.state import state_bytes
from rlt_dist.costs.traffic import updated_numbers

_MOMENTS = 2

Parts = Mapping[str, int]
"""Bytes by what they are for."""


@dataclass(frozen=True)
class RankMemory:
    """What a rank holds.

    Attributes:
        resident: from step to step.
        moments: by moment of a step, what is there besides.
    """

    resident: Parts
    moments: Mapping[str, Parts]

    @property
    def fullest(self) -> str:
        """The moment at which most is there."""
        return max(self.moments, key=lambda moment: sum(self.moments[moment].values()))

    @property
    def above(self) -> int:
        """Bytes at the fullest moment above what is resident."""
        return sum(self.moments[self.fullest].values())

    @property
    def parts(self) -> Parts:
        """All that is there at the fullest moment."""
        return {**self.resident, **self.moments[self.fullest]}

    @property
    def peak(self) -> int:
        """Bytes at the fullest moment."""
        return sum(self.parts.values())


def rank_memory(run: Run, stage: int) -> RankMemory:
    """Of the tensor rank of a stage that has most, on the first data-parallel rank."""
    real, held = run.numbers.real, run.held(stage, 0)
    parameters = sum(map(prod, held.values())) * real
    updated = updated_numbers(run, held.values()) * real
    seen = run.own.seen
    state = state_bytes(run, stage, 0, run.lanes, seen)
    after = state_bytes(run, stage, 0, run.lanes, seen + run.own.tokens)
    resident = {"parameters": parameters, "state": state}
    resident |= {"optimizer": _MOMENTS * updated, **_masters(run, parameters, updated)}
    kept = kept_of(run, stage)
    moments = _passes(run, stage, kept, parameters)
    ranks, largest = run.axes.data, max(map(prod, held.values())) * real
    exchanged = {"gradients": parameters, "state after": after}
    if ranks > 1:
        sent = ranks * updated
        moments["gradients exchanged"] = {"gradients": updated, "messages": 2 * sent}
        moments["gradients exchanged"] |= {"state after": after}
        moments["parameters gathered"] = {"gradients": updated, "messages": updated + sent}
        moments["parameters gathered"] |= {"state after": after}
        exchanged["gradients"] = updated
    moments["update"] = {**exchanged, "update": 2 * largest // ranks}
    return RankMemory(resident, moments)


def _masters(run: Run, parameters: int, updated: int) -> Parts:
    """DeepSpeed's own copies: flat masters of what is updated, and with stage 1 flat gradients."""
    optimizer = run.config.optimizer
    if optimizer.engine != "deepspeed":
        return {}
    return {"masters": updated if optimizer.zero_stage == 2 else updated + parameters}


def held_micro_batches(run: Run, stage: int) -> int:
    """Micro-batches whose activations a stage has at a time."""
    count, pipeline = run.micro_batches, run.config.pipeline
    stages = run.axes.pipeline
    if stages == 1:
        return 1
    if isinstance(run.rank(stage), LoopedRank):
        return count if pipeline.group is None else min(count, pipeline.group * pipeline.in_flight)
    return count if pipeline.schedule == "gpipe" else min(count, stages - stage)


def _passes(run: Run, stage: int, kept: Kept, parameters: int) -> dict[str, dict[str, int]]:
    """Forward and backward of the micro-batches."""
    held = held_micro_batches(run, stage)
    others = run.micro_batches > 1
    carried = {"state after": (run.micro_batches - held) * kept.after}
    activations = held * kept.forward + kept.shared
    moments: dict[str, dict[str, int]] = {}
    if kept.logits:
        moments["head"] = {"activations": activations, "logits": kept.logits}
        moments["head"] |= {"gradients": kept.head + (parameters if others else 0)}
    turned = held if run.axes.pipeline > 1 else 1
    moments["backward begins"] = {
        "activations": activations,
        "backward": turned * kept.backward + kept.shared_backward,
        "gradients": parameters if others else kept.head,
    }
    moments["backward ends"] = {
        "activations": held * kept.first_layers,
        "backward": kept.layer_backward,
        "gradients": parameters,
    }
    return {name: {**parts, **carried} for name, parts in moments.items()}
