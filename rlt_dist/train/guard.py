"""Which steps are not to be trusted, and when a run is not."""

import math
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from rlt_dist.checkpoint.manifest import GuardFacts
from rlt_dist.config.run import RunConfig, SpikeConfig
from rlt_dist.data.stream.lanes import Cursor
from rlt_dist.mesh.collectives import on_leader
from rlt_dist.mesh.world import World
from rlt_dist.train.step import UNSCORED, StepResult, not_finite
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import write_atomic

SPIKED = "loss was above guard.spike"

_ADVICE = """What to try:
- lower optimizer.learning_rate, or raise schedule.warmup, and start from an earlier checkpoint: the
  same command goes on from the newest one in checkpoints/, so remove those that you do not want;
- look at the text of the batches above (their cursors): is it damaged, or unlike the rest?
- if the state norms grow from step to step, set guard.state_norm a little above what was usual
  (state_norm in metrics.jsonl);
- if the losses are those of a run that is well, guard.spike is too strict, or its window too short.
"""


@dataclass(frozen=True)
class GuardedStep:
    """A step that was done, as one rank saw it.

    Attributes:
        record: its numbers, alike on all ranks; of a skipped step state norms too.
        lanes: the rank's.
        cursors: int64 [b, corpora, 4], where the lanes stood before the step.
    """

    record: dict[str, Any]
    result: StepResult
    lanes: range
    cursors: Tensor


class Guard:
    """Judges every step by its own numbers and those of the steps before, alike on all ranks."""

    def __init__(self, config: RunConfig, remembered: GuardFacts) -> None:
        """Go on with what a checkpoint remembers."""
        self._config, self._spike = config.guard, config.guard.spike
        self._folder = config.run_folder
        window = self._spike.window if self._spike else 0
        self._skips, self._losses = remembered.skips, deque(remembered.losses, maxlen=window)
        self._bad: deque[GuardedStep] = deque(maxlen=config.guard.max_skips)

    @property
    def facts(self) -> GuardFacts:
        """What later decisions depend on."""
        return GuardFacts(skips=self._skips, losses=tuple(self._losses))

    def judge(self, loss: float, gradient_norm: float) -> str | None:
        """Why a step must not update anything; None: it may."""
        return not_finite(loss, gradient_norm) or self._spiked(loss)

    def note(self, step: GuardedStep) -> str | None:
        """Remember a step; why the run must stop after it, or None."""
        result = step.result
        if result.refusal == UNSCORED:
            return None
        if result.refusal is None:
            self._skips = 0
            self._losses.append(result.loss)
            self._bad.clear()
            return None
        self._skips += 1
        self._bad.append(step)
        number = step.record["step"]
        if result.refusal == SPIKED and self._spike and self._spike.action == "stop":
            return f"{SPIKED} in step {number}"
        if self._skips < self._config.max_skips:
            return None
        reasons = " or ".join(dict.fromkeys(str(bad.result.refusal) for bad in self._bad))
        return f"{reasons} in {self._skips} steps in a row, up to step {number}"

    def stop(self, why: str, world: World) -> UserError:
        """Write the report; the error that ends the run on all ranks."""
        of_all: list[list[GuardedStep]] = [[]] * world.size
        dist.all_gather_object(of_all, list(self._bad), group=world.group)
        path = self._folder / f"guard-step-{self._bad[-1].record['step']:08d}.txt"
        on_leader(world, lambda: write_atomic(path, report(why, of_all)))
        error = UserError(
            f"{why}; lower optimizer.learning_rate or raise schedule.warmup, and start from an "
            f"earlier checkpoint of {self._folder}; the bad steps are in {path.name} there"
        )
        error.shared = error.guard = True
        return error

    def _spiked(self, loss: float) -> str | None:
        spike = self._spike
        if spike is None or len(self._losses) < spike.window:
            return None
        limit = spike_limit(spike, list(self._losses))
        return SPIKED if loss > limit else None


def spike_limit(spike: SpikeConfig, losses: list[float]) -> float:
    """The loss above which a step is a spike, after steps with these losses."""
    mean = math.fsum(losses) / len(losses)
    if spike.factor is not None:
        return spike.factor * mean
    assert spike.deviations is not None
    variance = math.fsum((loss - mean) ** 2 for loss in losses) / len(losses)
    return mean + spike.deviations * math.sqrt(variance)


def report(why: str, of_all: list[list[GuardedStep]]) -> str:
    """What a person reads about a run that stopped.

    Args:
        of_all: the same steps as each rank saw them.
    """
    parts = [f"The run was stopped: {why}.\n"]
    for seen in zip(*of_all, strict=True):
        record = seen[0].record
        numbers = "  ".join(
            f"{name} {record[name]:.6g}" for name in ("loss", "gradient_norm", "learning_rate")
        )
        norms = "  ".join(f"{name} {norm:.4g}" for name, norm in record["state_norm"].items())
        parts.append(
            f"Step {record['step']}: {seen[0].result.refusal}\n"
            f"  {numbers}\n"
            f"  lanes restarted: {record['restarted_lanes']}\n"
            f"  root mean square of the state: {norms}\n"
            f"  its batch, by lane: {', '.join(Cursor.FIELDS)} where it began, one group a corpus\n"
            + "".join(_lane_lines(seen))
        )
    return "\n".join([*parts, _ADVICE])


def _lane_lines(seen: tuple[GuardedStep, ...]) -> list[str]:
    """One line a lane; the ranks of one replica have the same lanes."""
    found = {
        lane: "  ".join(" ".join(map(str, cursor)) for cursor in cursors)
        for bad in seen
        for lane, cursors in zip(bad.lanes, bad.cursors.tolist(), strict=True)
    }
    return [f"    lane {lane}: {found[lane]}\n" for lane in sorted(found)]
