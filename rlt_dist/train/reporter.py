"""What the leading process tells of a run: metrics on disk, progress on the screen."""

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from types import TracebackType
from typing import Any

from rlt_dist.checkpoint.saver import Saved
from rlt_dist.config.run import RunConfig
from rlt_dist.train.metrics import MetricsLog
from rlt_dist.train.progress import TrainingProgress
from rlt_dist.train.step import StepResult
from rlt_dist.util.ending import ENDED, Recorder
from rlt_dist.util.log import note, warn


class Reporter:
    """Writes and shows every step's record."""

    def __init__(self, config: RunConfig, step: int, notes: Sequence[str]) -> None:
        """Go on after `step`; `notes` are lines shown first."""
        self._log = MetricsLog(config.run_folder, step)
        self._progress = TrainingProgress(step, config.train.steps, config.train.log_every)
        self._notes = notes
        self._run_folder = config.run_folder
        (config.run_folder / ENDED).unlink(missing_ok=True)
        self._metrics_wait = False

    def step(self, record: dict[str, Any], result: StepResult) -> None:
        """One step's record."""
        self._log.write(record)
        if self._log.trouble and not self._metrics_wait:
            self.warn(f"metrics cannot be written and wait in memory: {self._log.trouble}")
        self._metrics_wait = self._log.trouble is not None
        self._progress.step(record["step"], result, record["tokens_per_second"])
        if result.skipped:
            self.say(f"step {record['step']}: {result.refusal}; skipped")
        if result.restarted_lanes:
            self.say(f"step {record['step']}: {result.restarted_lanes} lanes restarted")
        if "validation" in record:
            loss = record["validation"]["loss"]
            self.say(f"step {record['step']}: validation loss {loss:.4f}")

    def say(self, notice: str) -> None:
        """Something that a person should know."""
        self._progress.say(notice)
        note(notice)

    def ended(self, stopped: str | None, recorder: Recorder) -> None:
        """The run has come to its end, or was stopped, and why."""
        if stopped is None:
            self.say(f"finished; `rlt-dist report {self._run_folder}` shows the run")
        recorder.record("finished" if stopped is None else "stopped", stopped)

    def warn(self, notice: str) -> None:
        """Something that a person should do something about."""
        warn(f"WARNING: {notice}")

    def saves(self, finished: Sequence[Saved]) -> None:
        """What became of saves; of one that was written there is nothing to say."""
        for saved in finished:
            if saved.failure:
                self.warn(f"step {saved.step} could not be saved: {saved.failure}")

    def __enter__(self) -> "Reporter":
        self._progress.__enter__()
        for notice in self._notes:
            self.say(notice)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._progress.__exit__(kind, error, trace)
        # An error that is on its way says more than records which the same disk does not take.
        with suppress(OSError) if error else nullcontext():
            self._log.close()
