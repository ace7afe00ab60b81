"""Is a corpus still what its index says? Every byte of it is read, in both ways there are."""

import tarfile
from collections.abc import Iterator
from hashlib import file_digest, sha256
from io import BytesIO

import numpy as np

from rlt_dist.data.corpus.index import read_content, read_tokenizer, shard_of
from rlt_dist.data.corpus.shard import Shard, tokens_and_labels, unscored
from rlt_dist.data.corpus.sources import SOURCES_NAME
from rlt_dist.data.corpus.storage import REPAIR, Storage, open_file
from rlt_dist.data.standing import Standing, Watch
from rlt_dist.data.tokenizers.tokenizer import Tokenizer
from rlt_dist.util.errors import UserError


def verify_corpus(storage: Storage, watch: Watch = lambda _: None) -> Iterator[str]:
    """Check every shard: sizes, hashes, and each document; gives one line per damaged shard.

    A remote corpus comes through the cache, whose copies are what is read.

    Args:
        watch: called after every shard.

    Raises:
        UserError: the index, the tokenizer or the list of sources is missing or damaged.
    """
    content = read_content(storage)
    tokenizer = read_tokenizer(storage, content.tokenizer)
    if sha256(storage.read(SOURCES_NAME)).hexdigest() != content.sources_sha256:
        path = storage.address(SOURCES_NAME)
        raise UserError(f"{path}: is damaged, its SHA-256 is not the index's; {REPAIR}")
    entries = [entry for shards in content.splits.values() for entry in shards]
    total, done, documents, tokens = sum(entry.tar_size for entry in entries), 0, 0, 0
    watch(Standing("verifying", 0, total, 0, 0))
    for entry in entries:
        try:
            _verify_shard(shard_of(storage, entry, content), tokenizer)
        except UserError as error:
            yield str(error)
        done += entry.tar_size
        documents += entry.documents
        tokens += entry.tokens
        watch(Standing("verifying", done, total, documents, tokens))


def _verify_shard(shard: Shard, tokenizer: Tokenizer) -> None:
    shard.check()
    documents = shard.sidecar()
    _verify_hash(shard)
    lengths = tokenizer.byte_lengths()
    members = _members(shard)
    key = ""
    for number, document in enumerate(shard.read(0, len(documents))):
        size = int(documents["bytes"][number]) if tokenizer.lossless else None
        if wrong := _wrong_document(document, size, lengths):
            raise _damaged(shard, f"document {number} {wrong}")
        name, offset, plain = next(members, ("", -1, None))
        if name <= key or offset != documents["offset"][number]:
            raise _damaged(shard, f"document {number} is no member where the sidecar says")
        if plain is None or plain.dtype != document.dtype or not np.array_equal(plain, document):
            raise _damaged(shard, f"document {number} is another one to a plain reader of tars")
        key = name
    if extra := next(members, None):
        raise _damaged(shard, f"the sidecar knows nothing of its member {extra[0]}")


def _verify_hash(shard: Shard) -> None:
    try:
        with open_file(shard.storage, *shard.entry.files[0]) as handle:
            whole = file_digest(handle, "sha256").hexdigest() == shard.entry.tar_sha256
    except OSError as error:
        raise UserError(f"{shard.address}: cannot be read ({error.strerror}); {REPAIR}") from None
    if not whole:
        advice = shard.storage.discard(shard.entry.tar_sha256)
        raise UserError(f"{shard.address}: is damaged, its SHA-256 is not the index's; {advice}")


def _wrong_document(document: np.ndarray, size: int | None, lengths: np.ndarray) -> str | None:
    """What is wrong with a document's tokens or labels, if anything is.

    Args:
        size: bytes of its text; None: the tokens need not stand for as many.
        lengths: of each id of the vocabulary.
    """
    tokens, labels = tokens_and_labels(document)
    if (largest := int(tokens.max())) >= len(lengths):
        return f"holds token {largest}, the vocabulary ends at {len(lengths) - 1}"
    if labels is not None and (labels >= len(lengths))[labels != unscored(labels.dtype)].any():
        return f"holds a label that is no token, the vocabulary ends at {len(lengths) - 1}"
    found = int(lengths[tokens].sum())
    if size not in (None, found):
        return f"decodes to {found} bytes of text, it had {size}"
    return None


def _members(shard: Shard) -> Iterator[tuple[str, int, np.ndarray | None]]:
    """Name, offset and array of each member, by a reader that knows only of tars and NumPy."""
    try:
        with (
            open_file(shard.storage, *shard.entry.files[0]) as handle,
            tarfile.open(fileobj=handle, mode="r:") as tar,
        ):
            for member in tar:
                content = tar.extractfile(member)
                array = np.load(BytesIO(content.read())) if content else None
                yield member.name, member.offset, array
    except (tarfile.TarError, ValueError, EOFError, OSError) as error:
        raise _damaged(shard, f"a plain reader of tars stops at it ({error})") from None


def _damaged(shard: Shard, what: str) -> UserError:
    return UserError(f"{shard.address}: {what}; {REPAIR}")
