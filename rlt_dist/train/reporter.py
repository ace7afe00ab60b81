"""What the leading process tells of a run: metrics on disk, progress on the screen."""

from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal

from rlt_dist.checkpoint.run_folder import ENDED
from rlt_dist.config.run import RunConfig
from rlt_dist.train.metrics import MetricsLog
from rlt_dist.train.progress import TrainingProgress
from rlt_dist.train.step import StepResult
from rlt_dist.util.files import write_atomic
from rlt_dist.util.records import to_json


class Reporter:
    """Writes and shows every step's record."""

    def __init__(self, config: RunConfig, step: int, notes: Sequence[str]) -> None:
        """Go on after `step`; `notes` are lines shown first."""
        self._log = MetricsLog(config.run_folder, step)
        self._progress = TrainingProgress(step, config.train.steps, config.train.log_every)
        self._notes = notes
        self._run_folder = config.run_folder
        (config.run_folder / ENDED).unlink(missing_ok=True)

    def step(self, record: dict[str, Any], result: StepResult) -> None:
        """One step's record."""
        self._log.write(record)
        self._progress.step(record["step"], result, record["tokens_per_second"])
        if result.skipped:
            self._progress.say(f"step {record['step']}: {result.refusal}; skipped")
        if result.restarted_lanes:
            self._progress.say(f"step {record['step']}: {result.restarted_lanes} lanes restarted")
        if "validation" in record:
            loss = record["validation"]["loss"]
            self._progress.say(f"step {record['step']}: validation loss {loss:.4f}")

    def say(self, notice: str) -> None:
        """Something that a person should know."""
        self._progress.say(notice)

    def ended(
        self, how: Literal["finished", "stopped", "guard"], step: int, why: str | None
    ) -> None:
        """The run has ended in order.

        RUN/ended.json keeps it, for who started the run and sees another exit status: torchrun's
        is 1 whatever the ranks' is.
        """
        if how == "finished":
            self._progress.say(f"finished; `rlt-dist report {self._run_folder}` shows the run")
        ending = {"how": how, "step": step, "why": why}
        write_atomic(self._run_folder / ENDED, to_json(ending) + "\n")

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
        self._progress.__exit__(kind, error, trace)
        self._log.close()
