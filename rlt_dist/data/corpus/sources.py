"""Where a document of a corpus came from: the name of an input, and its place in it."""

import json
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from rlt_dist.data.corpus.storage import REPAIR, Storage
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import write_atomic

SOURCES_NAME = "sources.json"


class Sources:
    """Names documents by their ordinals, which count all documents of all inputs in order."""

    def __init__(self, inputs: Sequence[tuple[str, int]]) -> None:
        """`inputs`: name and number of documents of each, empty documents counted."""
        self._inputs = inputs
        self._ends = list(accumulate(count for _, count in inputs))

    def name(self, ordinal: int) -> str:
        """`INPUT`, or `INPUT#K` for the k-th (from 1 on) of several documents of an input."""
        place = bisect_right(self._ends, ordinal)
        name, count = self._inputs[place]
        return name if count == 1 else f"{name}#{ordinal - (self._ends[place] - count) + 1}"


def write_sources(folder: Path, inputs: Sequence[tuple[str, int]]) -> None:
    """Write sources.json: each input's name and its number of documents, in order."""
    write_atomic(folder / SOURCES_NAME, json.dumps(inputs) + "\n")


def read_sources(storage: Storage) -> Sources:
    """Read sources.json.

    Raises:
        UserError: it is missing or damaged.
    """
    try:
        inputs = [(str(name), int(count)) for name, count in json.loads(storage.read(SOURCES_NAME))]
    except (ValueError, TypeError):
        raise UserError(f"{storage.address(SOURCES_NAME)}: is damaged; {REPAIR}") from None
    return Sources(inputs)
