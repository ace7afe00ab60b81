"""Documents come out of every kind of input exactly as they are, or with one clear error."""

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt_dist.data.prepare.sources import (
    SourceOptions,
    Tally,
    list_inputs,
    read_documents,
    split_stream,
)
from rlt_dist.util.errors import UserError


def read(*inputs: Path, **options: object) -> list[tuple[str, bytes]]:
    source = SourceOptions(**options)
    listing = list_inputs(inputs, source)
    documents = read_documents(listing, source, Tally())
    return [(document.source, document.text) for document in documents]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "docs"
    for name, text in {
        "b.py": b"bee",
        "a/deep.py": b"deep\r\n\xff",
        "a/empty.py": b"",
        "a/skip/x.py": b"x",
        "c.txt": b"sea",
        ".hidden.py": b"no",
        ".git/config.py": b"no",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(text)
    return folder


def test_folder_gives_one_document_a_file_in_sorted_order(folder: Path) -> None:
    assert read(folder) == [
        ("docs/a/deep.py", b"deep\r\n\xff"),
        ("docs/a/skip/x.py", b"x"),
        ("docs/b.py", b"bee"),
        ("docs/c.txt", b"sea"),
    ]


def test_pattern_and_exclude_choose_files(folder: Path) -> None:
    assert [name for name, _ in read(folder, pattern="*.py", exclude=("skip",))] == [
        "docs/a/deep.py",
        "docs/b.py",
    ]
    assert [name for name, _ in read(folder, pattern="a/*.py", exclude=("*deep*",))] == [
        "docs/a/skip/x.py"
    ]


def test_hidden_files_and_empty_documents_are_counted(folder: Path) -> None:
    source = SourceOptions(pattern="*.py")
    listing = list_inputs([folder], source)
    tally = Tally()
    assert len(list(read_documents(listing, source, tally))) == 3
    assert (listing.hidden, tally.empty_documents) == (2, 1)
    assert tally.bytes_read == listing.bytes


def test_linked_folders_are_counted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "more.py").write_bytes(b"more")
    for name in ("linked", "a/linked", "a/skip/linked", ".git/linked"):
        (folder / name).symlink_to(tmp_path / "else")
    (folder / "link.py").symlink_to(tmp_path / "else" / "more.py")
    listing = list_inputs([folder], SourceOptions(exclude=("skip",)))
    assert listing.linked == 2
    assert "docs/link.py" in [file.name for file in listing.files]
    assert not any("linked" in file.name for file in listing.files)


@pytest.mark.parametrize("suffix", ["jsonl", "JSONL", "ndjson"])
def test_json_lines_give_their_text_field(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"some.{suffix}"
    lines = [{"text": "é\n"}, {"text": ""}, {"text": "two", "more": 1}]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert read(path) == [(f"{path.name}:1", "é\n".encode()), (f"{path.name}:3", b"two")]


def test_separator_cuts_a_file_and_keeps_the_rest_exactly(tmp_path: Path) -> None:
    path = tmp_path / "all.txt"
    path.write_bytes(b"one\n%\n two %\n%\nend\n")
    assert read(path, separator="%\n") == [
        ("all.txt#1", b"one\n"),
        ("all.txt#2", b" two "),
        ("all.txt#4", b"end\n"),
    ]


@given(
    text=st.lists(st.sampled_from([b"a", b"b", b"ab"]), max_size=40).map(b"".join),
    separator=st.sampled_from([b"a", b"ab", b"aa", b"aba", b"bb"]),
    block=st.integers(1, 7),
)
def test_split_stream_is_split_wherever_blocks_end(
    text: bytes, separator: bytes, block: int
) -> None:
    blocks = (text[start : start + block] for start in range(0, len(text), block))
    assert list(split_stream(blocks, separator)) == text.split(separator)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", r"3: is not valid JSON \(Expecting [^:]* at column \d\); correct"),
        ('{"a": 1} x', r"3: is not valid JSON \(Extra data at column 10\); correct"),
        ("[" * 100_000, "3: is not valid JSON"),
        ("[1]", "3: is not a JSON object"),
        ('{"body": "x"}', "3: has no field 'text'; name one with --text-field \\('body'\\)"),
        ('{"text": 5}', "3: field 'text' is not a string"),
        ('{"text": "\\ud800"}', "3: field 'text' holds half a character"),
    ],
)
def test_bad_json_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "fine"}\n{"text": "too"}\n' + line + "\n")
    with pytest.raises(UserError, match=f"bad.jsonl:{words}"):
        read(path)


def test_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        read(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no input is given"):
        read()


def test_folder_with_nothing_to_read_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: holds no file"):
        read(tmp_path / "empty")
    with pytest.raises(UserError, match=r"docs: holds no file that matches --pattern '\*.rs'"):
        read(folder, pattern="*.rs")


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    os.symlink("loop", tmp_path / "loop")
    with pytest.raises(UserError, match="loop: cannot be read"):
        read(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: is not a regular file"):
        read(tmp_path, exclude=("loop",))


def test_binary_file_is_refused_unless_asked_for(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"x\0y")
    with pytest.raises(UserError, match="image: looks binary"):
        read(tmp_path)
    assert [text for _, text in read(tmp_path, allow_binary=True)] == [b"x\0y"]


def test_input_given_twice_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"b.py: is given twice"):
        read(folder, folder / "b.py")


def test_file_that_changes_under_way_is_refused(folder: Path) -> None:
    source = SourceOptions()
    documents = read_documents(list_inputs([folder], source), source, Tally())
    next(documents)
    (folder / "b.py").write_bytes(b"other")
    with pytest.raises(UserError, match=r"b.py: has changed while it was read"):
        list(documents)
