"""Object stores, as fsspec reads them."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from rlt_dist.data.corpus.index import CorpusIndex, load_corpus
from rlt_dist.data.corpus.location import open_storage
from rlt_dist.data.corpus.shard import Shard
from rlt_dist.data.corpus.storage import RemoteOptions
from rlt_dist.util.errors import UserError

ONE = "train-000001.tar"


def tokens_of(shard: Shard) -> list[int]:
    return np.concatenate(list(shard.read(0, shard.entry.documents))).tolist()


def shards_of(corpus: CorpusIndex) -> list[Shard]:
    return [shard for split in corpus.splits.values() for shard in split.shards]


@pytest.fixture
def memory(small_corpus: Path) -> Iterator[Any]:
    """The corpus in fsspec's memory, which stands for an object store."""
    store = fsspec.filesystem("memory")
    for path in small_corpus.iterdir():
        if path.is_file():
            store.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    yield store
    store.rm("/bucket", recursive=True)


def test_a_store_of_objects_is_read_the_same(
    memory: Any, options: RemoteOptions, local: CorpusIndex
) -> None:
    corpus = load_corpus("memory://bucket", options)
    for far, near in zip(shards_of(corpus), shards_of(local), strict=True):
        far.prefetch()
        assert tokens_of(far) == tokens_of(near)
    fresh = replace(options, cache=options.cache / "fresh")
    corpus = load_corpus("memory://bucket", fresh)
    memory.pipe_file(f"/bucket/{ONE}", b"\0" * corpus.split("train").shards[1].entry.tar_size)
    with pytest.raises(UserError, match=rf"memory://bucket/{ONE}: its SHA-256 is not the index's"):
        tokens_of(corpus.split("train").shards[1])
    memory.rm_file(f"/bucket/{ONE}")
    with pytest.raises(UserError, match=rf"memory://bucket/{ONE}: this shard file is missing"):
        tokens_of(corpus.split("train").shards[1])
    with pytest.raises(UserError, match=rf"memory://bucket/{ONE}: this shard file is missing"):
        load_corpus("memory://bucket", fresh)


def test_a_store_that_hangs_or_refuses_is_one_error(
    memory: Any, options: RemoteOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = load_corpus("memory://bucket", replace(options, timeout=0.3, attempts=2))
    shard = corpus.split("train").shards[1]
    hang = threading.Event()
    with monkeypatch.context() as patch:
        patch.setattr(type(memory), "open", lambda *_, **__: hang.wait(30))
        with pytest.raises(UserError, match=r"after 2 attempts \(no byte came in time\)"):
            tokens_of(shard)
    hang.set()

    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("Unable to locate\ncredentials")

    monkeypatch.setattr(type(memory), "open", refuse)
    with pytest.raises(UserError, match=r"cannot be read \(Unable to locate credentials\); see"):
        tokens_of(shard)


@pytest.mark.parametrize(
    ("location", "words"),
    [
        ("abfs://bucket/corpus", "cannot be opened: Install adlfs"),
        ("nonsense://bucket", "protocol 'nonsense' is unknown; give a folder, or an address"),
    ],
)
def test_a_protocol_that_cannot_be_read_is_named(location: str, words: str) -> None:
    with pytest.raises(UserError, match=rf"^{location}: {words}"):
        open_storage(location)
