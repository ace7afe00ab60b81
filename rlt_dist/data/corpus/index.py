"""The index: what a prepared corpus holds.

Layout of a corpus folder:

    index.json            format, tokenizer, for each split its shards with sizes and hashes, the
                          hash of sources.json, `labelled` if it is, and a hash over all of this
    tokenizer.json        the tokenizer that made the tokens
    train-000000.tar      a shard (see shard.py): whole documents, one a sample
    train-000000.npy      its sidecar: where each document begins, and its checksum
    sources.json          [[input, documents], ...]: every input's name and number of documents, in
                          order. The ordinal that names a document's member of a tar counts through
                          them all, empty ones too, so it tells which document of which input it is
    prepare.json          what was asked of `rlt-dist data prepare` (see request.py)
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

from rlt_dist.data.corpus.location import open_storage
from rlt_dist.data.corpus.shard import Positive, Shard, ShardEntry
from rlt_dist.data.corpus.sources import SOURCES_NAME
from rlt_dist.data.corpus.storage import (
    DEFAULT_OPTIONS,
    REPAIR,
    RemoteOptions,
    Storage,
)
from rlt_dist.data.tokenizers.base import content_hash
from rlt_dist.data.tokenizers.tokenizer import Tokenizer, parse_tokenizer
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import sha256_file, write_atomic

FORMAT = 2
INDEX_NAME = "index.json"
TOKENIZER_NAME = "tokenizer.json"
SPLITS = ("train", "validation", "test")
_SHORT = 1 << 16


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
    sources_sha256: str
    labelled: bool = False
    hash: str


@dataclass(frozen=True, eq=False)
class SplitIndex:
    """One split: its shards in order."""

    name: str
    shards: tuple[Shard, ...]

    @property
    def address(self) -> str:
        """Which corpus' split it is, for messages."""
        return f"{self.shards[0].storage.location}: split {self.name!r}"

    @property
    def labelled(self) -> bool:
        """Whether each token has a label: what is to be predicted after it."""
        return self.shards[0].labelled

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
    """A prepared corpus.

    Attributes:
        tokenizer: the one that made its tokens.
        fingerprint: SHA-256 of all that decides its tokens.
    """

    storage: Storage
    tokenizer: Tokenizer
    dropped: Mapping[str, int]
    splits: Mapping[str, SplitIndex]
    fingerprint: str

    @property
    def location(self) -> str:
        """Path or address of its folder."""
        return self.storage.location

    def split(self, name: str) -> SplitIndex:
        """The split called `name`.

        Raises:
            UserError: there is none; the message lists those there are.
        """
        if name not in self.splits:
            known = ", ".join(self.splits)
            raise UserError(f"{self.location}: has no split {name!r}; it has {known}")
        return self.splits[name]


def write_index(
    folder: Path,
    tokenizer: Tokenizer,
    splits: Mapping[str, Sequence[ShardEntry]],
    dropped: Mapping[str, int],
    *,
    labelled: bool = False,
) -> None:
    """Write index.json, which makes the corpus whole: all its other files lie there.

    Args:
        dropped: what was counted and left out or cut; no part of the fingerprint.
    """
    content = {
        "format": FORMAT,
        "tokenizer": {name: getattr(tokenizer, name) for name in About.model_fields},
        "splits": {name: [asdict(entry) for entry in entries] for name, entries in splits.items()},
        "dropped": dict(dropped),
        "sources_sha256": sha256_file(folder / SOURCES_NAME),
        **({"labelled": True} if labelled else {}),
    }
    content["hash"] = content_hash(content)
    write_atomic(folder / INDEX_NAME, json.dumps(content, indent=1) + "\n")


def load_corpus(
    location: str | Path, remote: RemoteOptions = DEFAULT_OPTIONS, *, check: bool = True
) -> CorpusIndex:
    """Open a prepared corpus; of its shards only the files' sizes are looked at.

    Args:
        location: a path or an address (see `open_storage`).
        remote: how files are brought from an address.
        check: look for every shard's files; else a missing one is found when it is read.

    Raises:
        UserError: there is no index, it is of another format or damaged, the tokenizer is not the
            corpus's own, or a shard is missing or not of the size it had when it was written.
    """
    storage = open_storage(location, remote)
    content = read_content(storage)
    corpus = CorpusIndex(
        storage=storage,
        tokenizer=read_tokenizer(storage, content.tokenizer),
        dropped=content.dropped,
        splits={
            name: SplitIndex(name, tuple(shard_of(storage, entry, content) for entry in entries))
            for name, entries in content.splits.items()
        },
        fingerprint=_fingerprint(content),
    )
    if check:
        _check_files(storage, content)
    return corpus


def _check_files(storage: Storage, content: Content) -> None:
    entries = [entry for shards in content.splits.values() for entry in shards]
    problems = storage.check_all([file for entry in entries for file in entry.files])
    if problems:
        first, *others = problems.values()
        more = f"; so it is with {len(others)} more files" if others else ""
        raise UserError(first + more)


def read_content(storage: Storage) -> Content:
    """Read index.json alone.

    Raises:
        UserError: it is missing, of another format or damaged.
    """
    path = storage.address(INDEX_NAME)
    text = storage.read(INDEX_NAME)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{path}: is damaged, it is not JSON; {REPAIR}") from None
    form = content.get("format", FORMAT) if isinstance(content, dict) else FORMAT
    if form != FORMAT:
        raise UserError(
            f"{path}: is of format {form!r}, this program reads {FORMAT}; "
            f"prepare the corpus again with --overwrite"
        )
    try:
        valid = Content.model_validate_json(text, strict=True)
    except ValidationError as error:
        problem = error.errors()[0]
        place = ".".join(map(str, problem["loc"]))
        raise UserError(f"{path}: is damaged ({place}: {problem['msg']}); {REPAIR}") from None
    if content_hash(content) != valid.hash:
        raise UserError(f"{path}: is damaged, its hash does not match; {REPAIR}")
    return valid


def read_tokenizer(storage: Storage, about: About) -> Tokenizer:
    """The folder's tokenizer, if it is the one that made the corpus.

    Raises:
        UserError: it is missing, damaged, or another one.
    """
    path = storage.address(TOKENIZER_NAME)
    tokenizer = parse_tokenizer(storage.read(TOKENIZER_NAME), path)
    for name, expected in about.model_dump().items():
        if (found := getattr(tokenizer, name)) != expected:
            raise UserError(
                f"{path}: is not the tokenizer that made this corpus: its {name} is {found}, the "
                f"index says {expected}; {REPAIR}"
            )
    return tokenizer


def shard_of(storage: Storage, entry: ShardEntry, content: Content) -> Shard:
    """A shard of the corpus that `content` describes; nothing is opened."""
    dtype = token_dtype(content.tokenizer.vocabulary, content.labelled)
    return Shard(entry, storage, dtype, content.tokenizer.end_of_text, content.labelled)


def token_dtype(vocabulary: int, labelled: bool) -> np.dtype:
    """How the tokens of a vocabulary are kept; labels need one more number."""
    return np.dtype("<u2" if vocabulary + labelled <= _SHORT else "<u4")


def read_entry(values: Mapping[str, Any]) -> ShardEntry:
    """The entry written by `dataclasses.asdict`.

    Raises:
        KeyError: a field is missing.
    """
    return ShardEntry(**{field.name: values[field.name] for field in fields(ShardEntry)})


def _fingerprint(content: Content) -> str:
    left_out = {"dropped", "sources_sha256", "hash"}
    decisive = content.model_dump(exclude=left_out, exclude_defaults=True)
    canonical = json.dumps(decisive, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()
