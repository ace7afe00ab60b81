"""Files that are either whole or absent."""

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import NamedTemporaryFile

from rlt_dist.util.errors import FULL, Trouble, UserError

_BLOCK = 1 << 20


def fsync_folder(folder: Path) -> None:
    """Flush a folder's entries to disk, so that a rename inside it survives a power cut."""
    _fsync(folder)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Let an error of the disk name a file: one that is opened does so, one that is written not."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Give a temporary path beside `path`; on a clean exit flush it and rename it to `path`.

    On an exception the temporary file is removed and `path` keeps whatever it held before.
    """
    temporary = path.with_name(f".{path.name}.partial")
    try:
        with named(path):
            yield temporary
        with temporary.open("rb") as handle:
            os.fsync(handle.fileno())
        os.replace(temporary, path)
        fsync_folder(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_atomic(path: Path, content: bytes | str) -> None:
    """Write a whole file or nothing. Text is written as UTF-8."""
    data = content.encode() if isinstance(content, str) else content
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def check_writable(path: Path) -> None:
    """Check that a file can be written whole: one is made beside it, and removed.

    Raises:
        UserError: it is a folder or the like, or no file can be made there.
        Trouble: the disk is full.
    """
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not os.path.isfile(target):  # also links in a circle
        raise UserError(f"{path}: is no file; give the path of a file")
    try:
        # Its name is as long as that of `atomic_path`, and nobody else's.
        with NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}."):
            pass
    except OSError as error:
        kind = Trouble if error.errno in FULL else UserError
        raise kind(
            f"{path}: cannot be written ({error.strerror}); give a file in a folder that is there "
            "and has room, and that you may write to"
        ) from None


def commit_folder(partial: Path, final: Path) -> None:
    """Rename a finished folder into place: its entries are flushed first, its parent after."""
    fsync_folder(partial)
    os.rename(partial, final)
    fsync_folder(final.parent)


def make_folder(folder: Path) -> None:
    """Make a folder and those above it; one that is there is fine.

    Raises:
        UserError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        why = "is a file" if folder.is_file() else error.strerror
        raise UserError(f"{folder}: {why}; give a folder that can be written") from None


def check_vacant(folder: Path) -> None:
    """Check that a folder may be written as a whole: it is not there, or there is nothing in it.

    Raises:
        UserError: it holds something, which would be lost, or is a file.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder}: is a file; give a new or empty folder")
    held = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    if held:
        raise UserError(f"{folder}: holds {held[0]}; give a new or empty folder")


@contextmanager
def atomic_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder beside `folder`; on a clean exit flush all of it and rename it.

    On an exception the temporary folder is removed. `folder` is not there, or empty.

    Raises:
        UserError: it holds something.
    """
    folder = folder.resolve()
    check_vacant(folder)
    partial = folder.with_name(f".{folder.name}.partial")
    remove_folder(partial)
    partial.mkdir(parents=True)
    try:
        yield partial
        for path in partial.rglob("*"):
            _fsync(path)
        commit_folder(partial, folder)
    except BaseException:
        remove_folder(partial)
        raise


def sha256_file(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as handle:
        while block := handle.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def remove_folder(folder: Path) -> None:
    """Remove a folder and all in it, or a file of that name; a missing one is fine."""
    if folder.is_dir() and not folder.is_symlink():
        shutil.rmtree(folder)
    else:
        folder.unlink(missing_ok=True)
