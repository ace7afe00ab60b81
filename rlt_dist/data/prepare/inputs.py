"""The files behind the inputs: found, put in order, and held to what they were when found."""

import io
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Literal

from rlt_dist.util.errors import UserError

_LONGEST = (4, 1 << 30)
"""Bounds of `longest`: a character of UTF-8 fits, and one read gives it whole."""


@dataclass(frozen=True)
class InputOptions:
    """How documents are found and read.

    Attributes:
        pattern: files below a folder that are taken (a shell pattern on the file's name, or on its
            path below the folder if it holds a slash). Files named directly are always taken.
        exclude: patterns of files or folders that are left out, matched likewise.
        text_field: the field of a JSON line, or the column of a Parquet file, that holds the text.
        separator: what separates the documents inside a text file; None: a file is one document.
        allow_binary: take files that look binary.
        require_utf8: refuse text that is not UTF-8.
        longest: bytes of a document; a longer one is stored as several.
        format: what a JSON line holds: a text in `text_field`, or a conversation (chat.py).
    """

    pattern: str = "*"
    exclude: tuple[str, ...] = ()
    text_field: str = "text"
    separator: str | None = None
    allow_binary: bool = False
    require_utf8: bool = False
    longest: int = 16 << 20
    format: Literal["text", "chat"] = "text"


@dataclass(frozen=True)
class InputFile:
    """One file to read. `name` does not depend on where the inputs lie on this machine."""

    path: Path
    name: str
    size: int
    modified_ns: int


@dataclass(frozen=True)
class Listing:
    """All files to read, in order, and how many hidden files and linked folders are left out."""

    files: tuple[InputFile, ...]
    hidden: int
    linked: int

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(file.size for file in self.files)


def list_inputs(inputs: Sequence[Path], options: InputOptions) -> Listing:
    """Find the files behind `inputs`: a file itself, a folder's files in sorted order.

    Raises:
        UserError: an input is missing or unreadable, is given twice, or holds nothing to read; the
            separator is empty, or `longest` is out of bounds.
    """
    _check(options)
    files: list[InputFile] = []
    hidden = linked = 0
    for path in inputs:
        if path.is_dir():
            found, skipped = _list_folder(path, options)
            files += found
            hidden += skipped
            linked += _count_linked_folders(path, options)
        else:
            files.append(describe(path, path.name))
    if not files:
        raise UserError("no input is given; name at least one file or folder")
    _refuse_repeats(files)
    return Listing(tuple(files), hidden, linked)


def _check(options: InputOptions) -> None:
    if options.separator == "":
        raise UserError("the separator is empty; give the text that stands between documents")
    least, most = _LONGEST
    if not least <= options.longest <= most:
        raise UserError(
            f"the longest document is {options.longest} bytes; it must be from {least} to {most}"
        )


def describe(path: Path, name: str) -> InputFile:
    """A file as it is now.

    Raises:
        UserError: it is missing, unreadable or not a regular file.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file or folder; check the path of this input") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: is not a regular file; leave it out with --exclude")
    return InputFile(path, name, status.st_size, status.st_mtime_ns)


@contextmanager
def opened(file: InputFile) -> Iterator[io.FileIO]:
    """Open a file for reading, unbuffered, if it is still what it was when it was listed.

    Raises:
        UserError: it cannot be read, or has changed before or while it was open.
    """
    try:
        with open(file.path, "rb", buffering=0) as handle:
            _refuse_change(file, handle)
            yield handle
            _refuse_change(file, handle)
    except OSError as error:
        raise _unreadable(file.path, error) from error


def _refuse_change(file: InputFile, handle: io.FileIO) -> None:
    status = os.fstat(handle.fileno())
    if (status.st_size, status.st_mtime_ns) != (file.size, file.modified_ns):
        raise UserError(f"{file.path}: has changed while it was read; let it rest and start again")


def _list_folder(folder: Path, options: InputOptions) -> tuple[list[InputFile], int]:
    """A folder's matching files, sorted by their path below it, and the hidden ones' number."""
    matching = [path for path in _walk(folder) if _is_wanted(path, options)]
    visible = [path for path in matching if not _is_hidden(path)]
    if not visible:
        raise UserError(
            f"{folder}: holds no file that matches --pattern {options.pattern!r} and is neither "
            f"hidden nor excluded; give another folder or pattern"
        )
    visible.sort()
    top = folder.resolve().name
    files = [describe(folder / path, f"{top}/{path}") for path in visible]
    return files, len(matching) - len(visible)


def _walk(folder: Path) -> Iterator[str]:
    """Paths below `folder` of all that is not a folder; links to folders are not followed."""
    for below, _, names in _folders(folder):
        yield from (below + name for name in names)


def _count_linked_folders(folder: Path, options: InputOptions) -> int:
    """The number of links to folders that are neither hidden nor excluded."""
    return sum(
        (folder / below / name).is_symlink()
        for below, names, _ in _folders(folder)
        for name in names
        if not _is_hidden(below + name) and not _is_excluded(below + name, options)
    )


def _folders(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """What stands before the names in every folder below `folder`, "" or as in "a/b/"; its
    folders (linked ones too) and its other files."""

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error) from error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        yield "".join(f"{part}/" for part in Path(parent).relative_to(folder).parts), folders, names


def _is_wanted(path: str, options: InputOptions) -> bool:
    return _matches(path, options.pattern) and not _is_excluded(path, options)


def _is_excluded(path: str, options: InputOptions) -> bool:
    return any(
        _matches(part, pattern) for pattern in options.exclude for part in _with_parents(path)
    )


def _with_parents(path: str) -> Iterator[str]:
    while path:
        yield path
        path = path.rpartition("/")[0]


def _matches(path: str, pattern: str) -> bool:
    return fnmatchcase(path if "/" in pattern else path.rpartition("/")[2], pattern)


def _is_hidden(path: str) -> bool:
    return path.startswith(".") or "/." in path


def _refuse_repeats(files: list[InputFile]) -> None:
    seen: set[Path] = set()
    for file in files:
        path = file.path.absolute()
        if path in seen:
            raise UserError(f"{file.path}: is given twice; name every input once")
        seen.add(path)


def _unreadable(path: Path, error: OSError) -> UserError:
    reason = error.strerror or str(error)
    return UserError(f"{path}: cannot be read ({reason}); make it readable or leave it out")
