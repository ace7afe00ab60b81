"""Small real corpora on disk, made with the tokenizer that gives one id a byte."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlt_dist.data.corpus.index import CorpusIndex
from rlt_dist.data.prepare.prepare import prepare_corpus
from rlt_dist.data.tokenizers.recipe import Recipe
from rlt_dist.data.tokenizers.tokenizer import train_tokenizer

MakeCorpus = Callable[..., CorpusIndex]


def text_of(number: int) -> bytes:
    """A document of 1 to 60 bytes, unlike all others."""
    return f"{number}:".encode() + bytes(range(32, 32 + number * 7 % 57))


@pytest.fixture(scope="session")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "bytes.json"
    train_tokenizer(Recipe(kind="bytes"), [b"x"]).save(path)
    return path


@pytest.fixture(scope="session")
def make_corpus(tmp_path_factory: pytest.TempPathFactory, bytes_tokenizer: Path) -> MakeCorpus:
    def make(
        documents: int, shard_bytes: int = 600, begin: int = 0, **options: object
    ) -> CorpusIndex:
        folder = tmp_path_factory.mktemp("corpus")
        for number in range(begin, begin + documents):
            (folder / f"{number:04d}.txt").write_bytes(text_of(number))
        output = tmp_path_factory.mktemp("prepared") / "out"
        prepared = prepare_corpus(
            [folder], output, bytes_tokenizer, shard_bytes=shard_bytes, **options
        )
        return prepared.corpus

    return make


@pytest.fixture(scope="session")
def corpus(make_corpus: MakeCorpus) -> CorpusIndex:
    """120 documents, all but a few in the train split, in several shards."""
    return make_corpus(120)
