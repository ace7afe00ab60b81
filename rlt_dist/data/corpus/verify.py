"""Is a corpus on disk still what its index says? Every byte of it is read."""

from collections.abc import Iterator

import numpy as np

from rlt_dist.data.corpus.index import read_content, read_tokenizer, shard_of
from rlt_dist.data.corpus.shard import Shard
from rlt_dist.data.corpus.storage import REPAIR, Storage
from rlt_dist.data.prepare.prepare import Standing, Watch
from rlt_dist.data.tokenizers.tokenizer import Tokenizer
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import sha256_file


def verify_corpus(storage: Storage, watch: Watch = lambda _: None) -> Iterator[str]:
    """Check every shard: sizes, hashes, and each document; gives one line per damaged shard.

    Args:
        watch: called after every shard.

    Raises:
        UserError: the index or the tokenizer is missing or damaged.
    """
    content = read_content(storage)
    tokenizer = read_tokenizer(storage, content.tokenizer)
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
    sizes = np.asarray(shard.documents["bytes"])
    entry = shard.entry
    tar = shard.storage.fetch(entry.tar, entry.tar_size, entry.tar_sha256)
    try:
        whole = sha256_file(tar) == entry.tar_sha256
    except OSError as error:
        raise UserError(f"{shard.address}: cannot be read ({error.strerror}); {REPAIR}") from None
    if not whole:
        raise UserError(f"{shard.address}: is damaged, its SHA-256 is not the index's; {REPAIR}")
    _verify_documents(shard, sizes, tokenizer)


def _verify_documents(shard: Shard, sizes: np.ndarray, tokenizer: Tokenizer) -> None:
    """Each document is read as training reads it; its tokens stand for as many bytes as it had."""
    lengths = tokenizer.byte_lengths()
    for number, tokens in enumerate(shard.read(0, len(sizes))):
        if (largest := int(tokens.max())) >= tokenizer.vocabulary:
            raise UserError(
                f"{shard.address}: document {number} holds token {largest}, the vocabulary ends "
                f"at {tokenizer.vocabulary - 1}; {REPAIR}"
            )
        found = int(lengths[tokens].sum())
        if tokenizer.lossless and found != sizes[number]:
            raise UserError(
                f"{shard.address}: document {number} decodes to {found} bytes of text, it had "
                f"{sizes[number]}; {REPAIR}"
            )
