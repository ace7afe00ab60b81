"""A corpus that a test may damage."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from rlt_dist.data.corpus.index import CorpusIndex

Flip = Callable[[Path, int], None]


@pytest.fixture
def copy(corpus: CorpusIndex, tmp_path: Path) -> Path:
    return shutil.copytree(corpus.location, tmp_path / "copy")


@pytest.fixture(scope="session")
def flip() -> Flip:
    """`flip(path, place)`: change one bit of a file's byte."""

    def change(path: Path, place: int) -> None:
        content = bytearray(path.read_bytes())
        content[place] ^= 1
        path.write_bytes(content)

    return change
