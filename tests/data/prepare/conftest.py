"""What inputs hold, as preparation finds it; a corpus of every format and its right bytes."""

import gzip
import json
import lzma
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from rlt_dist.data.prepare.inputs import InputOptions, list_inputs
from rlt_dist.data.prepare.survey import Survey, survey_unit, units_of

SurveyOf = Callable[..., Survey]
ReadAll = Callable[..., list[bytes]]
Contents = Callable[[Path], dict[str, bytes]]
WaitUntil = Callable[[Callable[[], object]], None]

PATIENCE = 60
"""Seconds, for what takes one or two."""


@pytest.fixture(scope="session")
def survey_of(tmp_path_factory: pytest.TempPathFactory) -> SurveyOf:
    def survey(*inputs: Path, **options: object) -> Survey:
        progress = tmp_path_factory.mktemp("progress")
        chosen = InputOptions(**options)
        units = units_of(list_inputs(inputs, chosen))
        return Survey(units, [survey_unit(unit, chosen, progress) for unit in units], progress)

    return survey


@pytest.fixture(scope="session")
def read_all(survey_of: SurveyOf) -> ReadAll:
    """Every document's text, empty ones too."""

    def read(*inputs: Path, **options: object) -> list[bytes]:
        survey = survey_of(*inputs, **options)
        return list(survey.read(np.arange(survey.documents)))

    return read


def write_inputs(folder: Path) -> None:
    """About 1.5 MB: a few long documents, many short ones, some empty, some no UTF-8."""
    chance = random.Random(5)
    words = [f"word{number}" for number in range(900)] + ["naïve", "文字", "\u2581", "\n", "   "]

    def text(length: int) -> str:
        return " ".join(chance.choices(words, k=length))

    def texts(number: int) -> list[str]:
        return [text(chance.choice((0, 5, 20, 60))) for _ in range(number)]

    (folder / "files" / "deep").mkdir(parents=True)
    for number in range(40):
        (folder / "files" / "deep" / f"{number}.txt").write_text(text(number * 9))
    (folder / "files" / "no_utf8.txt").write_bytes(b"caf\xe9 \xff\n" * 200)
    lines = "".join(json.dumps({"text": each}) + "\n" for each in texts(900))
    (folder / "lines.jsonl").write_text(lines)
    (folder / "lines.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    (folder / "pages.gz").write_bytes(gzip.compress("%%".join(texts(900)).encode()))
    (folder / "pages.xz").write_bytes(lzma.compress("%%".join(texts(900)).encode()))
    (folder / "pages.txt").write_text("%%".join(texts(2000)))
    table = pyarrow.table({"text": texts(900)})
    pyarrow.parquet.write_table(table, folder / "rows.parquet")


@dataclass(frozen=True)
class Preparation:
    """`rlt-dist data prepare` of the corpus of every format, as a process of its own."""

    inputs: Path
    recipe: Path

    def command(self, output: Path, *more: object) -> list[str]:
        return [
            *(sys.executable, "-m", "rlt_dist", "data", "prepare", "--input", str(self.inputs)),
            *("--output", str(output), "--tokenizer", str(self.recipe), "--separator", "%%"),
            *("--shard-mib", "0.02", *map(str, more)),
        ]

    def start(self, output: Path, *more: object) -> subprocess.Popen:
        return subprocess.Popen(
            self.command(output, *more),
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, output: Path, *more: object) -> None:
        process = self.start(output, *more)
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, out + error


@pytest.fixture(scope="session")
def preparation(tmp_path_factory: pytest.TempPathFactory) -> Preparation:
    folder = tmp_path_factory.mktemp("every_format")
    write_inputs(folder / "inputs")
    (folder / "bpe.yaml").write_text("kind: bpe\nvocabulary: 600\ntraining_bytes: 200_000\n")
    return Preparation(folder / "inputs", folder / "bpe.yaml")


@pytest.fixture(scope="session")
def contents() -> Contents:
    """`contents(folder)`: each file's bytes, the lock left out."""
    return lambda folder: {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


@pytest.fixture(scope="session")
def whole(
    preparation: Preparation, contents: Contents, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, bytes]:
    """What one worker makes of it, undisturbed."""
    output = tmp_path_factory.mktemp("whole") / "out"
    preparation.run(output, "--workers", 1)
    return contents(output)


@pytest.fixture(scope="session")
def wait_until() -> WaitUntil:
    """`wait_until(condition)`: look again and again, but not for ever."""

    def wait(condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.002)

    return wait
