"""A preparation killed at any moment and started again ends with the same bytes."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rlt_dist.data.prepare.prepare import prepare_corpus

# Counts what the bar is told, and the moments before and after every rename; dies at the one asked
# for.
KILLED = """
import os, signal, sys
from pathlib import Path
from rlt_dist.data.prepare.prepare import prepare_corpus

inputs, output, tokenizer, kind, die_at = sys.argv[1:]
moments = {"rename": 0, "bar": 0}

def moment(name):
    moments[name] += 1
    if name == kind and moments[name] == int(die_at):
        os.kill(os.getpid(), signal.SIGKILL)

rename = os.replace
def replace(*paths):
    moment("rename")
    rename(*paths)
    moment("rename")

os.replace = replace
prepare_corpus([Path(inputs)], Path(output), Path(tokenizer), shard_bytes=1500,
               watch=lambda _: moment("bar"))
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number in range(60):
        text = b"" if number % 9 == 5 else b"document %d " % number * 12
        (folder / f"{number:02d}").write_bytes(text)
    return folder


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recipe") / "bpe.yaml"
    path.write_text("kind: bpe\nvocabulary: 300\n")
    return path


@pytest.fixture(scope="module")
def whole(texts: Path, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    output = tmp_path_factory.mktemp("whole") / "out"
    prepare_corpus([texts], output, recipe, shard_bytes=1500)
    return contents(output)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def start(texts: Path, output: Path, recipe: Path, kind: str, die_at: int) -> int:
    command = [sys.executable, "-c", KILLED, texts, output, recipe, kind, die_at]
    return subprocess.run(list(map(str, command)), check=False, timeout=60).returncode


@pytest.mark.parametrize(
    ("kind", "die_at"),
    [
        ("rename", 1),  # nothing but a temporary request
        ("rename", 3),  # the survey's records are written, not in place
        ("rename", 5),  # the survey's summary is missing
        ("rename", 7),  # the tokenizer is trained, not saved
        ("rename", 10),  # the first tar is in place, its sidecar is not
        ("rename", 13),  # the first shard is whole, its record is not written
        ("rename", 24),  # in the midst of shards
        ("bar", 10),  # in the tokenizer's pass
    ],
)
def test_killed_once_and_started_again(
    texts: Path, recipe: Path, whole: dict[str, bytes], tmp_path: Path, kind: str, die_at: int
) -> None:
    assert start(texts, tmp_path / "out", recipe, kind, die_at) == -signal.SIGKILL
    assert not (tmp_path / "out" / "index.json").exists()
    prepare_corpus([texts], tmp_path / "out", recipe, shard_bytes=1500)
    assert contents(tmp_path / "out") == whole


def test_killed_again_and_again(
    texts: Path, recipe: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    output, deaths = tmp_path / "out", 0
    kept: dict[str, int] = {}
    while start(texts, output, recipe, "rename", 11) != 0:
        deaths += 1
        assert deaths < 20
        for name in kept:
            assert (output / name).stat().st_mtime_ns == kept[name]
        tars = output.glob("*.tar")
        finished = [tar for tar in tars if (output / "progress" / f"{tar.stem}.json").exists()]
        kept = {tar.name: tar.stat().st_mtime_ns for tar in finished}
    assert deaths >= 2
    assert contents(output) == whole
