"""Writing one shard: read its documents, tokenise them in batches, commit its files.

A shard counts as committed once its record lies in the progress folder, which is written after its
files are in place. So whatever is interrupted is made again, and what is committed is kept.
"""

import hashlib
import io
import json
import os
import socket
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import numpy as np

from rlt_dist.data.corpus.index import TOKENIZER_NAME, read_entry, token_dtype
from rlt_dist.data.corpus.shard import ShardEntry
from rlt_dist.data.prepare.encode import Encode, Encoded
from rlt_dist.data.prepare.members import tar_end, tar_members
from rlt_dist.data.prepare.placement import Plan
from rlt_dist.data.prepare.survey import Survey
from rlt_dist.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from rlt_dist.util.files import fsync_folder, write_atomic

PROGRESS_NAME = "progress"
_BATCH = 1 << 18
"""Bytes of text that are tokenised at once, or one document if it is longer: what becomes of them
still lies in the processor's cache when it is hashed and written."""


@dataclass(frozen=True)
class Writing:
    """What all shards of a preparation have in common.

    Attributes:
        tokenizer_hash: of the tokenizer that lies in the folder.
        encode: makes texts tokens; a function of a module, for it is sent to other processes.
    """

    folder: Path
    survey: Survey
    tokenizer_hash: str
    encode: Encode


def write_shard(writing: Writing, plan: Plan) -> ShardEntry:
    """Write and commit one shard: a task for any process that sees the folder.

    Raises:
        UserError: a document can no longer be read.
        OSError: the folder cannot be written; nothing of the shard is left in it.
    """
    tokenizer = _tokenizer(writing.folder / TOKENIZER_NAME, writing.tokenizer_hash)
    texts = writing.survey.read(plan.ordinals)
    documents = (writing.encode(batch, tokenizer) for batch in _batches(texts))
    entry = write_documents(writing.folder, plan.name, plan.ordinals, documents, tokenizer)
    write_atomic(_record(writing.folder, plan.name), json.dumps(asdict(entry)))
    return entry


def write_documents(
    folder: Path,
    name: str,
    ordinals: np.ndarray,
    documents: Iterable[Encoded],
    tokenizer: Tokenizer,
) -> ShardEntry:
    """Write a shard's tar and sidecar.

    Args:
        ordinals: of all its documents, int64, ascending.
        documents: batches of them, all with labels or all without.

    Raises:
        OSError: the folder cannot be written; nothing of the shard is left in it.
    """
    tar = folder / f"{name}.tar"
    # Another process may still be at it: one whose leader was killed a moment ago.
    partial = folder / f".{name}.{socket.gethostname()}-{os.getpid()}.partial"
    try:
        with partial.open("wb", buffering=0) as handle:
            table, size, sha256 = _write_tar(handle, ordinals, documents, tokenizer)
            os.fsync(handle.fileno())
        os.replace(partial, tar)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    fsync_folder(folder)
    stream = io.BytesIO()
    np.save(stream, table)
    sidecar = stream.getvalue()
    write_atomic(tar.with_suffix(".npy"), sidecar)
    return ShardEntry(
        name=name,
        documents=len(table),
        tokens=int(table["tokens"].sum()),
        bytes=int(table["bytes"].sum()),
        tar_size=size,
        tar_sha256=sha256,
        sidecar_size=len(sidecar),
        sidecar_sha256=hashlib.sha256(sidecar).hexdigest(),
    )


def committed(folder: Path, name: str) -> ShardEntry | None:
    """A shard that an earlier start committed and whose files are still there."""
    record = _record(folder, name)
    if not record.exists():
        return None
    entry = read_entry(json.loads(record.read_bytes()))
    sizes = {folder / entry.tar: entry.tar_size, folder / entry.sidecar: entry.sidecar_size}
    whole = all(path.is_file() and path.stat().st_size == size for path, size in sizes.items())
    return entry if whole else None


def _record(folder: Path, name: str) -> Path:
    return folder / PROGRESS_NAME / f"{name}.json"


@lru_cache(maxsize=1)
def _tokenizer(path: Path, content_hash: str) -> Tokenizer:  # noqa: ARG001
    """Loaded once a process; the hash tells one from another that lay there before."""
    return load_tokenizer(path)


def _write_tar(
    handle: BinaryIO, ordinals: np.ndarray, documents: Iterable[Encoded], tokenizer: Tokenizer
) -> tuple[np.ndarray, int, str]:
    """Write a whole tar; gives its `DOCUMENT` [documents], its size and its SHA-256."""
    digest = hashlib.sha256()
    tables: list[np.ndarray] = []
    size = first = 0
    for some in documents:
        dtype = token_dtype(tokenizer.vocabulary, some.labels is not None)
        keys = ordinals[first : first + len(some.lengths)]
        content, table = tar_members(
            keys, some.ids, some.lengths, tokenizer.end_of_text, dtype, some.labels
        )
        table["offset"] += size
        table["bytes"] = some.bytes
        tables.append(table)
        _write(handle, content.data)
        digest.update(content.data)
        size += len(content)
        first += len(keys)
    end = tar_end(size)
    _write(handle, memoryview(end))
    digest.update(end)
    return np.concatenate(tables), size + len(end), digest.hexdigest()


def _write(handle: BinaryIO, content: memoryview) -> None:
    """Write all of it: a file system may take less at a time."""
    while content:
        content = content[handle.write(content) :]


def _batches(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text)
        if size >= _BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
