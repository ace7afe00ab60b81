"""What a process says: on the screen what concerns a person, and everything in its rank's file.

RUN/logs/rank-00003.log, in which every line says when, and who:

    2026-11-30 02:51:41 rank 3 n2 cuda:1 WARNING metrics cannot be written ...
"""

import logging
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

LOGS = "logs"
"""In the run folder: a file a rank, longer with every start."""

_LOG = logging.getLogger("rlt_dist")


class _Screen(logging.Handler):
    """Standard error, whatever that is at the moment: a progress bar takes its place."""

    who = ""

    def emit(self, record: logging.LogRecord) -> None:
        if hasattr(record, "unseen"):
            return
        kind = "error: " if record.levelno >= logging.ERROR else self.who
        text = "".join(f"rlt-dist: {kind}{line}\n" for line in record.getMessage().splitlines())
        # A trace has its rank in every line already, or comes from no rank.
        with suppress(OSError):
            sys.stderr.write(getattr(record, "trace", "") or text)
            sys.stderr.flush()


class _File(logging.Handler):
    """A rank's file. Lines are few: it is opened for each, and a disk may be full meanwhile."""

    def __init__(self, rank: int, who: str) -> None:
        super().__init__()
        self._rank, self._who = rank, who
        self._path: Path | None = None
        self._early: list[str] = []

    def keep_in(self, run_folder: Path) -> None:
        """From now on; what was said before comes first."""
        self._path = file_of(run_folder, self._rank)
        with suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
        self._write("".join(self._early))
        self._early.clear()

    def emit(self, record: logging.LogRecord) -> None:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        text = getattr(record, "trace", "") or record.getMessage()
        start = f"{when} {self._who} {record.levelname} "
        self._write("".join(f"{start}{line}\n" for line in text.splitlines()))

    def _write(self, lines: str) -> None:
        if self._path is None:
            self._early.append(lines)
            return
        with suppress(OSError), self._path.open("a") as file:
            file.write(lines)


_LOG.propagate = False
_LOG.setLevel(logging.INFO)
_SCREEN = _Screen(logging.WARNING)
_LOG.addHandler(_SCREEN)


def file_of(run_folder: Path, rank: int) -> Path:
    """What a rank says is kept there."""
    return run_folder / LOGS / f"rank-{rank:05}.log"


def be_rank(rank: int, size: int, where: str) -> None:
    """Say who speaks from now on; what is said is kept until it is known in which folder.

    Args:
        where: host and device.
    """
    for handler in _files():
        _LOG.removeHandler(handler)
    _LOG.addHandler(_File(rank, f"rank {rank} {where}"))
    note(f"rank {rank} of {size}, process {os.getpid()}")
    _SCREEN.who = f"rank {rank} ({where}): " if size > 1 else ""


def keep_in(run_folder: Path) -> None:
    """Keep what this process says in its file in a run's folder."""
    for handler in _files():
        handler.keep_in(run_folder)


def note(text: str) -> None:
    """For the file only."""
    _LOG.info("%s", text)


def warn(text: str) -> None:
    """Something that a person should know."""
    _LOG.warning("%s", text)


def show_error(text: str, trace: str = "") -> None:
    """Why the process ends, the way all commands show it; a trace, if there is one, instead."""
    _LOG.error("%s", text, extra={"trace": trace})


def keep_error(text: str) -> None:
    """The same for the file only: Python shows it."""
    _LOG.error("%s", text, extra={"unseen": True})


def _files() -> list[_File]:
    return [handler for handler in _LOG.handlers if isinstance(handler, _File)]
