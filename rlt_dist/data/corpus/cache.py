"""Copies of remote files on this machine, shared by all its processes.

A copy's name is the SHA-256 of its content, so it is right for every corpus and never changes. What
is on its way lies beside it as `SHA256.partial`, locked by the one process that brings it; a lock
ends with its process, and what a killed one left is written over or removed. A copy's time of
change is the time of its last use.
"""

import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rlt_dist.util.errors import Trouble

_FULL = (errno.ENOSPC, errno.EDQUOT)
_PARTIAL = ".partial"

Write = Callable[[bytes, int], None]
"""Writes bytes at a place."""

_held: set[int] = set()
"""Descriptors of this process's locks. A lock would live on in a child that was forked."""


def _forget_locks() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_locks)


class Cache:
    """A folder of copies."""

    def __init__(self, folder: Path, limit: int | None) -> None:
        """No file is touched yet.

        Args:
            limit: bytes that the copies may take together; one that is larger is kept alone.
        """
        self._folder = folder
        self._limit = limit

    def path(self, sha256: str) -> Path:
        """Where a copy lies if it is there."""
        return self._folder / sha256

    def holds(self, sha256: str, size: int) -> bool:
        """Whether there is a copy."""
        try:
            return self.path(sha256).stat().st_size == size
        except OSError:
            return False

    def use(self, sha256: str, size: int) -> bool:
        """Whether there is a copy; it then counts as used now."""
        found = self.holds(sha256, size)
        if found:
            with suppress(OSError):  # Another person's cache can be read all the same.
                os.utime(self.path(sha256))
        return found

    @contextmanager
    def adding(self, sha256: str, size: int) -> Iterator[Write | None]:
        """Bring a copy: the caller writes all of its bytes, in any order, and checks them.

        Waits while another process or thread brings the same; None if it is there then. The copy
        is kept on a clean exit, on any other nothing is left.

        Raises:
            FileNotFoundError: somebody removed the folder meanwhile; the caller tries again.
            Trouble: the disk is full, or the folder cannot be written.
        """
        self._make_folder()
        partial = self._folder / f"{sha256}{_PARTIAL}"
        try:
            with self._claimed(partial) as descriptor:
                if self.use(sha256, size):
                    partial.unlink()
                    yield None
                    return
                try:
                    self._reserve(descriptor, size)
                    yield lambda piece, place: self._write(descriptor, piece, place)
                    os.fsync(descriptor)
                except BaseException:
                    partial.unlink(missing_ok=True)
                    raise
                os.replace(partial, self.path(sha256))
            # Others may have brought theirs at the same time, each with room for itself alone.
            self._make_room(0, besides=sha256)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise self._trouble(error) from error

    def drop(self, sha256: str) -> None:
        """Remove a copy; whoever has it open reads on."""
        with suppress(OSError):
            self.path(sha256).unlink()

    def _make_folder(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise self._trouble(error) from error

    @contextmanager
    def _claimed(self, partial: Path) -> Iterator[int]:
        """A locked descriptor of the file that is called `partial` now."""
        while True:
            descriptor = os.open(partial, os.O_RDWR | os.O_CREAT, 0o644)
            _held.add(descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX)
                if _is_at(descriptor, partial):
                    yield descriptor
                    return
            finally:
                # Let go by name too, lest a child that was forked as it was opened holds on to it.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                _held.discard(descriptor)
                os.close(descriptor)

    def _reserve(self, descriptor: int, size: int) -> None:
        """Take `size` bytes of the disk now, that it may be full before they come, not after."""
        self._make_room(size)
        os.ftruncate(descriptor, 0)
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in _FULL:
                raise
            self._make_room(size, at_least=size)
            os.posix_fallocate(descriptor, 0, size)

    def _write(self, descriptor: int, piece: bytes, place: int) -> None:
        left = memoryview(piece)
        try:
            while left:
                written = os.pwrite(descriptor, left, place)
                left, place = left[written:], place + written
        except OSError as error:
            raise self._trouble(error) from error

    def _make_room(self, size: int, at_least: int = 0, besides: str | None = None) -> None:
        """Remove the copies that are longest unused, until `size` more bytes keep the limit.

        Args:
            at_least: bytes to remove even so, if there are as many.
            besides: the SHA-256 of a copy that stays.
        """
        copies, held = [], 0
        with os.scandir(self._folder) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    about = entry.stat()
                    if not entry.name.endswith(_PARTIAL):
                        copies.append((about.st_mtime_ns, about.st_size, entry.name))
                        held += about.st_size
                    elif not _remove_if_dead(Path(entry.path)):
                        held += about.st_size
        surplus = at_least if self._limit is None else max(held + size - self._limit, at_least)
        for _, freed, name in sorted(copies):
            if surplus <= 0:
                break
            if name != besides:
                self.drop(name)
                surplus -= freed

    def _trouble(self, error: OSError) -> Trouble:
        if error.errno in _FULL:
            return Trouble(
                f"{self._folder}: the disk is full; make room, choose another cache folder, or "
                f"allow the cache less than is free there"
            )
        return Trouble(
            f"{self._folder}: cannot be written ({error.strerror}); choose another cache folder"
        )


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of that name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _remove_if_dead(partial: Path) -> bool:
    """Remove what a killed process left; False if it is on its way."""
    descriptor = os.open(partial, os.O_RDWR)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(descriptor, partial):
            partial.unlink()
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True
