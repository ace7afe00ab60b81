"""What is inside an input file: plain or compressed text, JSON lines, Parquet.

The suffixes say what a file is: `.gz`, `.xz` or `.zst` may follow any name, `.jsonl` and `.ndjson`
are JSON lines, `.parquet` is Parquet, everything else is text. Text is bytes and is never decoded,
except where JSON demands it.
"""

import codecs
import gzip
import lzma
import os.path
import zlib
from collections.abc import Callable, Iterable, Iterator
from io import FileIO
from typing import Any

import zstandard

from rlt_dist.data.prepare.chat import render
from rlt_dist.data.prepare.inputs import InputFile, InputOptions, opened
from rlt_dist.data.prepare.json_lines import BadLine, record_of, text_of
from rlt_dist.util.errors import UserError

_BLOCK = 1 << 18
_FRAMES_BLOCK = 1 << 12
"""Compressed bytes taken at once: to zstandard they may stand for 32,768 times as many."""
_ZSTD_WINDOW = 1 << 31
_BINARY_PROBE = 8 << 10
_LONGEST_LINE = 1 << 28
_JSON_LINES = (".jsonl", ".ndjson")
_PARQUET = ".parquet"


def is_text(file: InputFile) -> bool:
    """Whether its content is documents at once, or at the separators; else see `read_texts`."""
    return _suffixes(file)[0] not in (*_JSON_LINES, _PARQUET)


def is_json_lines(file: InputFile) -> bool:
    """Whether each line of its content is an object."""
    return _suffixes(file)[0] in _JSON_LINES


def is_seekable(file: InputFile) -> bool:
    """Whether its documents can be read where they lie."""
    return is_text(file) and not _suffixes(file)[1]


def read_blocks(file: InputFile, options: InputOptions) -> Iterator[bytes]:
    """A file's content without its compression, in blocks.

    Raises:
        UserError: it cannot be read, has changed since it was listed, is cut short or damaged,
            looks binary, or is not UTF-8 where this is required.
    """
    place = 0
    decoder = codecs.getincrementaldecoder("utf-8")() if options.require_utf8 else None
    with opened(file) as handle:
        for block in _unpacked(file, handle):
            if place < _BINARY_PROBE and not options.allow_binary:
                _refuse_binary(file, block[: _BINARY_PROBE - place])
            if decoder:
                _refuse_not_utf8(file, decoder, block, place)
            place += len(block)
            yield block
        if decoder:
            _refuse_not_utf8(file, decoder, b"", place)


def probe(file: InputFile, options: InputOptions) -> None:
    """Look at a plain text file's beginning only.

    Raises:
        UserError: it cannot be read, has changed since it was listed, or looks binary.
    """
    with opened(file) as handle:
        if not options.allow_binary:
            _refuse_binary(file, handle.read(_BINARY_PROBE))


def read_texts(file: InputFile, options: InputOptions) -> Iterator[bytes]:
    """The documents of a file of JSON lines or of a Parquet file, empty ones too.

    Raises:
        UserError: as for `read_blocks`, or a record has no text.
    """
    if _suffixes(file)[0] == _PARQUET:
        return _read_parquet(file, options)
    return _read_json_lines(file, options)


def _suffixes(file: InputFile) -> tuple[str, str]:
    """Of the content and of the compression, in lower case; empty where there is none."""
    rest, last = os.path.splitext(os.path.basename(file.path).lower())
    return (os.path.splitext(rest)[1], last) if last in _UNPACK else (last, "")


def _unpacked(file: InputFile, handle: FileIO) -> Iterator[bytes]:
    compression = _suffixes(file)[1]
    try:
        if compression and not file.size:
            raise EOFError("it is empty")
        yield from _UNPACK[compression](handle)
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError) as error:
        raise _damaged(file, error) from error


def _damaged(file: InputFile, error: Exception) -> UserError:
    what = " ".join(str(error).split())  # Arrow's words may take several lines
    return UserError(
        f"{file.path}: is damaged or cut short ({what}); fetch it again or leave it out with "
        f"--exclude"
    )


def _ungzip(handle: FileIO) -> Iterator[bytes]:
    with gzip.GzipFile(fileobj=handle) as members:
        yield from _blocks(members)


def _unxz(handle: FileIO) -> Iterator[bytes]:
    """The module's own reader leaves out all that follows a stream and does not begin another."""
    return _frames(handle, lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ), padding=b"\0")


def _unzstd(handle: FileIO) -> Iterator[bytes]:
    """The module's own reader takes a frame that is cut short for whole."""
    context = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW)
    return _frames(handle, context.decompressobj, padding=b"")


def _frames(handle: FileIO, new_frame: Callable[[], Any], padding: bytes) -> Iterator[bytes]:
    """The content of every frame of a file; bytes of `padding` may stand between them."""
    frame, whole = new_frame(), False
    while block := handle.read(_FRAMES_BLOCK):
        while block := block.lstrip(padding) if whole else block:
            yield frame.decompress(block)
            block, whole = frame.unused_data, frame.eof
            if whole:
                frame = new_frame()
    if not whole:
        raise EOFError("its last frame has no end")


def _blocks(handle: FileIO | gzip.GzipFile) -> Iterator[bytes]:
    while block := handle.read(_BLOCK):
        yield block


_UNPACK = {"": _blocks, ".gz": _ungzip, ".xz": _unxz, ".zst": _unzstd}


def _refuse_binary(file: InputFile, beginning: bytes) -> None:
    if b"\0" in beginning:
        raise UserError(
            f"{file.path}: looks binary (it holds NUL bytes); convert it to UTF-8 if it is "
            f"UTF-16, leave it out with --exclude, or take it as it is with --allow-binary"
        )


def _refuse_not_utf8(
    file: InputFile, decoder: codecs.IncrementalDecoder, block: bytes, place: int
) -> None:
    """Check the block that begins at byte `place`; an empty one is the end."""
    waiting = len(decoder.getstate()[0])  # bytes of a character that the block before began
    try:
        decoder.decode(block, final=not block)
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{file.path}: byte {place - waiting + error.start}") from None


def _not_utf8(where: str) -> UserError:
    return UserError(
        f"{where} of its content is not UTF-8; correct it, leave the file out with --exclude, or "
        f"take bytes as they are without --require-utf8"
    )


def _read_json_lines(file: InputFile, options: InputOptions) -> Iterator[bytes]:
    for number, line in enumerate(_lines(file, read_blocks(file, options)), 1):
        try:
            yield _text_of_line(line, options)
        except BadLine as error:
            raise UserError(f"{file.path}:{number}: {error}") from None


def _text_of_line(line: bytes, options: InputOptions) -> bytes:
    """The text of one JSON line; no text if the line is blank."""
    if not line.strip():
        return b""
    record = record_of(line)
    if options.format == "text":
        return text_of(record, options.text_field)
    text = render(record)
    if len(text) > options.longest:
        raise BadLine(
            f"is a conversation of {len(text)} bytes, and is not cut; leave it out, or allow it "
            f"with --longest-mib"
        )
    return text


def _lines(file: InputFile, blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The lines of a stream, without their newlines."""
    parts: list[bytes] = []
    size = 0
    for block in blocks:
        first, *lines = block.split(b"\n")
        parts.append(first)
        size += len(first)
        if size > _LONGEST_LINE:
            raise UserError(
                f"{file.path}: holds a line of more than {_LONGEST_LINE} bytes; write one object "
                f"with a text a line"
            )
        if lines:
            yield b"".join(parts)
            parts = [lines.pop()]
            size = len(parts[0])
            yield from lines
    if size:
        yield b"".join(parts)


def _read_parquet(file: InputFile, options: InputOptions) -> Iterator[bytes]:
    try:
        import pyarrow as arrow
        from pyarrow import parquet
    except ImportError:
        raise UserError(
            f"{file.path}: reading Parquet needs pyarrow; install rlt-dist[parquet]"
        ) from None
    row = 0
    with opened(file) as handle:
        try:
            # Without a buffer and with pre_buffer whole columns would be held.
            table = parquet.ParquetFile(handle, pre_buffer=False, buffer_size=_BLOCK)
            rows = _check_column(file, table, options.text_field)
            batches = table.iter_batches(rows, columns=[options.text_field], use_threads=False)
            for batch in batches:
                for text in batch.column(0).cast(arrow.large_binary()).to_pylist():
                    row += 1
                    if options.require_utf8 and text:
                        _refuse_text(text, f"{file.path}: row {row}")
                    yield text or b""  # a null holds no text
        except (arrow.ArrowException, OSError) as error:
            raise _damaged(file, error) from error


def _check_column(file: InputFile, table: Any, field: str) -> int:
    """See that a Parquet file's column holds text; gives how many rows to read at once."""
    from pyarrow import types

    schema = table.schema_arrow
    if schema.names.count(field) > 1:
        raise UserError(
            f"{file.path}: has several columns {field!r}; name another with --text-field"
        )
    if field not in schema.names:
        known = ", ".join(map(repr, schema.names)) or "none"
        raise UserError(
            f"{file.path}: has no column {field!r}; name one with --text-field ({known})"
        )
    kind = schema.field(field).type
    value = kind.value_type if types.is_dictionary(kind) else kind
    texts = (types.is_string, types.is_large_string, types.is_string_view)
    binaries = (types.is_binary, types.is_large_binary, types.is_binary_view)
    if not any(is_one(value) for is_one in (*texts, *binaries)):
        raise UserError(
            f"{file.path}: column {field!r} holds {kind}, no text; name another with --text-field"
        )
    rows = table.metadata.num_rows
    return max(1, min(1 << 12, _BLOCK * rows // max(1, file.size)))


def _refuse_text(text: bytes, where: str) -> None:
    try:
        text.decode()
    except UnicodeDecodeError as error:
        raise _not_utf8(f"{where}: byte {error.start}") from None
