"""The shard index: what a prepared corpus holds, and where each document begins.

Layout of a corpus folder:

    index.json            format, tokenizer, and for each split its shards with sizes and hashes
    tokenizer.json        the tokenizer that made the tokens
    train-000000.tar      webdataset shard: whole documents, one a sample
    train-000000.npy      its sidecar: one `DOCUMENT` record per document
    prepare.json          what was asked of `rlt-dist data prepare` (see prepare.py)
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from rlt_dist.util.errors import UserError
from rlt_dist.util.files import write_atomic

FORMAT = 1
INDEX_NAME = "index.json"
TOKENIZER_NAME = "tokenizer.json"
SPLITS = ("train", "validation", "test")

# Per document: where its first tar header begins, its tokens (end-of-text included), its raw bytes.
DOCUMENT = np.dtype([("offset", "<i8"), ("tokens", "<i8"), ("bytes", "<i8")])


@dataclass(frozen=True)
class ShardEntry:
    """One shard as index.json lists it. Sizes of files in bytes; `bytes` is raw text."""

    name: str
    documents: int
    tokens: int
    bytes: int
    tar_size: int
    tar_sha256: str
    sidecar_size: int
    sidecar_sha256: str


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """One shard on disk; `documents` is its sidecar, memory-mapped: `DOCUMENT` [documents]."""

    entry: ShardEntry
    tar: Path
    documents: np.ndarray


@dataclass(frozen=True, eq=False)
class SplitIndex:
    """One split: its shards in order."""

    name: str
    shards: tuple[ShardIndex, ...]

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(shard.entry.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Number of tokens, the documents' end-of-text tokens included."""
        return sum(shard.entry.tokens for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Number of bytes of raw text."""
        return sum(shard.entry.bytes for shard in self.shards)


@dataclass(frozen=True, eq=False)
class CorpusIndex:
    """A prepared corpus. `fingerprint` is the SHA-256 of all that decides its tokens."""

    folder: Path
    tokenizer_hash: str
    vocabulary: int
    end_of_text: int
    dropped: Mapping[str, int]
    splits: Mapping[str, SplitIndex]
    fingerprint: str

    @property
    def tokenizer(self) -> Path:
        """The saved tokenizer."""
        return self.folder / TOKENIZER_NAME

    def split(self, name: str) -> SplitIndex:
        """The split called `name`.

        Raises:
            UserError: there is none; the message lists those there are.
        """
        if name not in self.splits:
            known = ", ".join(self.splits)
            raise UserError(f"{self.folder}: has no split {name!r}; it has {known}")
        return self.splits[name]


def write_index(
    folder: Path,
    tokenizer: Mapping[str, Any],
    splits: Mapping[str, Sequence[ShardEntry]],
    dropped: Mapping[str, int],
) -> None:
    """Write index.json, which makes the corpus whole.

    Args:
        tokenizer: `hash`, `vocabulary` and `end_of_text`.
        dropped: what was counted and left out; no part of the fingerprint.
    """
    content = {
        "format": FORMAT,
        "tokenizer": dict(tokenizer),
        "splits": {name: [asdict(entry) for entry in entries] for name, entries in splits.items()},
        "dropped": dict(dropped),
    }
    write_atomic(folder / INDEX_NAME, json.dumps(content, indent=1) + "\n")


def load_corpus(folder: Path) -> CorpusIndex:
    """Open a prepared corpus; sidecars are memory-mapped, tars only looked at for their size.

    Raises:
        UserError: there is no index, it is of another format or damaged, or a shard is missing or
            not of the size it had when it was written.
    """
    content = _read_index(folder)
    try:
        tokenizer = content["tokenizer"]
        entries = {
            split: [read_entry(values) for values in shards]
            for split, shards in content["splits"].items()
        }
        return CorpusIndex(
            folder=folder,
            tokenizer_hash=tokenizer["hash"],
            vocabulary=tokenizer["vocabulary"],
            end_of_text=tokenizer["end_of_text"],
            dropped=content["dropped"],
            splits={name: _open_split(folder, name, shards) for name, shards in entries.items()},
            fingerprint=_fingerprint(content),
        )
    except (KeyError, TypeError, AttributeError):
        raise _damaged_index(folder) from None


def read_entry(values: Mapping[str, Any]) -> ShardEntry:
    """The entry written by `dataclasses.asdict`.

    Raises:
        KeyError: a field is missing.
    """
    return ShardEntry(**{field.name: values[field.name] for field in fields(ShardEntry)})


def sidecar_of(tar: Path) -> Path:
    """The sidecar beside a shard."""
    return tar.with_suffix(".npy")


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX_NAME
    if not path.is_file():
        raise UserError(f"{path}: no such file; make the corpus with `rlt-dist data prepare`")
    try:
        content = json.loads(path.read_bytes())
    except ValueError:
        raise _damaged_index(folder) from None
    if not isinstance(content, dict):
        raise _damaged_index(folder)
    if content.get("format") != FORMAT:
        raise UserError(
            f"{path}: is of format {content.get('format')!r}, this program reads {FORMAT}; "
            f"prepare the corpus again"
        )
    return content


def _damaged_index(folder: Path) -> UserError:
    return UserError(f"{folder / INDEX_NAME}: is damaged; prepare the corpus again")


def _fingerprint(content: Mapping[str, Any]) -> str:
    decisive = {key: value for key, value in content.items() if key != "dropped"}
    canonical = json.dumps(decisive, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _open_split(folder: Path, name: str, entries: Sequence[ShardEntry]) -> SplitIndex:
    return SplitIndex(name, tuple(_open_shard(folder, entry) for entry in entries))


def _open_shard(folder: Path, entry: ShardEntry) -> ShardIndex:
    tar = folder / f"{entry.name}.tar"
    sidecar = sidecar_of(tar)
    _check_size(tar, entry.tar_size)
    _check_size(sidecar, entry.sidecar_size)
    try:
        documents = np.load(sidecar, mmap_mode="r")
    except (ValueError, EOFError):
        raise _damaged_sidecar(sidecar) from None
    if documents.dtype != DOCUMENT or documents.shape != (entry.documents,):
        raise _damaged_sidecar(sidecar)
    return ShardIndex(entry, tar, documents)


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise UserError(f"{path}: this shard file is missing; restore it or prepare again")
    actual = path.stat().st_size
    if actual != size:
        raise UserError(
            f"{path}: holds {actual} bytes where the index says {size}; restore it or prepare again"
        )


def _damaged_sidecar(path: Path) -> UserError:
    return UserError(f"{path}: is damaged; restore it or prepare the corpus again")
