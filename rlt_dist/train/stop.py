"""A run that is asked to stop: all ranks agree on a step, save, and end with one exit status.

A signal at any one rank is a wish of that rank, and so is a deadline by its clock. Before every
step one small sum tells all whether anybody has a wish, or knows that saving was given up.
"""

import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

import torch
import torch.distributed as dist

from rlt_dist.checkpoint.saver import Saver
from rlt_dist.mesh.collectives import all_sum
from rlt_dist.train.session import Session
from rlt_dist.util.errors import UserError
from rlt_dist.util.signals import Signals

JOB_END = "SLURM_JOB_END_TIME"
"""Slurm's word to a job: when it will be ended, in seconds since the epoch."""

_UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1}
_DURATION = re.compile(r"(?:\d+(?:\.\d+)?[dhms])+")
_GUESS_SECONDS, _GUESS_BYTES = 5.0, 50e6
"""A save is taken to last so many seconds, with so many bytes a second, before there was one."""


@dataclass(frozen=True)
class Wishes:
    """What may ask this process to stop.

    Attributes:
        deadline: seconds since the epoch, by which the process wants to have ended.
    """

    signals: Signals | None = None
    deadline: float | None = None


NO_WISHES = Wishes()


class Stop:
    """When to stop, agreed on by all ranks.

    Attributes:
        why: whose wish it was, in words, once it is agreed; None where saving was given up, of
            which `Saver.check` tells.
    """

    def __init__(self, session: Session, wishes: Wishes) -> None:
        self._session, self._world, self._wishes = session, session.world, wishes
        self._step, self._save = 0.0, _first_guess(session)
        self._saved = False
        self.why: str | None = None

    def agreed(self, saver: Saver) -> bool:
        """Whether to stop after the step just done; alike on all ranks."""
        wish = self._wish(saver.busy)
        own = torch.tensor([wish is not None, saver.gave_up], dtype=torch.int64)
        wishes, gave_up = all_sum(own.to(self._world.device), self._session.mesh.everyone).tolist()
        if gave_up or not wishes:
            return bool(gave_up)
        of_all: list[str | None] = [None] * self._world.size
        dist.all_gather_object(of_all, wish, group=self._world.group)
        rank, found = next((rank, wish) for rank, wish in enumerate(of_all) if wish)
        when = f"after step {self._session.step}" if self._session.step else "before the first step"
        self.why = f"stopped {when}: rank {rank} {found}"
        return True

    @contextmanager
    def timing_step(self) -> Iterator[None]:
        """Measure a step, validation included."""
        began = time.monotonic()
        yield
        self._step = max(self._step, time.monotonic() - began)

    def note_save(self, seconds: float) -> None:
        """A save has taken so long."""
        self._save = max(seconds, self._save) if self._saved else seconds
        self._saved = True

    def _wish(self, saving: bool) -> str | None:
        """Why this process wants to stop before the next step.

        Args:
            saving: an earlier save is still under way, and has to end before the last one begins.
        """
        if self._wishes.signals and self._wishes.signals.first:
            return f"was sent {self._wishes.signals.first}"
        deadline = self._wishes.deadline
        lead = self._step + self._save * (1 + saving)
        if deadline is None or time.time() + lead < deadline:
            return None
        when = datetime.fromtimestamp(deadline).astimezone().isoformat(" ", "seconds")
        return (
            f"has to end before {when}, and a step takes up to {self._step:.1f} s "
            f"and a save {self._save:.1f} s"
        )


def _first_guess(session: Session) -> float:
    """Seconds of a save, before there was one: weights, two moments of each, and the state."""
    weights = sum(tensor.nbytes for tensor in session.local_model.parameters.values())
    state = sum(tensor.nbytes for tensor in session.state.values())
    return _GUESS_SECONDS + (3 * weights + state) / _GUESS_BYTES


def deadline_of(wished: str | None, began: float, environment: Mapping[str, str]) -> float | None:
    """The earlier one of what a person wished and what Slurm says; None: there is none.

    Args:
        wished: a duration such as 90m or 1h30m, from `began` on, or a time in ISO 8601, which is
            local unless it names its zone.
        began: seconds since the epoch, when the command was started.

    Returns:
        seconds since the epoch.

    Raises:
        UserError: a wish that is neither, or is past.
    """
    found = [] if wished is None else [_parsed(wished, began)]
    job_end = environment.get(JOB_END, "")
    if job_end.isdigit():
        found.append(float(job_end))
    return min(found, default=None)


def _parsed(wished: str, began: float) -> float:
    if _DURATION.fullmatch(wished):
        parts = re.findall(r"([\d.]+)([dhms])", wished)
        return began + sum(float(number) * _UNITS[unit] for number, unit in parts)
    try:
        deadline = datetime.fromisoformat(wished).timestamp()
    except ValueError:
        raise UserError(
            f"--stop-before {wished}: give a duration such as 90m or 1h30m, or a time such as "
            "2026-12-01T08:00"
        ) from None
    if deadline <= began:
        raise UserError(f"--stop-before {wished}: is past")
    return deadline
