"""One writer for a folder: a second is refused, and a killed one leaves nothing locked."""

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rlt_dist.util.errors import UserError

LOCK = ".lock"


@contextmanager
def locked(folder: Path, doing: str) -> Iterator[None]:
    """Hold a folder for oneself; the operating system lets go when the process ends.

    Args:
        folder: is made if it is not there.
        doing: what others read that this process does, such as "trains".

    Raises:
        UserError: another process holds it; the message names that process.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise UserError(
                f"{folder}: {file.read().strip() or 'another process'}; wait for it, or give "
                "another folder"
            ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()} {doing} here")
        file.flush()
        yield
