"""A labelled corpus from arrays: for supervised tasks, whose documents no text is made of.

Its tokenizer names the symbols, and a generator gives the documents:

    tokenizer = WordsTokenizer([b"0", b"1"])  # ids 3 and 4: three special ones come first
    corpus = write_labelled(output, tokenizer, {"train": ((tokens, targets) for ...), ...})

A run then reads `output` as any other corpus; nothing but the targets differs.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TypeVar

import numpy as np

from rlt_dist.data.corpus.index import TOKENIZER_NAME, CorpusIndex, load_corpus, write_index
from rlt_dist.data.corpus.shard import ShardEntry
from rlt_dist.data.corpus.sources import write_sources
from rlt_dist.data.prepare.encode import UNSCORED, Encoded
from rlt_dist.data.prepare.writer import write_documents
from rlt_dist.data.tokenizers.tokenizer import Tokenizer
from rlt_dist.util.files import atomic_folder

Labelled = tuple[np.ndarray, np.ndarray]
"""A document: its tokens, int [n], without end-of-text; and the target of each, int [n]."""

T = TypeVar("T")

_BATCH = 1 << 10
"""Documents that are written at once."""


def write_labelled(
    output: Path,
    tokenizer: Tokenizer,
    splits: Mapping[str, Iterable[Labelled]],
    *,
    of_shard: int = 1 << 14,
) -> CorpusIndex:
    """Make the corpus folder `output`, whole or not at all.

    An end-of-text with no target of its own is put at each document's end.

    Args:
        splits: the documents of each. A document's target i is the id that is to be predicted
            after its token i, or `UNSCORED`.
        of_shard: documents of a shard.

    Raises:
        UserError: the folder holds something.
        ValueError: a split has no document; or a document no token, an id that is not in the
            vocabulary, or not as many targets as tokens.
    """
    with atomic_folder(output) as folder:
        tokenizer.save(folder / TOKENIZER_NAME)
        entries: dict[str, list[ShardEntry]] = {}
        sources: list[tuple[str, int]] = []
        for name, documents in splits.items():
            before = sum(count for _, count in sources)
            entries[name] = list(_write_split(folder, name, documents, tokenizer, before, of_shard))
            sources.append((name, sum(entry.documents for entry in entries[name])))
            if not entries[name]:
                raise ValueError(f"split {name!r} has no document")
        write_sources(folder, sources)
        write_index(folder, tokenizer, entries, {}, labelled=True)
    return load_corpus(output)


def _write_split(
    folder: Path,
    split: str,
    documents: Iterable[Labelled],
    tokenizer: Tokenizer,
    ordinal: int,
    of_shard: int,
) -> Iterator[ShardEntry]:
    """Write a split's shards; `ordinal` is its first document's."""
    sizes = tokenizer.byte_lengths()
    for number, some in enumerate(_batched(documents, of_shard)):
        ordinals = np.arange(ordinal, ordinal + len(some))
        parts = (_joined(part, sizes) for part in _batched(some, _BATCH))
        yield write_documents(folder, f"{split}-{number:06d}", ordinals, parts, tokenizer)
        ordinal += len(some)


def _joined(documents: list[Labelled], sizes: np.ndarray) -> Encoded:
    """Documents one after another; `sizes` are the bytes of each id of the vocabulary."""
    lengths = np.array([len(tokens) for tokens, _ in documents], np.int64)
    ids = np.concatenate([tokens for tokens, _ in documents])
    labels = np.concatenate([targets for _, targets in documents])
    if not lengths.all() or any(len(tokens) != len(targets) for tokens, targets in documents):
        raise ValueError("a document has no token, or not as many targets as tokens")
    if min(ids.min(), labels.min() - UNSCORED) < 0 or max(ids.max(), labels.max()) >= len(sizes):
        raise ValueError(f"ids must lie in [0, {len(sizes)}), targets there or be {UNSCORED}")
    begins = np.cumsum(lengths) - lengths
    return Encoded(ids, lengths, np.add.reduceat(sizes[ids], begins), labels)


def _batched(items: Iterable[T], size: int) -> Iterator[list[T]]:
    """Lists of `size` of them, the last one shorter."""
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some
