"""What the leading process tells of a run: metrics on disk, progress on the screen."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any

from rlt_dist.config.run import RunConfig
from rlt_dist.train.metrics import MetricsLog
from rlt_dist.train.progress import TrainingProgress
from rlt_dist.train.step import StepResult


class Reporter:
    """Writes and shows every step's record."""

    def __init__(self, config: RunConfig, step: int, notes: Sequence[str]) -> None:
        """Go on after `step`; `notes` are lines shown first."""
        self._log = MetricsLog(config.run_folder, step)
        self._progress = TrainingProgress(step, config.train.steps, config.train.log_every)
        self._notes = notes
        self._run_folder = config.run_folder

    def step(self, record: dict[str, Any], result: StepResult) -> None:
        """One step's record."""
        self._log.write(record)
        self._progress.step(record["step"], result, record["tokens_per_second"])
        if result.skipped:
            self._progress.say(f"step {record['step']}: loss or gradient not finite; skipped")
        if result.restarted_lanes:
            self._progress.say(f"step {record['step']}: {result.restarted_lanes} lanes restarted")
        if "validation" in record:
            loss = record["validation"]["loss"]
            self._progress.say(f"step {record['step']}: validation loss {loss:.4f}")

    def say(self, notice: str) -> None:
        """Something that a person should know."""
        self._progress.say(notice)

    def __enter__(self) -> "Reporter":
        self._progress.__enter__()
        for note in self._notes:
            self._progress.say(note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is None:
            self._progress.say(f"finished; `rlt-dist report {self._run_folder}` shows the run")
        if kind is KeyboardInterrupt:
            self._progress.say("stopped; the same command goes on from the newest checkpoint")
        self._progress.__exit__(kind, error, trace)
        self._log.close()
