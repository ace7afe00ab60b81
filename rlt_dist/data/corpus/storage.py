"""Where a corpus lies. Everything above sees files on this machine."""

from pathlib import Path
from typing import Protocol

from rlt_dist.util.errors import UserError

REPAIR = "restore it, or prepare the corpus again with --overwrite"


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
            UserError: it is missing, of another size or content, or cannot be read.
        """

    def check(self, name: str, size: int) -> None:
        """See that a file is there and of the right size, without reading it.

        Raises:
            UserError: it is not.
        """


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

    def check(self, name: str, size: int) -> None:
        """See that the file is there and of the right size."""
        path = self.folder / name
        try:
            actual = path.stat().st_size if path.is_file() else None
        except OSError as error:
            raise _unreadable(path, error) from None
        if actual is None:
            raise UserError(f"{path}: this shard file is missing; {REPAIR}")
        if actual != size:
            raise UserError(f"{path}: holds {actual} bytes where the index says {size}; {REPAIR}")


def open_storage(location: str | Path) -> Storage:
    """The folder at a path."""
    return LocalFolder(Path(location))


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be read ({error.strerror}); make it readable")
