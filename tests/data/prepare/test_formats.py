"""Documents come out of every kind of file exactly as they are, or with one clear error."""

import gzip
import json
import lzma
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as arrow
import pytest
import zstandard
from pyarrow import parquet

from rlt_dist.data.prepare import formats
from rlt_dist.util.errors import UserError

ReadAll = Callable[..., list[bytes]]

TEXT = b"one\r\n%\n two\xff%\n%\nend"
COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
    ".GZ": gzip.compress,
}
PACKED = [".gz", ".xz", ".zst"]


def write(folder: Path, name: str, content: bytes) -> Path:
    """A file, compressed as its name says."""
    path = folder / name
    compression = path.suffix if path.suffix in COMPRESS else ""
    path.write_bytes(COMPRESS[compression](content))
    return path


@pytest.mark.parametrize("compression", COMPRESS)
def test_text_is_one_document_or_cut_at_the_separator(
    tmp_path: Path, read_all: ReadAll, compression: str
) -> None:
    path = write(tmp_path, f"some.txt{compression}", TEXT)
    assert read_all(path) == [TEXT]
    assert read_all(path, separator="%\n") == [b"one\r\n", b" two\xff", b"", b"end"]
    not_utf8 = os.fsdecode(b"\xff%")  # as the shell gives it
    assert read_all(path, separator=not_utf8) == [b"one\r\n%\n two", b"\n%\nend"]


@pytest.mark.parametrize("compression", COMPRESS)
@pytest.mark.parametrize("suffix", ["jsonl", "JSONL", "ndjson"])
def test_json_lines_give_their_text_field(
    tmp_path: Path, read_all: ReadAll, suffix: str, compression: str
) -> None:
    lines = [{"text": "é\n"}, {"text": ""}, {"text": "two", "more": 1}]
    content = "\n".join(map(json.dumps, lines)) + "\r\n \n" + ' {"text": "last"} '
    path = write(tmp_path, f"some.{suffix}{compression}", content.encode())
    assert read_all(path) == ["é\n".encode(), b"", b"two", b"", b"last"]


def test_json_lines_are_read_whatever_json_allows(tmp_path: Path, read_all: ReadAll) -> None:
    lines = [
        b"\xef\xbb\xbf" + b'{"text": "after a mark"}',
        b'{"text": "\xc3\xa9\\u00e9\\ud83d\\ude00\\n\\u0000"}',
        b'\t{"more": [1, {"text": "no"}], "text": "\xe2\x82\xac"}\t\r',
    ]
    path = write(tmp_path, "some.jsonl", b"\n".join(lines))
    assert read_all(path) == [b"after a mark", "éé😀\n\0".encode(), "€".encode()]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b"{", r"3: is not valid JSON \(Expecting [^:]* at column \d\); correct"),
        (b'{"a": 1} x', r"3: is not valid JSON \(Extra data at column 10\); correct"),
        (b'{"text": "a\xff"}', r"3: is not UTF-8 \(at byte 11\); convert the file"),
        (b"[" * 100_000, "3: is not valid JSON"),
        (b"[1]", "3: is not a JSON object"),
        (b'{"body": "x"}', "3: has no field 'text'; name one with --text-field \\('body'\\)"),
        (b'{"text": 5}', "3: field 'text' is not a string"),
        (b'{"text": "\\ud800"}', "3: field 'text' holds half a character"),
    ],
)
def test_bad_json_line_is_named(tmp_path: Path, read_all: ReadAll, line: bytes, words: str) -> None:
    content = b'{"text": "fine"}\n{"text": "too"}\n' + line + b"\n"
    for name in ("bad.jsonl", "bad.jsonl.gz"):
        with pytest.raises(UserError, match=f"{name}:{words}"):
            read_all(write(tmp_path, name, content))


def test_a_line_too_long_to_hold_is_refused(
    tmp_path: Path, read_all: ReadAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(formats, "_LONGEST_LINE", 100)
    monkeypatch.setattr(formats, "_BLOCK", 30)
    fine = json.dumps({"text": "x" * 80}).encode()
    assert read_all(write(tmp_path, "a.jsonl", fine + b"\n" + fine)) == [b"x" * 80] * 2
    with pytest.raises(UserError, match=r"a.jsonl: holds a line of more than 100 bytes"):
        read_all(write(tmp_path, "a.jsonl", fine + fine))


def test_every_member_stream_and_frame_of_an_archive_is_read(
    tmp_path: Path, read_all: ReadAll
) -> None:
    parts = [b"first", b"", b"second" * 100_000, b"third"]
    for suffix in PACKED:
        path = tmp_path / f"many{suffix}"
        path.write_bytes(b"".join(map(COMPRESS[suffix], parts)))
        assert read_all(path) == [b"".join(parts)]
    path = tmp_path / "padded.xz"
    path.write_bytes(bytes(4).join(map(lzma.compress, parts)) + bytes(8))
    assert read_all(path) == [b"".join(parts)]
    path = tmp_path / "skipped.zst"
    skipped = b"\x50\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"any"
    path.write_bytes(skipped + zstandard.compress(b"text") + skipped)
    assert read_all(path) == [b"text"]


def flip_first(content: bytes) -> bytes:
    return bytes([content[0] ^ 1]) + content[1:]


@pytest.mark.parametrize("suffix", PACKED)
def test_an_archive_cut_short_or_damaged_is_refused(
    tmp_path: Path, read_all: ReadAll, suffix: str
) -> None:
    path = tmp_path / f"bad{suffix}"
    text = bytes(number * number % 251 for number in range(300_000))
    whole = zstandard.ZstdCompressor(write_checksum=True).compress(text)
    if suffix != ".zst":
        whole = COMPRESS[suffix](text)
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 0x55
    options = {"allow_binary": True}
    for content in (
        *(whole[:size] for size in (0, 1, 10, len(whole) // 2, len(whole) - 1)),
        whole + whole[: len(whole) // 2],
        whole + flip_first(whole),
        whole + b"more",
        bytes(1000),
        b"no archive at all, but text",
        bytes(flipped),
    ):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"bad{suffix}: is damaged or cut short \(.+\); fetch"):
            read_all(path, **options)
    path.write_bytes(whole)
    assert read_all(path, **options) == [text]


@pytest.mark.parametrize("compression", COMPRESS)
def test_bytes_that_are_not_utf8_are_named_where_utf8_is_required(
    tmp_path: Path, read_all: ReadAll, monkeypatch: pytest.MonkeyPatch, compression: str
) -> None:
    monkeypatch.setattr(formats, "_BLOCK", 7)
    good = "aé€😀" * 9  # characters that straddle blocks
    path = write(tmp_path, f"good.txt{compression}", good.encode())
    assert read_all(path, require_utf8=True) == [good.encode()]
    for bad in (b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\x80", "😀".encode()[:3]):
        for after in (b"", b"more"):
            name = f"bad.txt{compression}"
            path = write(tmp_path, name, good.encode() + bad + after)
            where = len(good.encode())
            words = f"{name}: byte {where} of its content is not UTF-8"
            with pytest.raises(UserError, match=words):
                read_all(path, require_utf8=True)
            with pytest.raises(UserError, match=words):
                read_all(path, require_utf8=True, separator="a", longest=4)
            assert b"".join(read_all(path)) == good.encode() + bad + after


def test_bytes_that_are_not_utf8_are_named_in_json_lines(tmp_path: Path, read_all: ReadAll) -> None:
    path = write(tmp_path, "bad.jsonl.zst", b'{"text": "a"}\n{"text": "\xff"}\n')
    with pytest.raises(UserError, match=r"bad.jsonl.zst: byte 24 of its content is not UTF-8"):
        read_all(path, require_utf8=True)


@pytest.mark.parametrize("name", ["image", "image.gz", "image.zst", "image.xz", "some.jsonl"])
def test_what_looks_binary_is_refused_unless_asked_for(
    tmp_path: Path, read_all: ReadAll, name: str
) -> None:
    path = write(tmp_path, name, b"\n" * 8000 + b"x\0y")
    with pytest.raises(UserError, match=rf"{name}: looks binary \(it holds NUL bytes\)"):
        read_all(path)
    if name != "some.jsonl":
        assert read_all(path, allow_binary=True) == [b"\n" * 8000 + b"x\0y"]
        assert len(read_all(write(tmp_path, name, b"\n" * 8192 + b"\0"))) == 1


def write_parquet(folder: Path, column: object, **options: object) -> Path:
    path = folder / "some.parquet"
    rows = range(len(column))  # type: ignore[arg-type]
    parquet.write_table(arrow.table({"id": list(rows), "text": column}), path, **options)
    return path


@pytest.mark.parametrize(
    "kind", ["string", "large_string", "string_view", "binary", "large_binary", "dictionary"]
)
def test_parquet_gives_its_text_column(tmp_path: Path, read_all: ReadAll, kind: str) -> None:
    texts = ["é\n", "", None, "four" * 1000, "five"] * 30
    if kind == "dictionary":
        column = arrow.array(texts, "string").dictionary_encode()
    else:
        column = arrow.array(texts, "string").cast(getattr(arrow, kind)())
    path = write_parquet(tmp_path, column, row_group_size=7)
    assert read_all(path) == [(text or "").encode() for text in texts]


def test_parquet_of_bytes_keeps_them(tmp_path: Path, read_all: ReadAll) -> None:
    texts = [b"\xff\0\r\n", b"", "é".encode()]
    path = write_parquet(tmp_path, arrow.array(texts, "binary"))
    assert read_all(path) == texts
    with pytest.raises(UserError, match=r"some.parquet: row 1: byte 0 of its content is not UTF-8"):
        read_all(path, require_utf8=True)


@pytest.mark.parametrize("suffix", ["parquet", "PARQUET"])
def test_bad_parquet_is_named(tmp_path: Path, read_all: ReadAll, suffix: str) -> None:
    path = tmp_path / f"bad.{suffix}"
    whole = write_parquet(tmp_path, ["text" * 1000, "more"]).read_bytes()
    size = int.from_bytes(whole[-8:-4], "little")
    footless = whole[: -8 - size] + b"\xff" * size + whole[-8:]  # Arrow says several lines
    for content in (b"", b"garbage", whole[:-9], whole[:90], whole[:4] + whole[60:], footless):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"bad.{suffix}: is damaged or cut short \(.+; fetch"):
            read_all(path)


def test_a_parquet_column_that_holds_no_text_is_named(tmp_path: Path, read_all: ReadAll) -> None:
    path = write_parquet(tmp_path, ["text"])
    words = r"some.parquet: has no column 'body'; name one with --text-field \('id', 'text'\)"
    with pytest.raises(UserError, match=words):
        read_all(path, text_field="body")
    with pytest.raises(UserError, match=r"some.parquet: column 'id' holds int64, no text"):
        read_all(path, text_field="id")
    twice = arrow.Table.from_arrays([arrow.array(["a"]), arrow.array(["b"])], ["text", "text"])
    parquet.write_table(twice, path)
    with pytest.raises(UserError, match=r"some.parquet: has several columns 'text'; name another"):
        read_all(path)


def test_parquet_without_pyarrow_says_what_to_install(
    tmp_path: Path, read_all: ReadAll, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path, ["text"])
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"some.parquet: .*install rlt-dist\[parquet\]"):
        read_all(path)
