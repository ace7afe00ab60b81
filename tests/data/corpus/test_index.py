"""An index that is damaged, or not this corpus's, is refused before anything is read."""

import json
import os
from pathlib import Path

import pytest

from rlt_dist.data.corpus.index import CorpusIndex, load_corpus
from rlt_dist.data.tokenizers.base import content_hash
from rlt_dist.data.tokenizers.recipe import Recipe
from rlt_dist.data.tokenizers.tokenizer import train_tokenizer
from rlt_dist.util.errors import UserError


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("tokenizer", "vocabulary"), "257"),
        (("tokenizer", "vocabulary"), True),
        (("tokenizer", "end_of_text"), -1),
        (("tokenizer", "hash"), None),
        (("splits", "train"), []),
        (("splits",), {}),
        (("splits", "train", 0, "documents"), 0),
        (("splits", "train", 0, "tar_size"), 1.5),
        (("splits", "train", 0, "name"), "../train-000000"),
        (("dropped",), [1]),
    ],
)
def test_a_damaged_index_names_the_place(copy: Path, place: tuple, value: object) -> None:
    index = copy / "index.json"
    content = part = json.loads(index.read_bytes())
    for key in place[:-1]:
        part = part[key]
    part[place[-1]] = value
    index.write_text(json.dumps(content))
    where = r"\.".join(map(str, place))
    with pytest.raises(UserError, match=rf"index.json: is damaged \({where}.*: .*--overwrite"):
        load_corpus(copy)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"format": 99}', "is of format 99, this program reads 2"),
        ('{"format": 2}', "is damaged"),
        ("[]", "is damaged"),
        ("{", "is damaged, it is not JSON"),
    ],
)
def test_what_is_no_index_is_refused(copy: Path, content: str, words: str) -> None:
    (copy / "index.json").write_text(content)
    with pytest.raises(UserError, match=rf"copy/index.json: {words}"):
        load_corpus(copy)


def test_a_folder_without_an_index_and_a_split_that_is_not_there_are_named(
    copy: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"nowhere/index.json: no such file"):
        load_corpus(tmp_path / "nowhere")
    with pytest.raises(UserError, match="no split 'tran'; it has train, validation, test"):
        load_corpus(copy).split("tran")


def test_another_tokenizer_in_the_folder_is_refused(copy: Path) -> None:
    words = Recipe(kind="words", vocabulary=5, lossless=False)
    train_tokenizer(words, [b"a b"] * 9).save(copy / "tokenizer.json")
    with pytest.raises(UserError, match=r"tokenizer.json: is not the tokenizer that made this"):
        load_corpus(copy)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer.json: no such file"):
        load_corpus(copy)


def test_another_vocabulary_in_the_index_is_refused(copy: Path) -> None:
    index = copy / "index.json"
    content = json.loads(index.read_bytes())
    content["tokenizer"]["vocabulary"] = 300
    content["hash"] = content_hash(content)
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match="its vocabulary is 257, the index says 300"):
        load_corpus(copy)


@pytest.mark.parametrize("suffix", ["tar", "npy"])
def test_files_that_are_missing_or_cut_are_found_before_anything_is_read(
    copy: Path, suffix: str
) -> None:
    file = copy / f"train-000001.{suffix}"
    size = file.stat().st_size
    os.truncate(file, 100)
    with pytest.raises(
        UserError, match=rf"train-000001.{suffix}: holds 100 bytes where the index says {size}"
    ):
        load_corpus(copy)
    file.unlink()
    with pytest.raises(UserError, match=rf"000001.{suffix}: this shard file is missing; restore"):
        load_corpus(copy)
    (copy / "test-000000.tar").unlink()
    with pytest.raises(UserError, match=r"000001.*; so it is with 1 more files$"):
        load_corpus(copy)


def test_a_path_and_its_file_address_are_one_place(corpus: CorpusIndex) -> None:
    addressed = load_corpus(f"file://{corpus.location}")
    assert addressed.location == corpus.location
    assert addressed.fingerprint == corpus.fingerprint
