"""Labelled corpora: what is written of arrays is what lies there, whole or not at all."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from rlt_dist.cli.data import data_app
from rlt_dist.data.corpus.index import load_corpus
from rlt_dist.data.corpus.shard import tokens_and_labels, unscored
from rlt_dist.data.prepare import labelled
from rlt_dist.data.prepare.labelled import UNSCORED, Labelled, write_labelled
from rlt_dist.data.tokenizers.words import WordsTokenizer
from rlt_dist.util.errors import UserError

TOKENIZER = WordsTokenizer([b"a", b"bb", b"ccc"])


def documents(number: int, seed: int = 0) -> list[Labelled]:
    chance = np.random.default_rng(seed)
    found = []
    for _ in range(number):
        tokens = chance.integers(3, 6, chance.integers(1, 9))
        found.append((tokens, chance.choice([UNSCORED, 0, 3, 4, 5], len(tokens))))
    return found


def test_documents_lie_there_with_their_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labelled, "_BATCH", 7)
    given = documents(130)
    splits = {"train": iter(given), "test": documents(1)}
    written = write_labelled(tmp_path / "out", TOKENIZER, splits, of_shard=50)
    corpus = load_corpus(tmp_path / "out")
    assert corpus.fingerprint == written.fingerprint
    train = corpus.split("train")
    assert train.labelled
    assert [shard.entry.documents for shard in train.shards] == [50, 50, 30]
    read = [d for shard in train.shards for d in shard.read(0, shard.entry.documents)]
    assert len(read) == len(given)
    for found, (tokens, targets) in zip(read, given, strict=True):
        ids, labels = tokens_and_labels(found)
        assert labels is not None
        assert ids.tolist() == [*tokens.tolist(), TOKENIZER.end_of_text]
        nothing = unscored(labels.dtype)
        assert labels.tolist() == [
            nothing if target == UNSCORED else target for target in [*targets.tolist(), UNSCORED]
        ]
    assert train.bytes == sum(int((tokens - 2).sum()) for tokens, _ in given)


def test_it_is_verified_shown_and_looked_into_as_any_other(tmp_path: Path) -> None:
    folder = tmp_path / "out"
    write_labelled(folder, TOKENIZER, {"train": [(np.array([3, 5]), np.array([-1, 4]))]})
    for arguments in (["verify"], ["show"], ["stats"]):
        assert CliRunner().invoke(data_app, [*arguments, str(folder)]).exit_code == 0
    assert CliRunner().invoke(data_app, ["cat", str(folder)]).output == "a ccc<|endoftext|>\n"


def test_a_label_beyond_the_vocabulary_is_found(tmp_path: Path) -> None:
    bad = [(np.array([3]), np.array([7]))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WordsTokenizer, "byte_lengths", lambda _: np.ones(8, np.int64))
        write_labelled(tmp_path / "out", TOKENIZER, {"train": bad})
    result = CliRunner().invoke(data_app, ["verify", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "document 0 holds a label that is no token, the vocabulary ends at 5" in result.output


@pytest.mark.parametrize(
    ("tokens", "targets"),
    [([3], [6]), ([3], [-2]), ([6], [3]), ([-1], [3]), ([3, 4], [3]), ([], [])],
)
def test_what_is_no_document_is_refused_and_nothing_left(
    tmp_path: Path, tokens: list[int], targets: list[int]
) -> None:
    bad = (np.array(tokens, np.int64), np.array(targets, np.int64))
    with pytest.raises(ValueError, match=r"ids must lie|no token"):
        write_labelled(tmp_path / "out", TOKENIZER, {"train": [*documents(3), bad]})
    with pytest.raises(ValueError, match="has no document"):
        write_labelled(tmp_path / "out", TOKENIZER, {"train": documents(3), "test": []})
    assert list(tmp_path.iterdir()) == []


def test_a_generator_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def failing() -> Iterator[Labelled]:
        yield from documents(3)
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        write_labelled(tmp_path / "out", TOKENIZER, {"train": failing()})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_holds_something_is_left_alone(tmp_path: Path) -> None:
    write_labelled(tmp_path / "out", TOKENIZER, {"train": documents(3)})
    before = load_corpus(tmp_path / "out").fingerprint
    with pytest.raises(UserError, match="give a new or empty folder"):
        write_labelled(tmp_path / "out", TOKENIZER, {"train": documents(4)})
    assert load_corpus(tmp_path / "out").fingerprint == before


def test_a_vocabulary_that_fills_sixteen_bits_leaves_room_for_none(tmp_path: Path) -> None:
    tokenizer = WordsTokenizer([str(number).encode() for number in range((1 << 16) - 3)])
    last = tokenizer.vocabulary - 1
    corpus = write_labelled(
        tmp_path / "out", tokenizer, {"train": [(np.array([last, 3]), np.array([last, UNSCORED]))]}
    )
    (found,) = corpus.split("train").shards[0].read(0, 1)
    assert found.tolist() == [[last, 3, 0], [last, *[unscored(found.dtype)] * 2]]
    assert unscored(found.dtype) > last
