"""How far runs are that are trained side by side."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from rlt_dist.config.run import RunConfig
    from rlt_dist.experiments.training import Watch

_LINES = 10
"""Lines for a run where there is no terminal."""


@contextmanager
def training_bars() -> "Iterator[Watch]":
    """A bar for each run on a terminal; elsewhere a line at each tenth of its steps."""
    from rich.console import Console
    from rich.progress import Progress, TaskID

    console = Console(stderr=True)
    bars: dict[str, TaskID] = {}
    told: dict[str, int] = {}

    def update(run: "RunConfig", step: int) -> None:
        name = str(run.run_folder)
        if name not in bars:
            bars[name] = progress.add_task(run.run_folder.name, total=run.train.steps)
        progress.update(bars[name], completed=step)

    def tell(run: "RunConfig", step: int) -> None:
        name, tenth = str(run.run_folder), step * _LINES // run.train.steps
        if tenth > told.get(name, 0):
            typer.echo(f"{run.run_folder.name}: step {step} of {run.train.steps}", err=True)
            told[name] = tenth

    with Progress(console=console, disable=not console.is_terminal) as progress:
        yield update if console.is_terminal else tell
