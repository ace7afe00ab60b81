"""Documents out of inputs: folders, plain files, JSON lines, files cut at a separator.

Two steps: `list_inputs` finds the files and fixes their order, `read_documents` streams the
documents out of them in that order. Text is bytes and is never decoded, except where JSON demands
it; at most one document (and one block of a file) is in memory.
"""

import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from rlt_dist.util.errors import UserError

JSON_LINES = (".jsonl", ".ndjson")
_BLOCK = 1 << 20
_BINARY_PROBE = 8 << 10


@dataclass(frozen=True)
class SourceOptions:
    """How documents are found and read.

    Attributes:
        pattern: files below a folder that are taken (a shell pattern on the file's name, or on its
            path below the folder if it holds a slash). Files named directly are always taken.
        exclude: patterns of files or folders that are left out, matched likewise.
        text_field: the field of a JSON line that holds the text.
        separator: what separates the documents inside a file; None: a file is one document.
        allow_binary: take files that look binary.
    """

    pattern: str = "*"
    exclude: tuple[str, ...] = ()
    text_field: str = "text"
    separator: str | None = None
    allow_binary: bool = False


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


@dataclass(frozen=True)
class Document:
    """One document: its exact bytes, and where they came from (`file`, `file:line`, `file#n`)."""

    source: str
    text: bytes


@dataclass
class Tally:
    """What `read_documents` has gone through so far."""

    bytes_read: int = 0
    empty_documents: int = 0


def list_inputs(inputs: Sequence[Path], options: SourceOptions) -> Listing:
    """Find the files behind `inputs`: a file itself, a folder's files in sorted order.

    Raises:
        UserError: an input is missing or unreadable, is given twice, or holds nothing to read.
    """
    files: list[InputFile] = []
    hidden = linked = 0
    for path in inputs:
        if path.is_dir():
            found, skipped = _list_folder(path, options)
            files += found
            hidden += skipped
            linked += _count_linked_folders(path, options)
        else:
            files.append(_describe(path, path.name))
    if not files:
        raise UserError("no input is given; name at least one file or folder")
    _refuse_repeats(files)
    return Listing(tuple(files), hidden, linked)


def read_documents(listing: Listing, options: SourceOptions, tally: Tally) -> Iterator[Document]:
    """Stream the documents that hold text, in the listing's order; empty ones are counted.

    Raises:
        UserError: a file cannot be read, has changed since it was listed, looks binary, or holds a
            line that is not a JSON object with the text field.
    """
    for file in listing.files:
        try:
            for document in _documents_of(file, options, tally):
                if document.text:
                    yield document
                else:
                    tally.empty_documents += 1
        except OSError as error:
            raise _unreadable(file.path, error) from error


def _list_folder(folder: Path, options: SourceOptions) -> tuple[list[InputFile], int]:
    """A folder's matching files, sorted by their path below it, and the hidden ones' number."""
    matching = [path for path in _walk(folder) if _is_wanted(path, options)]
    visible = [path for path in matching if not _is_hidden(path)]
    if not visible:
        raise UserError(
            f"{folder}: holds no file that matches --pattern {options.pattern!r} and is neither "
            f"hidden nor excluded; give another folder or pattern"
        )
    visible.sort(key=str)
    top = folder.resolve().name
    files = [_describe(folder / path, f"{top}/{path}") for path in visible]
    return files, len(matching) - len(visible)


def _walk(folder: Path) -> Iterator[PurePosixPath]:
    """Paths below `folder` of all that is not a folder; links to folders are not followed."""
    for below, _, names in _folders(folder):
        yield from (below / name for name in names)


def _count_linked_folders(folder: Path, options: SourceOptions) -> int:
    """The number of links to folders that are neither hidden nor excluded."""
    return sum(
        (folder / below / name).is_symlink()
        for below, names, _ in _folders(folder)
        for name in names
        if not _is_hidden(below / name) and not _is_excluded(below / name, options)
    )


def _folders(folder: Path) -> Iterator[tuple[PurePosixPath, list[str], list[str]]]:
    """Every folder's path below `folder`, its folders (linked ones too) and its other files."""

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error) from error

    for parent, folders, names in os.walk(folder, onerror=refuse):
        yield PurePosixPath(Path(parent).relative_to(folder).as_posix()), folders, names


def _is_wanted(path: PurePosixPath, options: SourceOptions) -> bool:
    return _matches(path, options.pattern) and not _is_excluded(path, options)


def _is_excluded(path: PurePosixPath, options: SourceOptions) -> bool:
    parts = [path, *path.parents[:-1]]
    return any(_matches(part, pattern) for pattern in options.exclude for part in parts)


def _matches(path: PurePosixPath, pattern: str) -> bool:
    return fnmatchcase(str(path) if "/" in pattern else path.name, pattern)


def _is_hidden(path: PurePosixPath) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _describe(path: Path, name: str) -> InputFile:
    try:
        status = path.stat()
    except FileNotFoundError:
        raise UserError(f"{path}: no such file or folder; check the path of this input") from None
    except OSError as error:
        raise _unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise UserError(f"{path}: is not a regular file; leave it out with --exclude")
    return InputFile(path, name, status.st_size, status.st_mtime_ns)


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


def _documents_of(file: InputFile, options: SourceOptions, tally: Tally) -> Iterator[Document]:
    """All documents of one file, empty ones too."""
    with file.path.open("rb") as handle:
        _check_file(file, handle, options)
        if file.path.suffix.lower() in JSON_LINES:
            yield from _json_lines(file, handle, options.text_field, tally)
        elif options.separator is not None:
            blocks = _blocks(handle, tally)
            for number, text in enumerate(split_stream(blocks, options.separator.encode()), 1):
                yield Document(f"{file.name}#{number}", text)
        else:
            text = handle.read()
            tally.bytes_read += len(text)
            yield Document(file.name, text)


def _check_file(file: InputFile, handle: BinaryIO, options: SourceOptions) -> None:
    status = os.fstat(handle.fileno())
    if (status.st_size, status.st_mtime_ns) != (file.size, file.modified_ns):
        raise UserError(f"{file.path}: has changed while it was read; let it rest and start again")
    probe = handle.read(_BINARY_PROBE)
    handle.seek(0)
    if b"\0" in probe and not options.allow_binary:
        raise UserError(
            f"{file.path}: looks binary (it holds NUL bytes); leave it out with --exclude, "
            f"or take it as it is with --allow-binary"
        )


def _json_lines(file: InputFile, handle: BinaryIO, field: str, tally: Tally) -> Iterator[Document]:
    for number, line in enumerate(handle, 1):
        tally.bytes_read += len(line)
        name = f"{file.name}:{number}"
        text = _text_of_line(line, f"{file.path}:{number}", field) if line.strip() else b""
        yield Document(name, text)


def _text_of_line(line: bytes, where: str, field: str) -> bytes:
    """The text field of one JSON line, as UTF-8."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:  # its own words would count lines within this one
        at = f"{error.msg} at column {error.pos + 1}"
        raise UserError(f"{where}: is not valid JSON ({at}); correct this line") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where}: is not valid JSON ({error}); correct this line") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: is not a JSON object; write one object with a text a line")
    if field not in record:
        known = ", ".join(map(repr, record)) or "none"
        raise UserError(f"{where}: has no field {field!r}; name one with --text-field ({known})")
    text = record[field]
    if not isinstance(text, str):
        raise UserError(f"{where}: field {field!r} is not a string; correct this line")
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: field {field!r} holds half a character; correct it") from None


def _blocks(handle: BinaryIO, tally: Tally) -> Iterator[bytes]:
    while block := handle.read(_BLOCK):
        tally.bytes_read += len(block)
        yield block


def split_stream(blocks: Iterator[bytes], separator: bytes) -> Iterator[bytes]:
    """`bytes.split` over a stream: only the piece that is not finished yet is kept in memory."""
    rest = bytearray()
    searched = 0
    for block in blocks:
        rest += block
        start = 0
        while (found := rest.find(separator, max(start, searched))) >= 0:
            yield bytes(rest[start:found])
            start = found + len(separator)
        del rest[:start]
        # A separator may straddle two blocks: its first bytes are searched again.
        searched = max(0, len(rest) - len(separator) + 1)
    yield bytes(rest)
