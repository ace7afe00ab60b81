"""Writing shards: where each document goes, and webdataset tars that are whole or absent.

Where a document goes depends on nothing but the sizes of the documents before it, never on their
tokens. So a run that was killed can skip what is committed without tokenising it again, and several
workers can each make whole shards.
"""

import io
import json
import math
import os
import tarfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fractions import Fraction
from math import lcm
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self
from zlib import crc32

import numpy as np

from rlt_dist.data.corpus.index import read_entry, token_dtype
from rlt_dist.data.corpus.shard import DOCUMENT, ShardEntry
from rlt_dist.data.prepare.sources import Document
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import fsync_folder, remove_folder, sha256_file, write_atomic

PROGRESS_NAME = "progress"
_KEY_DIGITS = 10


class Encoder(Protocol):
    """What a writer needs of a tokenizer."""

    @property
    def vocabulary(self) -> int:
        """Number of token ids."""

    @property
    def end_of_text(self) -> int:
        """The id that ends every document."""

    def encode(self, text: bytes) -> np.ndarray:
        """Token ids int32 [n] of a text, without end-of-text."""


@dataclass(frozen=True)
class Place:
    """Where one document goes; `last`: it fills its shard, which is then closed."""

    split: str
    shard: int
    last: bool


class Placement:
    """Gives each document, in order, its split and its shard.

    A document goes to the split furthest behind its share of the documents (the first such split
    on a tie); a shard is closed by the document with which its text reaches `shard_bytes`.
    """

    def __init__(self, shares: Mapping[str, float], shard_bytes: int) -> None:
        """Raises UserError: the shares are negative, do not add up to 1, or leave out train."""
        self._weights = _whole_weights(shares)
        self._shard_bytes = shard_bytes
        self.counts = {name: 0 for name, weight in self._weights.items() if weight}
        self._shard = dict.fromkeys(self.counts, 0)
        self._filled = dict.fromkeys(self.counts, 0)

    def place(self, size: int) -> Place:
        """The place of the next document, of `size` bytes."""
        total = sum(self._weights.values())
        seen = 1 + sum(self.counts.values())
        # Whole numbers: the shares stay exact however many documents there are.
        split = max(
            self.counts, key=lambda name: self._weights[name] * seen - self.counts[name] * total
        )
        self.counts[split] += 1
        shard = self._shard[split]
        self._filled[split] += size
        last = self._filled[split] >= self._shard_bytes
        if last:
            self._shard[split] += 1
            self._filled[split] = 0
        return Place(split, shard, last)


def _whole_weights(shares: Mapping[str, float]) -> dict[str, int]:
    """Whole numbers in the proportions of decimal shares."""
    shown = ", ".join(f"{name} {share}" for name, share in shares.items())
    if not all(map(math.isfinite, shares.values())):
        raise UserError(f"the splits' shares ({shown}) must be numbers from 0 to 1")
    exact = {name: Fraction(str(share)) for name, share in shares.items()}
    if sum(exact.values()) != 1 or min(exact.values()) < 0:
        raise UserError(f"the splits' shares ({shown}) must be at least 0 and add up to 1")
    if not exact.get("train"):
        raise UserError(f"the splits' shares ({shown}) must leave something to train")
    common = lcm(*(share.denominator for share in exact.values()))
    return {name: int(share * common) for name, share in exact.items()}


def shard_name(split: str, number: int) -> str:
    """The name of a split's shard, without suffix."""
    return f"{split}-{number:06d}"


class ShardWriter:
    """Writes one shard under a temporary name; `commit` makes it real, `discard` removes it."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype) -> None:
        self._name = name
        self._dtype = dtype
        self._path = folder / f"{name}.tar"
        self._partial = folder / f".{name}.tar.partial"
        self._handle = self._partial.open("wb")
        self._tar = tarfile.TarFile(fileobj=self._handle, mode="w", format=tarfile.USTAR_FORMAT)
        self._documents: list[tuple[int, int, int, int]] = []

    def add(self, ordinal: int, document: Document, tokens: np.ndarray) -> None:
        """Append a document. `tokens` int [n] ends with end-of-text; `ordinal` is its key."""
        tokens = tokens.astype(self._dtype)
        about = (self._handle.tell(), len(tokens), len(document.text), crc32(tokens.data))
        self._documents.append(about)
        stream = io.BytesIO()
        np.lib.format.write_array(stream, tokens, allow_pickle=False)
        self._add_member(f"{ordinal:0{_KEY_DIGITS}d}.npy", stream.getvalue())

    def commit(self) -> ShardEntry:
        """Flush the shard and its sidecar to disk and rename them into place."""
        self._tar.close()
        self._handle.flush()
        os.fsync(self._handle.fileno())
        self._handle.close()
        os.replace(self._partial, self._path)
        fsync_folder(self._path.parent)
        documents = np.array(self._documents, DOCUMENT)
        stream = io.BytesIO()
        np.save(stream, documents)
        sidecar = self._path.with_suffix(".npy")
        write_atomic(sidecar, stream.getvalue())
        return ShardEntry(
            name=self._name,
            documents=len(documents),
            tokens=int(documents["tokens"].sum()),
            bytes=int(documents["bytes"].sum()),
            tar_size=self._path.stat().st_size,
            tar_sha256=sha256_file(self._path),
            sidecar_size=sidecar.stat().st_size,
            sidecar_sha256=sha256_file(sidecar),
        )

    def discard(self) -> None:
        """Remove what was written."""
        # First, for closing may fail where the disk is full.
        self._partial.unlink(missing_ok=True)
        self._handle.close()

    def _add_member(self, name: str, content: bytes) -> None:
        # TarInfo's own defaults (no time, no owner) make equal input give equal bytes.
        member = tarfile.TarInfo(name)
        member.size = len(content)
        self._tar.addfile(member, io.BytesIO(content))


class CorpusWriter:
    """Writes documents into the shards of their splits, leaving out shards already committed.

    A shard counts as committed once its entry lies in the progress folder, which is written after
    its files are in place. Used as a context, it removes the shards that are open when an error
    passes.
    """

    def __init__(self, folder: Path, tokenizer: Encoder, placement: Placement) -> None:
        self._folder = folder
        self._progress = folder / PROGRESS_NAME
        self._progress.mkdir(exist_ok=True)
        self._tokenizer = tokenizer
        self._placement = placement
        self._dtype = token_dtype(tokenizer.vocabulary)
        self._open: dict[str, ShardWriter] = {}
        self._done = self._read_progress()
        self.documents = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with ExitStack() as discards:  # each of them, even if one fails on a full disk
            for writer in self._open.values():
                discards.callback(writer.discard)

    def add(self, document: Document) -> int:
        """Write the next document; gives the number of tokens written, 0 if it was skipped."""
        ordinal = self.documents
        self.documents += 1
        place = self._placement.place(len(document.text))
        name = shard_name(place.split, place.shard)
        if name in self._done:
            return 0
        if name not in self._open:
            self._open[name] = ShardWriter(self._folder, name, self._dtype)
        tokens = np.append(self._tokenizer.encode(document.text), self._tokenizer.end_of_text)
        self._open[name].add(ordinal, document, tokens)
        if place.last:
            self._commit(name)
        return len(tokens)

    def finish(self) -> dict[str, list[ShardEntry]]:
        """Commit the shards still open; gives every split's shards in order."""
        for name in list(self._open):
            self._commit(name)
        splits: dict[str, list[ShardEntry]] = {name: [] for name in self._placement.counts}
        for name, entry in self._done.items():
            splits[name.rpartition("-")[0]].append(entry)
        for entries in splits.values():
            entries.sort(key=lambda entry: int(entry.name.rpartition("-")[2]))
        return splits

    def _commit(self, name: str) -> None:
        entry = self._open[name].commit()
        del self._open[name]
        write_atomic(self._progress / f"{name}.json", json.dumps(asdict(entry)))
        self._done[name] = entry

    def _read_progress(self) -> dict[str, ShardEntry]:
        records = sorted(self._progress.glob("[!.]*.json"))
        entries = [read_entry(json.loads(record.read_bytes())) for record in records]
        return {entry.name: entry for entry in entries if self._is_whole(entry)}

    def _is_whole(self, entry: ShardEntry) -> bool:
        sizes = {entry.tar: entry.tar_size, entry.sidecar: entry.sidecar_size}
        files = {self._folder / name: size for name, size in sizes.items()}
        return all(path.is_file() and path.stat().st_size == size for path, size in files.items())


def forget_progress(folder: Path) -> None:
    """Remove the progress of a corpus whose index is written."""
    remove_folder(folder / PROGRESS_NAME)
