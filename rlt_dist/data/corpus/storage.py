"""Where a corpus lies. Everything above sees files on this machine."""

import errno
import os
from collections.abc import Collection
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Protocol

from rlt_dist.util.errors import Trouble, UserError

REPAIR = "restore it, or prepare the corpus again with --overwrite"


class BadShard(UserError):
    """A shard is missing, damaged or replaced: trying again would not help."""


_PASSING = (
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN),
    *(errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN, errno.EHOSTUNREACH),
)
"""Errors of this machine or of the way to a shared file system, not of a file."""

File = tuple[str, int, str]
"""Name, size in bytes and SHA-256 of a file as the index lists it."""

_OPENINGS = 20


class Storage(Protocol):
    """A folder of files that do not change."""

    @property
    def location(self) -> str:
        """Path or address, for messages."""

    def address(self, name: str) -> str:
        """Path or address of a file in it, for messages."""

    def read(self, name: str) -> bytes:
        """A small file's content.

        Raises:
            UserError: it is missing or cannot be read.
        """

    def fetch(self, name: str, size: int, sha256: str) -> Path:
        """A path on this machine under which a file can be opened now.

        Args:
            size: the bytes it must hold.
            sha256: what it must hash to; a storage that copies a file checks its copy.

        Raises:
            BadShard: it is missing, or of another size or content.
            FileNotFoundError: its copy was removed as it came; it can be fetched again.
            UserError: it cannot be read.
        """

    def prefetch(self, name: str, size: int, sha256: str) -> None:
        """Begin to fetch a file that will be wanted; an error shows when it is fetched."""

    def check(self, name: str, size: int) -> None:
        """See that a file is there and of the right size, without reading it.

        Raises:
            BadShard: it is not.
        """

    def check_all(self, files: Collection[File]) -> dict[str, str]:
        """See that many files are there and of the right size; gives what is wrong, by name.

        Raises:
            UserError: the place itself cannot be looked into.
        """

    def discard(self, sha256: str) -> str:
        """Forget a copy that turned out damaged; gives the advice that ends the message."""


@dataclass(frozen=True)
class RemoteOptions:
    """How files are brought from another machine.

    Attributes:
        cache: folder for their copies; None: rlt_dist/shards in the user's cache folder.
        cache_limit: bytes that the copies may take, except what is read right now; None: any.
        attempts: how often a transfer is tried before that is an error.
        timeout: seconds without a byte after which an attempt has failed.
        first_wait: seconds before the second attempt; each further wait is twice as long.
    """

    cache: Path | None = None
    cache_limit: int | None = 64 << 30
    attempts: int = 6
    timeout: float = 30.0
    first_wait: float = 1.0


DEFAULT_OPTIONS = RemoteOptions()


class LocalFolder:
    """A folder on this machine or on a file system that it shares."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def location(self) -> str:
        """The folder's path."""
        return str(self.folder)

    def address(self, name: str) -> str:
        """The file's path."""
        return str(self.folder / name)

    def read(self, name: str) -> bytes:
        """A small file's content."""
        path = self.folder / name
        if not path.is_file():
            raise UserError(f"{path}: no such file; make the corpus with `rlt-dist data prepare`")
        try:
            return path.read_bytes()
        except OSError as error:
            raise _unreadable(path, error) from None

    def fetch(self, name: str, size: int, sha256: str) -> Path:  # noqa: ARG002
        """The file itself; its content is checked where it is read."""
        self.check(name, size)
        return self.folder / name

    def prefetch(self, name: str, size: int, sha256: str) -> None:
        """Nothing: it is here."""

    def check(self, name: str, size: int) -> None:
        """See that the file is there and of the right size."""
        path = self.folder / name
        try:
            actual = path.stat().st_size if path.is_file() else None
        except OSError as error:
            raise _unreadable(path, error) from None
        if problem := size_problem(str(path), actual, size):
            raise BadShard(problem)

    def check_all(self, files: Collection[File]) -> dict[str, str]:
        """See to every file; the folder is listed once, which file systems are quick at."""
        try:
            with os.scandir(self.folder) as entries:
                sizes = {entry.name: entry.stat().st_size for entry in entries if entry.is_file()}
        except OSError as error:
            raise _unreadable(self.folder, error) from None
        problems = {
            name: size_problem(self.address(name), sizes.get(name), size) for name, size, _ in files
        }
        return {name: problem for name, problem in problems.items() if problem}

    def discard(self, sha256: str) -> str:  # noqa: ARG002
        """Nothing is copied; only a person can restore the file."""
        return REPAIR


def open_file(storage: Storage, name: str, size: int, sha256: str) -> FileIO:
    """A file of a storage, open to be read without a buffer.

    Raises:
        UserError: as `Storage.fetch` does.
        OSError: it cannot be opened.
    """
    for _ in range(_OPENINGS):
        try:
            return storage.fetch(name, size, sha256).open("rb", buffering=0)
        except FileNotFoundError:
            continue  # The cache gave it up in between, for room, or somebody emptied it.
    raise UserError(
        f"{storage.address(name)}: is given up by the cache again and again before it can be "
        f"opened; allow the cache more room"
    )


def size_problem(address: str, actual: int | None, size: int) -> str | None:
    """What is wrong with a file of `actual` bytes (None: it is missing), if anything is."""
    if actual is None:
        return f"{address}: this shard file is missing; {REPAIR}"
    if actual != size:
        return f"{address}: holds {actual} bytes where the index says {size}; {REPAIR}"
    return None


def bad_shard(address: str, error: OSError) -> UserError:
    """What it means that a shard's file cannot be read: `BadShard`, unless that may pass."""
    what = f"{address}: cannot be read ({error.strerror})"
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return Trouble(f"{what}; allow more open files with `ulimit -n`, or take fewer lanes")
    if error.errno in _PASSING:
        return Trouble(f"{what}; the shard itself may be whole: start again")
    return BadShard(f"{what}; {REPAIR}")


def _unreadable(path: Path, error: OSError) -> UserError:
    kind = Trouble if error.errno in _PASSING else UserError
    return kind(f"{path}: cannot be read ({error.strerror}); make it readable")
