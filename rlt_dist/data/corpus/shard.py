"""One shard: a webdataset tar of whole documents, and a sidecar that says where each begins.

Every document is one member of the tar, `ORDINAL.npy`: its tokens, end-of-text included, as a
NumPy array [n] of unsigned 16- or 32-bit integers, little-endian. In a labelled corpus it is an
array [2, n], and its second row says of each token what is to be predicted after it, or, by the
type's largest number, that nothing is. Any webdataset reader can read it; this one takes each
document from where the sidecar says it is, and holds it to the sidecar's checksum. The sidecar
itself is held to the index's hash.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO, FileIO
from typing import Annotated
from zlib import crc32

import numpy as np
from pydantic import Field

from rlt_dist.data.corpus.storage import REPAIR, BadShard, File, Storage, bad_shard, open_file

Positive = Annotated[int, Field(ge=1)]

DOCUMENT = np.dtype([("offset", "<i8"), ("tokens", "<i8"), ("bytes", "<i8"), ("checksum", "<u4")])
"""Per document: where its tar header begins, how many tokens and bytes of raw text it has, and the
CRC-32 of its tokens, and labels, as they lie in the tar."""

TAR_HEADER, NPY_HEADER = 512, 128
"""Bytes before a document's tokens: its member's header, and that of its array."""

_BLOCK = 1 << 18
"""Bytes read at once, or one document if it is longer."""


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

    @property
    def tar(self) -> str:
        """Name of its tar."""
        return f"{self.name}.tar"

    @property
    def sidecar(self) -> str:
        """Name of its sidecar."""
        return f"{self.name}.npy"

    @property
    def files(self) -> tuple[File, File]:
        """Its tar and its sidecar."""
        return (
            (self.tar, self.tar_size, self.tar_sha256),
            (self.sidecar, self.sidecar_size, self.sidecar_sha256),
        )


@dataclass(frozen=True, eq=False)
class Shard:
    """A shard that can be read.

    Attributes:
        dtype: of its tokens.
        end_of_text: the token that ends every document.
        labelled: whether each token has a label.
    """

    entry: ShardEntry
    storage: Storage
    dtype: np.dtype
    end_of_text: int
    labelled: bool

    @property
    def address(self) -> str:
        """Path or address of its tar, for messages."""
        return self.storage.address(self.entry.tar)

    def sidecar(self) -> np.ndarray:
        """Its sidecar, read now: `DOCUMENT` [documents].

        Nobody keeps it whole: those of all shards of a large corpus would fill the memory.

        Raises:
            BadShard: the sidecar is missing or damaged.
        """
        entry = self.entry
        try:
            with open_file(self.storage, *entry.files[1]) as handle:
                content = handle.read()
            if sha256(content).hexdigest() != entry.sidecar_sha256:
                raise self._damaged_sidecar("its SHA-256 is not the index's")
            documents = np.load(BytesIO(content))
        except (ValueError, EOFError):
            raise self._damaged_sidecar("it is no array") from None
        except OSError as error:
            raise bad_shard(self.storage.address(entry.sidecar), error) from error
        if documents.dtype != DOCUMENT or documents.shape != (entry.documents,):
            raise self._damaged_sidecar("it does not describe the index's documents")
        totals = (int(documents["tokens"].sum()), int(documents["bytes"].sum()))
        if totals != (entry.tokens, entry.bytes) or documents["tokens"].min() < 1:
            raise self._damaged_sidecar("it does not add up to the index's tokens and bytes")
        return documents

    def check(self) -> None:
        """See that its files are there and of the right size.

        Raises:
            UserError: one is not.
        """
        for name, size, _ in self.entry.files:
            self.storage.check(name, size)

    def prefetch(self) -> None:
        """Begin to bring its files here, if they are elsewhere; `read` waits for them."""
        for file in self.entry.files:
            self.storage.prefetch(*file)

    def read(self, first: int, last: int) -> Iterator[np.ndarray]:
        """Documents `first` to `last` (exclusive): `dtype` [n], or [2, n] if labelled, read-only.

        `tokens_and_labels` takes such an array apart.

        Raises:
            BadShard: the shard is missing or damaged; the message names the document.
            UserError: it cannot be brought here.
        """
        documents = self.sidecar()[first:last].copy()
        begins = documents["offset"] + (TAR_HEADER + NPY_HEADER)
        ends = begins + documents["tokens"] * (self.dtype.itemsize * (1 + self.labelled))
        try:
            with open_file(self.storage, *self.entry.files[0]) as handle:
                for start, stop in _blocks(begins, ends):
                    handle.seek(int(begins[start]))
                    block = memoryview(_read(handle, int(ends[stop - 1] - begins[start])))
                    places = begins[start:stop] - begins[start]
                    checksums = documents["checksum"][start:stop].tolist()
                    sizes = (ends - begins)[start:stop].tolist()
                    number = first + start
                    for place, size, checksum in zip(
                        places.tolist(), sizes, checksums, strict=True
                    ):
                        yield self._checked(block[place : place + size], number, checksum)
                        number += 1
        except OSError as error:
            raise bad_shard(self.address, error) from error

    def ordinals(self, first: int, last: int) -> list[int]:
        """The places of some documents among all documents of all inputs (sources.py).

        Raises:
            BadShard: the shard is missing or damaged.
        """
        found: list[int] = []
        try:
            with open_file(self.storage, *self.entry.files[0]) as handle:
                for offset in self.sidecar()["offset"][first:last].tolist():
                    handle.seek(offset)
                    found.append(int(handle.read(TAR_HEADER).partition(b".npy")[0]))
        except OSError as error:
            raise bad_shard(self.address, error) from error
        except ValueError:
            raise BadShard(
                f"{self.address}: is damaged, document {first + len(found)} has no number; {REPAIR}"
            ) from None
        return found

    def _checked(self, content: memoryview, document: int, checksum: int) -> np.ndarray:
        if crc32(content) != checksum:
            raise BadShard(
                f"{self.address}: is damaged, document {document} has another checksum than when "
                f"it was written; {self.storage.discard(self.entry.tar_sha256)}"
            )
        found = tokens = np.frombuffer(content, self.dtype)
        if self.labelled:
            found = tokens.reshape(2, -1)
            tokens = found[0]
        if tokens[-1] != self.end_of_text:
            raise BadShard(
                f"{self.address}: document {document} does not end with the end-of-text token "
                f"{self.end_of_text}; the corpus was made with another tokenizer"
            )
        return found

    def _damaged_sidecar(self, why: str) -> BadShard:
        address = self.storage.address(self.entry.sidecar)
        advice = self.storage.discard(self.entry.sidecar_sha256)
        return BadShard(f"{address}: is damaged, {why}; {advice}")


def tokens_and_labels(document: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """A document's tokens, [n], and its labels, [n], if it has any."""
    return (document, None) if document.ndim == 1 else (document[0], document[1])


def unscored(dtype: np.dtype) -> int:
    """The label of a token after which nothing is to be predicted."""
    return int(np.iinfo(dtype).max)


def _read(handle: FileIO, size: int) -> bytes:
    """`size` bytes, or all there are: a system gives 2 GiB at most, and some file systems less."""
    content = handle.read(size)
    while len(content) < size and (more := handle.read(size - len(content))):
        content += more
    return content


def _blocks(begins: np.ndarray, ends: np.ndarray) -> Iterator[tuple[int, int]]:
    """Cut documents into runs that are read at once: of `_BLOCK` bytes, or of one document."""
    start = 0
    while start < len(begins):
        stop = int(np.searchsorted(ends, begins[start] + _BLOCK, side="right"))
        yield start, (stop := max(stop, start + 1))
        start = stop
