"""What a study's point did when it was really trained: from its run folder."""

from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from pydantic import BaseModel, PositiveFloat, PositiveInt, ValidationError

from rlt_dist.checkpoint.run_folder import CONFIG, METRICS, is_run_folder
from rlt_dist.config.load import Strict, load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.mesh.axes import least_axes
from rlt_dist.study.grid import Point
from rlt_dist.util.errors import UserError
from rlt_dist.util.records import read_records


class _Step(BaseModel):
    """What a line of a run's metrics says of a step, among other things: see `Measured`."""

    step: PositiveInt
    seconds: PositiveFloat
    loss: float | None = None
    mfu: float | None = None
    waiting: dict[str, float] | None = None
    bubble: float | None = None
    peak_memory: int | None = None
    sent: dict[str, int] | None = None


class Measured(Strict):
    """A point's figures, over the steps after those of warm-up."""

    name: str
    axes: str
    """Data x pipeline x tensor, as in 2x1x4."""
    steps: PositiveInt
    """How many are counted."""
    seconds: PositiveFloat
    """Of an optimizer step, the median; saves are not in it."""
    spread: tuple[float, float]
    """Of those seconds, the quartiles."""
    tokens_per_second: PositiveFloat
    """Of all ranks, at the median step."""
    mfu: float | None = None
    """Model FLOPs utilisation, the median."""
    waiting: dict[str, float] | None = None
    """By axis: the share of their time that the mean rank stood in messages along it, of the steps
    that tell it (`train.usage`)."""
    bubble: float | None = None
    """Share of a step's pipeline pass that the mean stage waits, the median."""
    peak_memory: int | None = None
    """Bytes of the rank that takes most: of its tensors on CUDA, else of its process; see
    `train.usage`."""
    sent: dict[str, int] | None = None
    """By axis: bytes that the rank which sends most hands over in a step."""
    loss: float | None = None
    """Of the last step; null: it was not finite."""


def measure(point: Point, folder: Path, warmup: int) -> Measured | None:
    """The figures of a point's run, finished or not; None where too few steps are done.

    Args:
        folder: the run's.
        warmup: steps that are left out.

    Raises:
        UserError: the run's metrics are damaged.
    """
    steps = _steps(folder / METRICS)
    counted = [step for step in steps if step.step > warmup]
    if not counted or not is_run_folder(folder):
        return None
    config = load_typed(folder / CONFIG, RunConfig)
    seconds = [step.seconds for step in counted]
    low, median, high = (float(part) for part in np.percentile(seconds, (25, 50, 75)))
    return Measured(
        name=point.name,
        axes=str(least_axes(config.mesh)),
        steps=len(counted),
        seconds=median,
        spread=(low, high),
        tokens_per_second=config.data.tokens_per_step / median,
        mfu=_median(counted, "mfu"),
        waiting=_waiting(counted),
        bubble=_median(counted, "bubble"),
        peak_memory=max(_values(counted, "peak_memory"), default=None),
        sent=max(_values(counted, "sent"), key=lambda sent: sum(sent.values()), default=None),
        loss=steps[-1].loss,
    )


def _steps(path: Path) -> list[_Step]:
    """Raises UserError where a line is no step's."""
    found = []
    for line, record in enumerate(read_records(path), 1):
        try:
            found.append(_Step.model_validate(record))
        except ValidationError as error:
            key = ".".join(map(str, error.errors()[0]["loc"]))
            raise UserError(
                f"{path}:{line}: `{key}` is not a step's; remove the line, or the file"
            ) from None
    return found


def _values(steps: Sequence[_Step], key: str) -> list[Any]:
    """What steps have of a figure that not every run records."""
    return [value for step in steps if (value := getattr(step, key)) is not None]


def _median(steps: Sequence[_Step], key: str) -> float | None:
    values = _values(steps, key)
    return float(np.median(values)) if values else None


def _waiting(steps: Sequence[_Step]) -> dict[str, float] | None:
    """Shares of the time of the steps that tell it."""
    known = [(step.seconds, step.waiting) for step in steps if step.waiting is not None]
    if not known:
        return None
    whole = fmean(seconds for seconds, _ in known)
    return {axis: fmean(waiting[axis] for _, waiting in known) / whole for axis in known[0][1]}
