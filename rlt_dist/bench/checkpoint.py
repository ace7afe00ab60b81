"""What saving costs a run: steps without saves, beside saves, and between saves that it waits for.

Each way trains the same model: RLT-1 of 12 million parameters in float32, whose checkpoint, with
AdamW's moments, has more than 100 MB. A round is an interval of every way, in an order drawn anew:
some steps, the first of which is saved, so that the others run beside the writing. An interval ends
when all is written.
"""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from rlt_dist.bench.compare import torch_threads
from rlt_dist.bench.timing import Disturbance
from rlt_dist.checkpoint.contents import Contents
from rlt_dist.checkpoint.manifest import Facts
from rlt_dist.checkpoint.saver import Saved, Saver
from rlt_dist.config.run import RunConfig
from rlt_dist.data.stream.loader import cursors_at_start
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.mesh.world import open_world
from rlt_dist.parallel.mesh import mesh_of
from rlt_dist.train.rehearsal import Rehearsal
from rlt_dist.util.errors import UserError

WAYS = ("none", "async", "sync")
VOCABULARY = 4096
STEPS = 4
"""Of an interval."""

MODEL = {
    "kind": "rlt",
    "d_model": 512,
    "heads": 8,
    "ffn": 1364,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "window": 8,
    "memory_len": 64,
    "feedback": 1,
}


@dataclass
class Costs:
    """What was measured of one way.

    Attributes:
        steps: seconds of each step, saves left out.
        blocked: seconds of each save that training waited for.
        intervals: seconds of each, with its save and the wait for what was still being written.
        saves: what became of each.
    """

    steps: list[float] = field(default_factory=list)
    blocked: list[float] = field(default_factory=list)
    intervals: list[float] = field(default_factory=list)
    saves: list[Saved] = field(default_factory=list)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Of the seconds of a step."""
        low, _, high = quantiles(self.steps, n=4, method="inclusive")
        return low, high


class Run:
    """One way: a model in training, and what saves it, if anything does."""

    def __init__(self, config: RunConfig, mesh: Mesh, saver: Saver | None) -> None:
        self._rehearsal = Rehearsal(config, VOCABULARY, mesh)
        self._saver, self._mesh = saver, mesh
        self.costs = Costs()

    def interval(self) -> None:
        """Some steps, a save behind the first, and the wait for its end."""
        costs, began = self.costs, time.perf_counter()
        for step in range(STEPS):
            costs.steps.append(_seconds(self._rehearsal.step))
            if step == 0 and self._saver is not None:
                costs.blocked.append(_seconds(self._save))
        if self._saver is not None:
            self._saver.wait()
            costs.saves += self._saver.finished()
        costs.intervals.append(time.perf_counter() - began)
        for saved in costs.saves:
            if saved.failure:
                raise UserError(saved.failure)

    def _save(self) -> None:
        run, saver = self._rehearsal, self._saver
        assert saver is not None
        cursors = cursors_at_start(len(run.lanes), 1)
        contents = Contents(run.local.parameters, run.optimizer.tensors(), run.state, cursors)
        facts = Facts(
            step=run.steps,
            tokens=0,
            tokenizer="",
            corpus="",
            identity={},
            mesh=str(self._mesh.axes),
        )
        saver.save(contents.pieces(run.local, self._mesh), facts)


def measure(
    folder: Path, threads: int, rounds: int, watch: Callable[[str], None]
) -> tuple[dict[str, Costs], float | None]:
    """Time all ways in turn, after one interval each to warm up.

    Args:
        folder: where checkpoints are written; the newest of each way is left there.
        rounds: at least two.
        watch: is told in words what is being done.

    Returns:
        costs by way, and how many cores other processes kept busy.

    Raises:
        UserError: a checkpoint could not be written.
    """
    chance = random.Random(0)
    with torch_threads(threads), _runs(folder, threads) as runs:
        watch("warming up")
        for run in runs.values():
            run.interval()
            run.costs = Costs()
        with Disturbance() as disturbance:
            for done in range(rounds):
                watch(f"{done} rounds timed")
                for way in chance.sample(WAYS, len(WAYS)):
                    runs[way].interval()
    return {way: run.costs for way, run in runs.items()}, disturbance.cores


@contextmanager
def _runs(folder: Path, threads: int) -> Iterator[dict[str, Run]]:
    with open_world({"OMP_NUM_THREADS": str(threads)}) as world, ExitStack() as savers:
        runs = {}
        for way in WAYS:
            config = _config(folder / way, asynchronous=way == "async")
            mesh = savers.enter_context(mesh_of(config, world))
            saver = None
            if way != "none":
                saver = savers.enter_context(Saver(folder / way, world, config.checkpoint))
            runs[way] = Run(config, mesh, saver)
        yield runs


def _config(folder: Path, asynchronous: bool) -> RunConfig:
    return RunConfig.model_validate(
        {
            "run_folder": folder,
            "model": MODEL,
            "data": {"path": str(folder), "lanes": 4, "segment": 64},
            "optimizer": {"learning_rate": 1e-4},
            "train": {"steps": 1},
            "checkpoint": {"asynchronous": asynchronous, "keep": 1},
        }
    )


def _seconds(action: Callable[[], object]) -> float:
    began = time.perf_counter()
    action()
    return time.perf_counter() - began


def typical(values: list[float]) -> float | None:
    """The median; None of nothing."""
    return median(values) if values else None
