"""Is a corpus on disk still what its index says? Every byte of it is read."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from rlt_dist.data.corpus.index import (
    REPAIR,
    Content,
    ShardEntry,
    ShardIndex,
    check_tokenizer,
    open_shard,
    read_content,
)
from rlt_dist.data.prepare.prepare import Standing, Watch
from rlt_dist.data.stream.lane import read_span
from rlt_dist.data.stream.lanes import Span
from rlt_dist.data.tokenizers.tokenizer import Tokenizer
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import sha256_file


def verify_corpus(folder: Path, watch: Watch = lambda _: None) -> Iterator[str]:
    """Check every shard: sizes, hashes, and each document; gives one line per damaged shard.

    Args:
        watch: called after every shard.

    Raises:
        UserError: the index or the tokenizer is missing or damaged.
    """
    content = read_content(folder)
    tokenizer = check_tokenizer(folder, content.tokenizer)
    entries = [entry for shards in content.splits.values() for entry in shards]
    total, done, documents, tokens = sum(entry.tar_size for entry in entries), 0, 0, 0
    watch(Standing("verifying", 0, total, 0, 0))
    for entry in entries:
        try:
            _verify_shard(folder, entry, content, tokenizer)
        except UserError as error:
            yield str(error)
        done += entry.tar_size
        documents += entry.documents
        tokens += entry.tokens
        watch(Standing("verifying", done, total, documents, tokens))


def _verify_shard(folder: Path, entry: ShardEntry, content: Content, tokenizer: Tokenizer) -> None:
    shard = open_shard(folder, entry, content.tokenizer.vocabulary)
    try:
        whole = sha256_file(shard.tar) == entry.tar_sha256
    except OSError as error:
        raise UserError(f"{shard.tar}: cannot be read ({error.strerror}); {REPAIR}") from None
    if not whole:
        raise UserError(f"{shard.tar}: is damaged, its SHA-256 is not the index's; {REPAIR}")
    _verify_documents(shard, tokenizer)


def _verify_documents(shard: ShardIndex, tokenizer: Tokenizer) -> None:
    """Each document is read as training reads it; its tokens stand for as many bytes as it had."""
    lengths = tokenizer.byte_lengths()
    sizes = np.asarray(shard.documents["bytes"])
    documents = read_span(shard, Span(0, 0, len(sizes)), tokenizer.end_of_text)
    for number, tokens in enumerate(documents):
        found = int(lengths[tokens].sum())
        if tokenizer.lossless and found != sizes[number]:
            raise UserError(
                f"{shard.tar}: document {number} decodes to {found} bytes of text, it had "
                f"{sizes[number]}; {REPAIR}"
            )
