"""The shard index: what a prepared corpus holds, and where each document begins.

Layout of a corpus folder:

    index.json            format, tokenizer, and for each split its shards with sizes and hashes
    tokenizer.json        the tokenizer that made the tokens
    train-000000.tar      webdataset shard: whole documents, one a sample
    train-000000.npy      its sidecar: one `DOCUMENT` record per document
    prepare.json          what was asked of `rlt-dist data prepare` (see prepare.py)
    .lock                 held by the process that prepares it
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, Field, ValidationError

from rlt_dist.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import sha256_file, write_atomic

FORMAT = 1
INDEX_NAME = "index.json"
TOKENIZER_NAME = "tokenizer.json"
SPLITS = ("train", "validation", "test")
REPAIR = "restore it, or prepare the corpus again with --overwrite"

Positive = Annotated[int, Field(ge=1)]

# Per document: where its first tar header begins, its tokens (end-of-text included), its raw bytes.
DOCUMENT = np.dtype([("offset", "<i8"), ("tokens", "<i8"), ("bytes", "<i8")])


@dataclass(frozen=True)
class ShardEntry:
    """One shard as index.json lists it. Sizes of files in bytes; `bytes` is raw text."""

    name: Annotated[str, Field(pattern=r"^[a-z]+-[0-9]+$")]
    documents: Positive
    tokens: Positive
    bytes: Positive
    tar_size: Positive
    tar_sha256: str
    sidecar_size: Positive
    sidecar_sha256: str


class About(BaseModel):
    """What index.json says of the tokenizer."""

    hash: str
    vocabulary: Positive
    end_of_text: Annotated[int, Field(ge=0)]


class Content(BaseModel):
    """What index.json holds."""

    format: int
    tokenizer: About
    splits: dict[str, Annotated[list[ShardEntry], Field(min_length=1)]] = Field(min_length=1)
    dropped: dict[str, int]


@dataclass(frozen=True, eq=False)
class ShardIndex:
    """One shard on disk.

    Attributes:
        documents: its sidecar, memory-mapped: `DOCUMENT` [documents].
        vocabulary: every token is less than this.
    """

    entry: ShardEntry
    tar: Path
    documents: np.ndarray
    vocabulary: int


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
        UserError: there is no index, it is of another format or damaged, the tokenizer is not the
            corpus's own, a sidecar is damaged, or a shard is missing or not of the size it had
            when it was written.
    """
    content = read_content(folder)
    check_tokenizer(folder, content.tokenizer)
    vocabulary = content.tokenizer.vocabulary
    return CorpusIndex(
        folder=folder,
        tokenizer_hash=content.tokenizer.hash,
        vocabulary=vocabulary,
        end_of_text=content.tokenizer.end_of_text,
        dropped=content.dropped,
        splits={
            name: SplitIndex(name, tuple(open_shard(folder, each, vocabulary) for each in entries))
            for name, entries in content.splits.items()
        },
        fingerprint=_fingerprint(content),
    )


def read_content(folder: Path) -> Content:
    """Read index.json alone.

    Raises:
        UserError: it is missing, of another format or damaged.
    """
    path = folder / INDEX_NAME
    if not path.is_file():
        raise UserError(f"{path}: no such file; make the corpus with `rlt-dist data prepare`")
    try:
        text = path.read_bytes()
        content = json.loads(text)
    except OSError as error:
        raise _unreadable(path, error) from None
    except (ValueError, RecursionError):
        raise UserError(f"{path}: is damaged, it is not JSON; {REPAIR}") from None
    form = content.get("format", FORMAT) if isinstance(content, dict) else FORMAT
    if form != FORMAT:
        raise UserError(
            f"{path}: is of format {form!r}, this program reads {FORMAT}; "
            f"prepare the corpus again with --overwrite"
        )
    try:
        return Content.model_validate_json(text, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise UserError(f"{path}: is damaged ({place}: {problem['msg']}); {REPAIR}") from None


def check_tokenizer(folder: Path, about: About) -> Tokenizer:
    """The folder's tokenizer, if it is the one that made the corpus.

    Raises:
        UserError: it is missing, damaged, or another one.
    """
    path = folder / TOKENIZER_NAME
    tokenizer = load_tokenizer(path)
    for name, expected in about.model_dump().items():
        if (found := getattr(tokenizer, name)) != expected:
            raise UserError(
                f"{path}: is not the tokenizer that made this corpus: its {name} is {found}, the "
                f"index says {expected}; {REPAIR}"
            )
    return tokenizer


def read_entry(values: Mapping[str, Any]) -> ShardEntry:
    """The entry written by `dataclasses.asdict`.

    Raises:
        KeyError: a field is missing.
    """
    return ShardEntry(**{field.name: values[field.name] for field in fields(ShardEntry)})


def sidecar_of(tar: Path) -> Path:
    """The sidecar beside a shard."""
    return tar.with_suffix(".npy")


def _fingerprint(content: Content) -> str:
    decisive = content.model_dump(exclude={"dropped"})
    canonical = json.dumps(decisive, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def open_shard(folder: Path, entry: ShardEntry, vocabulary: int) -> ShardIndex:
    """Open one shard: both files' sizes are checked, and the sidecar's content.

    Raises:
        UserError: a file is missing or of another size, or the sidecar is damaged.
    """
    tar = folder / f"{entry.name}.tar"
    sidecar = sidecar_of(tar)
    _check_size(tar, entry.tar_size)
    _check_size(sidecar, entry.sidecar_size)
    try:
        if sha256_file(sidecar) != entry.sidecar_sha256:
            raise _damaged(sidecar, "its SHA-256 is not the index's")
        documents = np.load(sidecar, mmap_mode="r")
    except (ValueError, EOFError):
        raise _damaged(sidecar, "it is no array") from None
    except OSError as error:
        raise _unreadable(sidecar, error) from None
    if documents.dtype != DOCUMENT or documents.shape != (entry.documents,):
        raise _damaged(sidecar, "it does not describe the index's documents")
    totals = (int(documents["tokens"].sum()), int(documents["bytes"].sum()))
    if totals != (entry.tokens, entry.bytes) or documents["tokens"].min() < 1:
        raise _damaged(sidecar, "it does not add up to the index's tokens and bytes")
    return ShardIndex(entry, tar, documents, vocabulary)


def _check_size(path: Path, size: int) -> None:
    if not path.is_file():
        raise UserError(f"{path}: this shard file is missing; {REPAIR}")
    actual = path.stat().st_size
    if actual != size:
        raise UserError(f"{path}: holds {actual} bytes where the index says {size}; {REPAIR}")


def _damaged(path: Path, why: str) -> UserError:
    return UserError(f"{path}: is damaged, {why}; {REPAIR}")


def _unreadable(path: Path, error: OSError) -> UserError:
    return UserError(f"{path}: cannot be read ({error.strerror}); make it readable")
