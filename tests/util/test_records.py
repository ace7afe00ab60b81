"""Files of one object a line, also after a kill."""

from pathlib import Path

import pytest

from rlt_dist.util.errors import UserError
from rlt_dist.util.records import append_record, read_records


@pytest.mark.parametrize("torn", ["", '{"a', '{"a": 2}', "\x00"])
def test_what_follows_a_line_cut_short_is_whole(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "records.jsonl"
    append_record(path, '{"a": 1}')
    with path.open("a") as file:
        file.write(torn)
    assert read_records(path) == [{"a": 1}]
    append_record(path, '{"a": 3}')
    assert read_records(path) == [{"a": 1}, {"a": 3}]


@pytest.mark.parametrize("line", [b"\xff\x00", b"{", b"3", b""])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes(b"{}\n" + line + b"\n{}\n")
    with pytest.raises(UserError, match=r"records.jsonl:2: is no JSON object; remove the line"):
        read_records(path)
