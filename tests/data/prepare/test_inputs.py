"""The files behind the inputs are found in order, or one clear error says why not."""

import os
from pathlib import Path

import pytest

from rlt_dist.data.prepare.inputs import InputOptions, list_inputs, opened
from rlt_dist.util.errors import UserError


def names(*inputs: Path, **options: object) -> list[str]:
    return [file.name for file in list_inputs(inputs, InputOptions(**options)).files]


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


def test_a_folders_files_come_sorted_by_their_path(folder: Path) -> None:
    inside = ["docs/a/deep.py", "docs/a/empty.py", "docs/a/skip/x.py", "docs/b.py", "docs/c.txt"]
    assert names(folder) == inside
    (folder.parent / "first").write_bytes(b"")
    assert names(folder.parent / "first", folder) == ["first", *inside]


def test_a_listing_says_where_a_file_lies_and_what_it_is(folder: Path) -> None:
    listing = list_inputs([folder], InputOptions())
    for file in listing.files:
        assert file.path == folder.parent / file.name
        assert file.size == file.path.stat().st_size
        assert file.modified_ns == file.path.stat().st_mtime_ns
    assert listing.bytes == 3 + 7 + 0 + 1 + 3


def test_pattern_and_exclude_choose_files(folder: Path) -> None:
    assert names(folder, pattern="*.txt") == ["docs/c.txt"]
    assert names(folder, pattern="*.py", exclude=("skip", "*empty*")) == [
        "docs/a/deep.py",
        "docs/b.py",
    ]
    assert names(folder, pattern="a/*.py", exclude=("a/skip",)) == [
        "docs/a/deep.py",
        "docs/a/empty.py",
    ]


def test_hidden_files_are_counted(folder: Path) -> None:
    assert list_inputs([folder], InputOptions(pattern="*.py")).hidden == 2
    assert list_inputs([folder], InputOptions(exclude=(".git",))).hidden == 1


def test_linked_folders_are_counted(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "else").mkdir()
    (tmp_path / "else" / "more.py").write_bytes(b"more")
    for name in ("linked", "a/linked", "a/skip/linked", ".git/linked"):
        (folder / name).symlink_to(tmp_path / "else")
    (folder / "link.py").symlink_to(tmp_path / "else" / "more.py")
    listing = list_inputs([folder], InputOptions(exclude=("skip",)))
    assert listing.linked == 2
    assert "docs/link.py" in [file.name for file in listing.files]
    assert not any("linked" in file.name for file in listing.files)


def test_missing_input_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere: no such file or folder"):
        names(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no input is given"):
        names()


def test_folder_with_nothing_to_read_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="empty: holds no file"):
        names(tmp_path / "empty")
    with pytest.raises(UserError, match=r"docs: holds no file that matches --pattern '\*.rs'"):
        names(folder, pattern="*.rs")


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    os.symlink("loop", tmp_path / "loop")
    with pytest.raises(UserError, match="loop: cannot be read"):
        names(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe: is not a regular file"):
        names(tmp_path, exclude=("loop",))


def test_input_given_twice_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match=r"b.py: is given twice"):
        names(folder, folder / "b.py")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"separator": ""}, "the separator is empty"),
        ({"longest": 3}, "the longest document is 3 bytes; it must be from 4 to 1073741824"),
        ({"longest": 1 << 31}, "the longest document is 2147483648 bytes"),
    ],
)
def test_options_that_cannot_be_followed_are_refused(
    folder: Path, options: dict[str, object], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        names(folder, **options)


@pytest.mark.parametrize("late", [False, True])
def test_a_file_that_has_changed_is_refused(folder: Path, late: bool) -> None:
    file = list_inputs([folder / "b.py"], InputOptions()).files[0]
    with opened(file) as handle:
        assert handle.read() == b"bee"
    if not late:
        (folder / "b.py").write_bytes(b"other")
    with pytest.raises(UserError, match=r"b.py: has changed while it was read"), opened(file):
        (folder / "b.py").write_bytes(b"other")


def test_a_file_that_has_gone_is_named(folder: Path) -> None:
    file = list_inputs([folder / "b.py"], InputOptions()).files[0]
    file.path.unlink()
    with pytest.raises(UserError, match=r"b.py: cannot be read \(No such file"), opened(file):
        pass
