"""A survey and what it lets read are exactly the documents of the inputs, in bounded memory."""

import gzip
import json
import lzma
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as arrow
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from rlt_dist.data.prepare import survey as module
from rlt_dist.data.prepare.cut import cut_sizes
from rlt_dist.data.prepare.inputs import InputOptions, list_inputs
from rlt_dist.data.prepare.survey import RECORD, Survey, survey_unit, units_of
from rlt_dist.util.errors import UserError

SurveyOf = Callable[..., Survey]

COMPRESS = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}

# Surveys all units, and dies by SIGKILL at the rename asked for, before or after it is done.
SURVEY = """
import os, signal, sys
from pathlib import Path
from rlt_dist.data.prepare import survey as module
from rlt_dist.data.prepare.inputs import InputOptions, list_inputs

inputs, progress, die_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
module._UNIT_FILES = 2
moments, rename = 0, os.replace

def moment():
    global moments
    moments += 1
    if moments == die_at:
        os.kill(os.getpid(), signal.SIGKILL)

def replace(*paths):
    moment()
    rename(*paths)
    moment()

os.replace = replace
options = InputOptions(separator="%")
for unit in module.units_of(list_inputs([inputs], options)):
    module.survey_unit(unit, options, progress)
"""

# Surveys and reads a file, and tells by how many MiB its memory grew at most.
MEMORY = """
import sys
from pathlib import Path
import numpy as np
from rlt_dist.data.prepare.inputs import InputOptions, list_inputs
from rlt_dist.data.prepare.survey import Survey, survey_unit, units_of

def peak():
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024

path, progress, separator = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
before = peak()
options = InputOptions(separator=separator or None, longest=4 << 20)
units = units_of(list_inputs([path], options))
survey = Survey(units, [survey_unit(unit, options, progress) for unit in units], progress)
size = sum(map(len, survey.read(np.arange(survey.documents))))
print(size == survey.bytes, survey.bytes, int(peak() - before))
"""


def cut(text: bytes, longest: int) -> list[bytes]:
    """The pieces that a document is stored as."""
    ends = np.cumsum(cut_sizes(text, longest)).tolist()
    return [text[start:end] for start, end in zip([0, *ends], ends, strict=False)]


def write(folder: Path, number: int, kind: str, documents: list[bytes]) -> list[bytes]:
    """Write a file of some documents; gives the documents that it holds."""
    path = folder / f"{number:03d}{kind}"
    content, compression = kind, ""
    if "." + kind.rpartition(".")[2] in COMPRESS:
        content, _, suffix = kind.rpartition(".")
        compression = "." + suffix
    if content == ".parquet":
        parquet.write_table(arrow.table({"text": arrow.array(documents, "binary")}), path)
        return documents
    if content == ".jsonl":
        documents = [text.decode(errors="replace").encode() for text in documents]
        data = b"".join(json.dumps({"text": t.decode()}).encode() + b"\r\n" for t in documents)
    else:
        data = b"%\n".join(documents)
    path.write_bytes(COMPRESS[compression](data))
    return documents if content == ".jsonl" else [data]


KINDS = [content + compression for content in (".txt", ".jsonl") for compression in COMPRESS] + [
    ".parquet"
]
TEXTS = st.lists(
    st.sampled_from(
        [b"", b"a", b"%", b"%\n", b"\r\n", b"\0", b"\xff", "é€😀".encode(), b"some words " * 3]
    ),
    max_size=6,
).map(b"".join)


@settings(max_examples=60)
@given(
    files=st.lists(st.tuples(st.sampled_from(KINDS), st.lists(TEXTS, max_size=5)), min_size=1),
    separator=st.sampled_from([None, "%\n", "%", "\n"]),
    longest=st.sampled_from([4, 9, 1 << 20]),
    unit_files=st.integers(1, 4),
    read=st.sampled_from([1, 50, 1 << 20]),
    batch=st.sampled_from([1, 3, 1 << 16]),
    data=st.data(),
)
def test_what_is_read_is_what_the_inputs_hold(
    files: list,
    separator: str | None,
    longest: int,
    unit_files: int,
    read: int,
    batch: int,
    data: st.DataObject,
) -> None:
    options = InputOptions(separator=separator, longest=longest, allow_binary=True)
    with TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_UNIT_FILES", unit_files)
        patch.setattr(module, "_READ", read)
        patch.setattr(module, "_GAP", read)
        patch.setattr(module, "_BATCH", batch)
        inputs, progress = Path(name) / "in", Path(name) / "progress"
        inputs.mkdir()
        progress.mkdir()
        expected: list[list[bytes]] = []
        cuts = 0
        for number, (kind, documents) in enumerate(files):
            held = write(inputs, number, kind, documents)
            if separator and ".txt" in kind:
                held = held[0].split(separator.encode())
            cuts += sum(len(text) > longest for text in held)
            expected.append([piece for text in held for piece in cut(text, longest)])
        units = units_of(list_inputs([inputs], options))
        summaries = [survey_unit(unit, options, progress) for unit in reversed(units)]
        survey = pickle.loads(pickle.dumps(Survey(units, summaries, progress)))

        texts = [text for documents in expected for text in documents]
        assert list(survey.read(np.arange(survey.documents))) == texts
        assert [size for part in survey.sizes() for size in part.tolist()] == list(map(len, texts))
        assert [count for _, count in survey.sources()] == list(map(len, expected))
        assert survey.documents == len(texts)
        assert survey.empty_documents == texts.count(b"")
        assert survey.cut_documents == cuts
        assert survey.bytes == sum(map(len, texts))
        some = sorted(data.draw(st.sets(st.integers(0, max(0, len(texts) - 1)))) if texts else [])
        assert list(survey.read(np.array(some, np.int64))) == [texts[number] for number in some]


@pytest.fixture
def inputs(tmp_path: Path) -> Path:
    """Six files in three units of two: plain, mixed, unpacked."""
    folder = tmp_path / "inputs"
    folder.mkdir()
    kinds = [".txt", ".txt", ".txt", ".jsonl", ".txt.zst", ".jsonl.gz"]
    for number, kind in enumerate(kinds):
        write(folder, number, kind, [b"%d of %d" % (part, number) * part for part in range(9)])
    return folder


@pytest.fixture
def progress(tmp_path: Path) -> Path:
    (tmp_path / "progress").mkdir()
    return tmp_path / "progress"


def survey(inputs: Path, progress: Path, monkeypatch: pytest.MonkeyPatch) -> Survey:
    monkeypatch.setattr(module, "_UNIT_FILES", 2)
    options = InputOptions(separator="%")
    units = units_of(list_inputs([inputs], options))
    return Survey(units, [survey_unit(unit, options, progress) for unit in units], progress)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_units_are_consecutive_files_of_bounded_size(tmp_path: Path) -> None:
    sizes = [1, 5, 0, 70, 63, 2, 64, 1]
    for number, size in enumerate(sizes):
        with (tmp_path / str(number)).open("wb") as handle:
            handle.truncate(size << 20)
    listing = list_inputs([tmp_path], InputOptions())
    units = units_of(listing)
    assert [[int(file.path.name) for file in unit.files] for unit in units] == [
        *([0, 1, 2], [3], [4], [5], [6], [7])
    ]
    assert [unit.number for unit in units] == list(range(6))


def test_a_unit_has_at_most_a_thousand_files(tmp_path: Path) -> None:
    for number in range(2001):
        (tmp_path / f"{number}").touch()
    units = units_of(list_inputs([tmp_path], InputOptions()))
    assert [len(unit.files) for unit in units] == [1000, 1000, 1]


def test_names_of_the_inputs_come_with_their_documents(
    inputs: Path, progress: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert survey(inputs, progress, monkeypatch).sources() == [
        ("inputs/000.txt", 9),
        ("inputs/001.txt", 9),
        ("inputs/002.txt", 9),
        ("inputs/003.jsonl", 9),
        ("inputs/004.txt.zst", 9),
        ("inputs/005.jsonl.gz", 9),
    ]


def test_plain_text_is_not_copied(
    inputs: Path, progress: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey(inputs, progress, monkeypatch)
    assert not (progress / "survey-000000.text").exists()
    own = (progress / "survey-000001.text").read_bytes()
    assert own == b"".join(b"%d of 3" % part * part for part in range(9))
    records = np.load(progress / "survey-000001.npy")
    assert records.dtype == RECORD
    assert records["file"].tolist() == [0] * 9 + [2] * 9


def test_finished_units_are_not_read_again(
    inputs: Path, progress: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    survey(inputs, progress, monkeypatch)
    before = contents(progress)
    (progress / "survey-000001.json").unlink()
    (progress / "survey-000002.text").write_bytes(b"short")
    read: list[str] = []
    for name in ("read_blocks", "read_texts"):
        plain = getattr(module, name)
        monkeypatch.setattr(
            *(module, name),
            lambda file, options, f=plain: read.append(file.name) or f(file, options),
        )
    survey(inputs, progress, monkeypatch)
    assert [name.removeprefix("inputs/")[:3] for name in read] == ["002", "003", "004", "005"]
    after = contents(progress)
    assert {n: c for n, c in after.items() if ".json" not in n} == {
        n: c for n, c in before.items() if ".json" not in n
    }
    read.clear()
    survey(inputs, progress, monkeypatch)
    assert read == []


@pytest.mark.parametrize("damage", ["{", "[]", '{"files": [[]], "summary": {}}', ""])
def test_a_damaged_summary_counts_for_nothing(
    inputs: Path, progress: Path, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    before = survey(inputs, progress, monkeypatch)
    (progress / "survey-000001.json").write_text(damage)
    after = survey(inputs, progress, monkeypatch)
    assert (after.documents, after.bytes) == (before.documents, before.bytes)


def test_an_input_that_has_changed_is_surveyed_again(
    inputs: Path, progress: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = survey(inputs, progress, monkeypatch)
    (inputs / "003.jsonl").write_text('{"text": "other"}')
    after = survey(inputs, progress, monkeypatch)
    assert after.documents == before.documents - 8
    assert list(after.read(np.array([27]))) == [b"other"]


@pytest.mark.parametrize("die_at", [1, 2, 3, 4, 5, 7, 9, 11, 13])
def test_a_survey_killed_and_started_again_is_the_same(
    inputs: Path, progress: Path, monkeypatch: pytest.MonkeyPatch, die_at: int, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", SURVEY, str(inputs), str(progress), str(die_at)]
    assert subprocess.run(command, check=False, timeout=60).returncode == -signal.SIGKILL
    again = survey(inputs, progress, monkeypatch)
    (tmp_path / "whole").mkdir()
    whole = survey(inputs, tmp_path / "whole", monkeypatch)
    everything = np.arange(whole.documents)
    assert list(again.read(everything)) == list(whole.read(everything))
    assert again.sources() == whole.sources()
    assert not list(progress.glob(".*"))


@pytest.mark.parametrize("name", ["000.txt", "005.jsonl.gz"])
def test_a_file_that_changes_after_the_survey_is_refused(
    inputs: Path, progress: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found = survey(inputs, progress, monkeypatch)
    path = inputs / name if name.endswith("txt") else progress / "survey-000002.text"
    path.write_bytes(path.read_bytes() + b"more")
    with pytest.raises(UserError, match=f"{path.name}: has changed while it was read"):
        list(found.read(np.arange(found.documents)))


def test_a_survey_that_is_missing_is_named(
    inputs: Path, progress: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = survey(inputs, progress, monkeypatch)
    (progress / "survey-000002.npy").write_bytes(b"")
    with pytest.raises(UserError, match=r"survey-000002.npy: is missing or damaged"):
        list(found.read(np.arange(found.documents)))


@pytest.mark.parametrize("name", ["some.txt", "some.txt.zst", "some.jsonl"])
@pytest.mark.parametrize("separator", ["", "\n"])
def test_memory_is_bounded_whatever_the_size(
    tmp_path: Path, progress: Path, name: str, separator: str
) -> None:
    line = b'{"text": "%s"}\n' % (b"word " * 300)
    block, times = line * 700, 300  # about 1 MiB
    path = tmp_path / name
    with path.open("wb") as handle:
        if name.endswith("zst"):
            with zstandard.ZstdCompressor().stream_writer(handle, closefd=False) as writer:
                for _ in range(times):
                    writer.write(block)
        else:
            for _ in range(times):
                handle.write(block)
    command = [sys.executable, "-c", MEMORY, str(path), str(progress), separator]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    right, size, grown = done.stdout.split()
    assert right == "True"
    assert int(size) >= 300e6
    assert int(grown) < 160
