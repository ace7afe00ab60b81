"""What a person sees of a run: a progress bar on a terminal, a line now and then elsewhere."""

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlt_dist.train.step import UNSCORED, StepResult
from rlt_dist.util.log import note


class TrainingProgress:
    """Shows step, loss, tokens per second and the remaining time."""

    def __init__(self, first: int, steps: int, every: int) -> None:
        """Steps `first` + 1 to `steps`; a line every `every` steps where there is no terminal."""
        self._console = Console(stderr=True)
        self._steps, self._every = steps, every
        self._began, self._first = time.monotonic(), first
        self._bar = Progress(
            TextColumn("[bold]train"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]}"),
            TextColumn("{task.fields[speed]:,.0f} tokens/s"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=steps, completed=first, loss="-", speed=0.0)

    def step(self, number: int, result: StepResult, speed: float) -> None:
        """Show one step; `speed` in tokens per second over all lanes."""
        loss = "-" if result.refusal == UNSCORED else f"{result.loss:.4f}"
        self._bar.update(self._task, completed=number, loss=loss, speed=speed)
        if self._due(number):
            left = (time.monotonic() - self._began) / (number - self._first)
            minutes, seconds = divmod(round(left * (self._steps - number)), 60)
            line = (
                f"step {number}/{self._steps}  loss {loss}  "
                f"{speed:,.0f} tokens/s  {minutes}:{seconds:02d} left"
            )
            note(line)
            if not self._console.is_terminal:
                self._console.print(line, highlight=False, soft_wrap=True)

    def say(self, text: str) -> None:
        """A line above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _due(self, number: int) -> bool:
        return number % self._every == 0 or number in (self._first + 1, self._steps)

    def __enter__(self) -> "TrainingProgress":
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.stop()
