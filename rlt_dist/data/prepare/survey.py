"""Which documents the inputs hold, and where: the first of the two passes of a preparation.

The inputs are cut into units of consecutive files. A unit's survey leaves in the progress folder

    survey-000000.npy   RECORD [documents]
    survey-000000.text  the text of its files that are not plain text (compressed, JSON lines,
                        Parquet), one after the other; missing where there is none
    survey-000000.json  written last: the unit's files and what was counted

so that from then on every document, whatever its input, is some bytes of a plain file.
"""

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rlt_dist.data.prepare.cut import Spans, adjacent, cut_sizes, find_documents
from rlt_dist.data.prepare.formats import is_seekable, is_text, probe, read_blocks, read_texts
from rlt_dist.data.prepare.inputs import InputFile, InputOptions, Listing, describe, opened
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import atomic_path, write_atomic

RECORD = np.dtype([("file", "<i4"), ("offset", "<i8"), ("bytes", "<i4")])
"""Per document: which plain file of its unit it lies in (an input file, or the unit's own, which
counts as the last), where it begins there, and its size (0: empty)."""

_UNIT_BYTES, _UNIT_FILES = 64 << 20, 1000
_BATCH, _SIZES = 1 << 16, 1 << 20
"""Documents, and sizes alone, that are held at once."""

_READ, _GAP = 1 << 20, 1 << 16
"""Documents of a file are read together if they span at most so many bytes, with gaps of so many
between them."""


@dataclass(frozen=True)
class Unit:
    """Consecutive input files that one task surveys."""

    number: int
    files: tuple[InputFile, ...]


@dataclass(frozen=True)
class UnitSummary:
    """What a unit holds.

    Attributes:
        number: the unit's.
        documents: of each input file, empty ones and the pieces of cut ones counted.
        empty_documents: how many of them hold no text.
        cut_documents: how many documents were too long and are stored as several.
        bytes: of text.
    """

    number: int
    documents: tuple[int, ...]
    empty_documents: int
    cut_documents: int
    bytes: int


def units_of(listing: Listing) -> tuple[Unit, ...]:
    """Units of about 64 MiB or 1,000 files; a larger file is a unit of its own."""
    units: list[Unit] = []
    files: list[InputFile] = []
    size = 0
    for file in listing.files:
        if files and (size + file.size > _UNIT_BYTES or len(files) == _UNIT_FILES):
            units.append(Unit(len(units), tuple(files)))
            files, size = [], 0
        files.append(file)
        size += file.size
    return (*units, Unit(len(units), tuple(files)))


def survey_unit(unit: Unit, options: InputOptions, progress: Path) -> UnitSummary:
    """Find a unit's documents, unless this was done before. `progress` is a folder.

    Memory is bounded by `options.longest`, a line of JSON or a batch of Parquet rows.

    Raises:
        UserError: an input cannot be read or is not what it says; the message names it.
    """
    place = _Place(progress, unit.number)
    if summary := _finished(unit, place):
        return summary
    documents: list[int] = []
    with ExitStack() as stack:
        records = _Records(stack.enter_context(_new_file(place.records)))
        own: BinaryIO | None = None
        for number, file in enumerate(unit.files):
            before = records.documents
            if is_seekable(file):
                records.add(number, _find(file, options))
            else:
                own = own or stack.enter_context(_new_file(place.text))
                records.add(len(unit.files), _unpack(file, options, own))
            documents.append(records.documents - before)
        records.finish()
    summary = UnitSummary(unit.number, tuple(documents), records.empty, records.cut, records.bytes)
    files = [*unit.files, *([describe(place.text, place.text.name)] if own else [])]
    rows = [[str(file.path), file.name, file.size, file.modified_ns] for file in files]
    write_atomic(place.summary, json.dumps({"files": rows, "summary": asdict(summary)}))
    return summary


@dataclass(frozen=True)
class _Place:
    """Where a unit's survey lies."""

    folder: Path
    number: int

    @property
    def records(self) -> Path:
        return self.folder / f"survey-{self.number:06d}.npy"

    @property
    def text(self) -> Path:
        return self.folder / f"survey-{self.number:06d}.text"

    @property
    def summary(self) -> Path:
        return self.folder / f"survey-{self.number:06d}.json"

    def load_summary(self) -> tuple[list[InputFile], UnitSummary]:
        """The unit's plain files, its own last, and what was counted."""
        content = json.loads(self.summary.read_bytes())
        files = [InputFile(Path(path), *rest) for path, *rest in content["files"]]
        counted = content["summary"]
        return files, UnitSummary(**{**counted, "documents": tuple(counted["documents"])})

    def load_records(self) -> np.ndarray:
        """RECORD [documents], memory-mapped.

        Raises:
            UserError: the file is missing or cut short.
        """
        try:
            return np.asarray(np.load(self.records, mmap_mode="r"))
        except (OSError, ValueError, EOFError) as error:
            raise UserError(
                f"{self.records}: is missing or damaged ({error}); run the same command again"
            ) from None


def _finished(unit: Unit, place: _Place) -> UnitSummary | None:
    """The summary that an earlier run has left, if all it speaks of is still there."""
    try:
        files, summary = place.load_summary()
        whole = len(place.load_records()) == sum(summary.documents)
        own = [describe(file.path, file.name) for file in files[len(unit.files) :]]
    except (OSError, ValueError, TypeError, KeyError, UserError):
        return None
    return summary if whole and [*unit.files, *own] == files else None


@contextmanager
def _new_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which takes its place if all goes well."""
    with atomic_path(path) as temporary, temporary.open("wb") as handle:
        yield handle


class _Records:
    """Writes a unit's records, and counts."""

    def __init__(self, handle: BinaryIO) -> None:
        self.documents = self.empty = self.cut = self.bytes = 0
        self._handle = handle
        self._write_header()

    def add(self, file: int, found: Iterable[Spans]) -> None:
        """Append the documents of a file; `file` is its place among the unit's plain files."""
        for spans in found:
            records = np.empty(len(spans.sizes), RECORD)
            records["file"] = file
            records["offset"] = spans.begins
            records["bytes"] = spans.sizes
            self._handle.write(records.data)
            self.documents += len(records)
            self.empty += int((spans.sizes == 0).sum())
            self.cut += spans.cut
            self.bytes += int(spans.sizes.sum())

    def finish(self) -> None:
        """Say in the header how many there are: NumPy leaves room for any number."""
        self._handle.seek(0)
        self._write_header()

    def _write_header(self) -> None:
        header = np.lib.format.header_data_from_array_1_0(np.empty(0, RECORD))
        header["shape"] = (self.documents,)
        np.lib.format.write_array_header_1_0(self._handle, header)


def _find(file: InputFile, options: InputOptions) -> Iterator[Spans]:
    """The documents of a plain text file, where they lie."""
    if options.separator is None and file.size <= options.longest and not options.require_utf8:
        probe(file, options)
        yield adjacent(0, [file.size], cut=0)
    else:
        yield from _find_in(read_blocks(file, options), options)


def _unpack(file: InputFile, options: InputOptions, own: BinaryIO) -> Iterator[Spans]:
    """The documents of any other file, written into the unit's own."""
    begin = own.tell()
    if is_text(file):
        for spans in _find_in(_copied(read_blocks(file, options), own), options):
            yield Spans(spans.begins + begin, spans.sizes, spans.cut)
        return
    sizes: list[int] = []
    cut = 0
    for text in read_texts(file, options):
        own.write(text)
        if len(text) <= options.longest:
            sizes.append(len(text))
        else:
            sizes += cut_sizes(text, options.longest)
            cut += 1
        if len(sizes) >= _BATCH:
            yield adjacent(begin, sizes, cut)
            begin, sizes, cut = own.tell(), [], 0
    yield adjacent(begin, sizes, cut)


def _find_in(blocks: Iterable[bytes], options: InputOptions) -> Iterator[Spans]:
    separator = None if options.separator is None else os.fsencode(options.separator)
    return find_documents(blocks, separator, options.longest)


def _copied(blocks: Iterable[bytes], handle: BinaryIO) -> Iterator[bytes]:
    for block in blocks:
        handle.write(block)
        yield block


class Survey:
    """All documents of the inputs, in order. Pickled, it is small: what it knows is on disk.

    A document's place in this order is its ordinal; empty documents have one too.

    Attributes:
        documents: how many there are.
        empty_documents: how many of them hold no text.
        cut_documents: how many documents were too long and are stored as several.
        bytes: of text.
    """

    def __init__(
        self, units: Sequence[Unit], summaries: Iterable[UnitSummary], progress: Path
    ) -> None:
        """`summaries` holds one of each unit, in any order."""
        by_number = {summary.number: summary for summary in summaries}
        ordered = [by_number[unit.number] for unit in units]
        self._progress = progress
        self._starts = np.cumsum([0, *(sum(summary.documents) for summary in ordered)])
        self.documents = int(self._starts[-1])
        self.empty_documents = sum(summary.empty_documents for summary in ordered)
        self.cut_documents = sum(summary.cut_documents for summary in ordered)
        self.bytes = sum(summary.bytes for summary in ordered)

    def sizes(self) -> Iterator[np.ndarray]:
        """Bytes of every document, in order: int64 [n], a unit's or, of a large one, a part."""
        for place in self._places():
            records = place.load_records()
            for start in range(0, len(records), _SIZES):
                yield records["bytes"][start : start + _SIZES].astype(np.int64)

    def sources(self) -> list[tuple[str, int]]:
        """The input files' names in order, each with its number of documents."""
        found: list[tuple[str, int]] = []
        for place in self._places():
            files, summary = place.load_summary()
            names = [file.name for file in files[: len(summary.documents)]]
            found += zip(names, summary.documents, strict=True)
        return found

    def read(self, ordinals: np.ndarray) -> Iterator[bytes]:
        """The texts of documents. At most about 1 MiB, or one document, is held.

        Args:
            ordinals: int [n], ascending.

        Raises:
            UserError: a file cannot be read, or has changed since it was listed.
        """
        at = 0
        while at < len(ordinals):
            unit = int(np.searchsorted(self._starts, ordinals[at], side="right")) - 1
            some = ordinals[at : at + _BATCH]
            rows = some[: np.searchsorted(some, self._starts[unit + 1])] - self._starts[unit]
            yield from _read_unit(_Place(self._progress, unit), rows)
            at += len(rows)

    def _places(self) -> Iterator[_Place]:
        return (_Place(self._progress, number) for number in range(len(self._starts) - 1))


def _read_unit(place: _Place, rows: np.ndarray) -> Iterator[bytes]:
    records = place.load_records()[rows]
    files, _ = place.load_summary()
    for start, stop in _runs(np.diff(records["file"]) != 0):
        yield from _read_file(files[records["file"][start]], records[start:stop])


def _read_file(file: InputFile, records: np.ndarray) -> Iterator[bytes]:
    begins = records["offset"]
    ends = begins + records["bytes"]
    with opened(file) as handle:
        for first, last in _runs(begins[1:] - ends[:-1] > _GAP):
            for start, stop in _blocks(begins, ends, first, last):
                begin = int(begins[start])
                handle.seek(begin)
                block = handle.read(int(ends[stop - 1]) - begin)
                for place, end in zip(
                    (begins[start:stop] - begin).tolist(),
                    (ends[start:stop] - begin).tolist(),
                    strict=True,
                ):
                    yield block[place:end]


def _runs(breaks: np.ndarray) -> Iterator[tuple[int, int]]:
    """Cut n things where `breaks` bool [n - 1] is true."""
    edges = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(breaks) + 1]
    return pairwise(edges)


def _blocks(
    begins: np.ndarray, ends: np.ndarray, start: int, last: int
) -> Iterator[tuple[int, int]]:
    """Cut documents `start` to `last` into those read at once: of `_READ` bytes, or of one."""
    while start < last:
        reach = int(np.searchsorted(ends, begins[start] + _READ, side="right"))
        stop = min(max(reach, start + 1), last)
        yield start, stop
        start = stop
