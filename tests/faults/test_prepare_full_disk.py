"""A disk that fills up while a corpus is prepared: one line, and finished shards are kept."""

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rlt_dist.data.tokenizers.raw_bytes import BytesTokenizer

SIZES = ("16k", "1500k")
WHOLE = 2_000_000  # bytes of text; twice as many on disk


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], list[str]]:
    folder = tmp_path_factory.mktemp("inputs")
    chance = random.Random(3)
    words = [f"word{number}" for number in range(500)]
    text = "%".join(" ".join(chance.choices(words, k=90)) for _ in range(WHOLE // 630))
    (folder / "text.txt").write_text(text)
    BytesTokenizer().save(folder / "bytes.json")
    return lambda output: [
        *(sys.executable, "-m", "rlt_dist", "data", "prepare", "--separator", "%"),
        *("--input", str(folder / "text.txt"), "--tokenizer", str(folder / "bytes.json")),
        *("--output", str(output), "--shard-mib", "0.05", "--workers", "2"),
    ]


def prepare(command: list[str]) -> subprocess.CompletedProcess:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def test_a_full_disk_is_one_line_and_with_more_room_it_goes_on(
    command: Callable[[Path], list[str]], tmp_path: Path, mount_small: Callable[[Path, str], None]
) -> None:
    assert prepare(command(tmp_path / "whole")).returncode == 0
    kept = {}
    for size in SIZES:
        disk = tmp_path / size
        mount_small(disk, size)
        full = prepare(command(disk / "out"))
        assert full.returncode == 2
        assert full.stderr.startswith(f"rlt-dist: error: {disk / 'out'}: the disk is full; ")
        assert full.stderr.count("\n") == 1
        assert not list(disk.rglob("*.partial"))
        tars = {tar.name: tar.stat().st_mtime_ns for tar in (disk / "out").glob("*.tar")}
        finished = {path.stem for path in (disk / "out" / "progress").glob("t*.json")}
        kept[size] = {name: time for name, time in tars.items() if Path(name).stem in finished}
        resize = ["mount", "-o", "remount,size=50m", str(disk)]
        subprocess.run(resize, check=True, timeout=20)
        assert prepare(command(disk / "out")).returncode == 0
        assert contents(disk / "out") == contents(tmp_path / "whole")
        now = {name: (disk / "out" / name).stat().st_mtime_ns for name in kept[size]}
        assert now == kept[size]
    assert kept["1500k"]
