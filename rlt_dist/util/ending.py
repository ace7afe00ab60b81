"""How a start of the ranks ended: the one record that they leave for whoever started them.

A launcher's exit status says little: torchrun's is 1 whatever the ranks' is. So the ranks leave
RUN/ended.json, with the name of their start, which they are given in the environment.
"""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from rlt_dist.util.errors import Trouble, UserError
from rlt_dist.util.files import write_atomic

ENDED = "ended.json"
"""In the run folder; absent while a start is at work."""

ASKED = "asked"
"""In the run folder: the name of the start that was last asked to stop, whose ranks torchrun must
not start again."""

START = "RLT_DIST_START"
"""In the environment of all ranks of one start: its name."""

OWNER = "RLT_DIST_OWNER"
"""In the environment of all that one `jobs.ranks.run_ranks_with` has started: its process, and
which of its calls it was."""

How = Literal["finished", "stopped", "guard", "mistake", "failed"]

STATUS: dict[How, int] = {"finished": 0, "stopped": 75, "guard": 2, "mistake": 2, "failed": 1}
"""Exit statuses. 75 is EX_TEMPFAIL of sysexits.h: the same command goes on."""

_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
"""torchrun's word to a rank: how often its agent has started ranks again."""


@dataclass(frozen=True)
class Ended:
    """The end of a start.

    Attributes:
        step: the last one that the run has done; None: the start had not come so far as to know.
        why: in one line; None for what finished.
        rank: whose error it was; None where it was all ranks' or nobody's.
        start: its name; None where the launcher gave none.
    """

    how: How
    step: int | None = None
    why: str | None = None
    rank: int | None = None
    start: str | None = None


class Recorder:
    """What this process knows of the start that it is part of.

    Attributes:
        folder: the run's, once it is known to be one; nothing is recorded before.
        step: the last one that the run has done, once it is known.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self.folder: Path | None = None
        self.step: int | None = None
        self._start = environment.get(START)

    def record(self, how: How, why: str | None = None, rank: int | None = None) -> None:
        """Leave the record of the start's end; a disk that does not take it changes nothing."""
        if self.folder is not None:
            ended = Ended(how, self.step, why, rank, self._start)
            with suppress(OSError):
                write_atomic(self.folder / ENDED, json.dumps(asdict(ended)) + "\n")


def how_of(error: BaseException) -> How:
    """How a process ends with an error; what may pass is no mistake, since that is final."""
    if not isinstance(error, UserError) or isinstance(error, Trouble):
        return "failed"
    return "guard" if error.guard else "mistake"


def read_ended(folder: Path, start: str | None) -> Ended | None:
    """How a start of a run ended; None: it is at work, ended without a word, or was another."""
    ended = last_ended(folder)
    return ended if ended is not None and ended.start in (start, None) else None


def last_ended(folder: Path) -> Ended | None:
    """How the last start of a run ended, whichever it was; None: there is no record of it."""
    try:
        ended = Ended(**json.loads((folder / ENDED).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return ended if ended.how in get_args(How) else None


def leave_wish(folder: Path, start: str) -> None:
    """Remember that a start was asked to stop, for ranks that are started again after that."""
    with suppress(OSError):  # A full disk: those that are there hear of it all the same.
        write_atomic(folder / ASKED, start)


def may_be_over(environment: Mapping[str, str]) -> bool:
    """Whether this may be a rank that torchrun has started again.

    Of several agents each counts by itself, and not those times at which another one began.
    """
    return START in environment or _restarts(environment) > 0


def is_over(folder: Path, environment: Mapping[str, str]) -> bool:
    """Whether ranks that torchrun has started again have nothing left to do.

    It takes every status but 0 for a failure, also that of a mistake, which would only be repeated,
    and that of a rank which failed after all were asked to stop.
    Where there is something left, the record of the failure is removed.
    """
    start = environment.get(START)
    ended = read_ended(folder, start)
    again = _restarts(environment) > 0
    failed = ended is not None and ended.how == "failed"
    if (failed or again) and start is not None and _was_asked(folder, start):
        return True
    if failed and again:
        (folder / ENDED).unlink(missing_ok=True)
    return ended is not None and not failed


def _was_asked(folder: Path, start: str) -> bool:
    try:
        return (folder / ASKED).read_text() == start
    except OSError:
        return False


def _restarts(environment: Mapping[str, str]) -> int:
    return int(environment.get(_RESTARTS, 0))
