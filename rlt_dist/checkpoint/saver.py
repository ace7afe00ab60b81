"""Saving while training goes on.

At a step's end every process copies what it has into host memory; a thread writes that copy, and
talks to the threads of the other processes in a group of their own. Two saves never run at once.
What becomes of a save is the same on all processes.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from rlt_dist.checkpoint.manifest import Facts
from rlt_dist.checkpoint.pieces import Pieces
from rlt_dist.checkpoint.save import Keep, save_checkpoint
from rlt_dist.config.run import CheckpointConfig
from rlt_dist.mesh.world import World
from rlt_dist.util.errors import Trouble, UserError


@dataclass(frozen=True)
class Saved:
    """What became of one save.

    Attributes:
        step: whose state it is.
        blocked: seconds that training waited for it: the copy, and a save before it.
        seconds: from the step's end until it was committed or given up.
        bytes: written by all processes.
        tensor_bytes: of all its tensors, each counted once.
        failure: why it could not be written; None: it was.
    """

    step: int
    blocked: float
    seconds: float
    bytes: int
    tensor_bytes: int
    failure: str | None


class HostCopy:
    """Host memory that takes a copy of what is saved, kept from one save to the next.

    Touching memory for the first time takes several times as long as the copy itself.
    """

    def __init__(self) -> None:
        self._blocks: dict[tuple[str, torch.Size], Tensor] = {}

    def take(self, contents: Mapping[str, Pieces]) -> dict[str, Pieces]:
        """A copy that stays as it is until the next one is taken."""
        before, self._blocks = self._blocks, {}
        taken = {}
        for name, of in contents.items():
            for where, block in of.blocks.items():
                room = before.get((name, where))
                if room is None or room.shape != block.shape or room.dtype != block.dtype:
                    room = _host_memory(block)
                self._blocks[name, where] = room.copy_(block, non_blocking=True)
            own = {where: self._blocks[name, where] for where in of.blocks}
            taken[name] = replace(of, blocks=own)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return taken


class Saver:
    """Writes a run's checkpoints. A context manager: its thread ends with the block.

    Leaving the block waits for a save that is under way, also after an error: the threads of all
    processes are still at it, and one whose process is gone is missed (`mesh.watch`).
    """

    def __init__(self, folder: Path, world: World, config: CheckpointConfig) -> None:
        """To be made on all processes at the same place.

        Args:
            folder: where checkpoints lie.
        """
        self._folder, self._config = folder, config
        self._world = world.beside("saving")
        self._keep = Keep.of(config)
        self._copy = HostCopy()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="saver")
        self._running: Future[Saved] | None = None
        self._finished: list[Saved] = []
        self._failures: list[Saved] = []

    def save(self, contents: Mapping[str, Pieces], facts: Facts) -> None:
        """Save what a step left, which later steps may change at once; not where it gave up."""
        began = time.monotonic()
        self.wait()
        if self.gave_up:
            return
        if self._config.asynchronous:
            contents = self._copy.take(contents)
        blocked = time.monotonic() - began
        self._running = self._thread.submit(self._write, contents, facts, began, blocked)
        if not self._config.asynchronous:
            self.wait()

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._running is not None and not self._running.done()

    @property
    def gave_up(self) -> bool:
        """Whether as many saves in a row as are allowed could not be written.

        Each process learns it when it looks, so perhaps a step apart; after `wait` all know.
        """
        return len(self._failures) >= self._config.max_failures

    def wait(self) -> None:
        """Wait for the save that is under way."""
        if self._running is None:
            return
        running, self._running = self._running, None
        saved = running.result()
        self._finished.append(saved)
        self._failures = [*self._failures, saved] if saved.failure else []

    def finished(self) -> list[Saved]:
        """What became of saves since this was last asked; none is waited for."""
        if self._running is not None and self._running.done():
            self.wait()
        finished, self._finished = self._finished, []
        return finished

    def check(self) -> None:
        """Whether what was done is saved, once it was waited for.

        Raises:
            UserError: on every process alike, where the last save could not be written.
        """
        failures = self._failures
        if not failures:
            return
        times = "" if len(failures) == 1 else f", like {len(failures) - 1} before it"
        error = Trouble(
            f"step {failures[-1].step} could not be saved{times} ({failures[-1].failure}); once "
            "there is room, the same command goes on from the checkpoint before"
        )
        error.shared = True
        raise error

    def _write(
        self, contents: Mapping[str, Pieces], facts: Facts, began: float, blocked: float
    ) -> Saved:
        """The thread: one save."""
        try:
            manifest = save_checkpoint(self._folder, contents, facts, self._world, self._keep)
            failure, written, tensors = None, manifest.bytes, manifest.tensor_bytes
        except UserError as error:
            failure, written, tensors = str(error), 0, 0
        seconds = time.monotonic() - began
        if not self._config.asynchronous:
            blocked = seconds
        return Saved(facts.step, blocked, seconds, written, tensors, failure)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown()


def _host_memory(like: Tensor) -> Tensor:
    return torch.empty(like.shape, dtype=like.dtype, pin_memory=like.device.type == "cuda")
