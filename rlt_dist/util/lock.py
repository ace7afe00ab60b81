"""One writer for a folder: a second is refused, and a killed one leaves nothing locked."""

import fcntl
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from rlt_dist.util.errors import Trouble

LOCK = ".lock"
_TRIES, _PAUSE = 10, 0.02
"""A look at who holds a folder (`holder`) holds it, too, for less than a pause in seconds."""


@contextmanager
def locked(folder: Path, doing: str, name: str = LOCK) -> Iterator[None]:
    """Hold a folder for oneself; the operating system lets go when the process ends.

    Args:
        folder: is made if it is not there.
        doing: what others read that this process does, such as "trains".
        name: the lock's file; under another one a part of the folder is held.

    Raises:
        Trouble: another process holds it; the message names that process.
    """
    with _open_own(folder / name) as file:
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} {doing} here")
        file.flush()
        yield


@contextmanager
def _open_own(path: Path) -> Iterator[TextIO]:
    """The locked file that is called so; whoever holds it may remove it."""
    while True:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a+") as file:
            if not _takes(file):
                file.seek(0)
                here = file.read().strip() or "another process"
                raise Trouble(f"{path.parent}: {here}; wait for it, or give another folder")
            if _is_at(file, path):
                yield file
                return


def _is_at(file: TextIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def holder(folder: Path) -> str | None:
    """Who holds a folder, as `locked` says it; None: nobody."""
    path = folder / LOCK
    if not path.is_file():
        return None
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().strip() or "another process"
    return None


def _takes(file: TextIO) -> bool:
    for attempt in range(_TRIES):
        time.sleep(_PAUSE * (attempt > 0))
        with suppress(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
    return False
