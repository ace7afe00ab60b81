"""Preparation: exact round trip, exact shares, the same bytes every time, refusals by name."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import webdataset as wds

from rlt_dist.data.corpus.index import CorpusIndex
from rlt_dist.data.prepare import writer
from rlt_dist.data.prepare.inputs import InputOptions
from rlt_dist.data.prepare.prepare import prepare_corpus
from rlt_dist.data.tokenizers.recipe import Recipe
from rlt_dist.data.tokenizers.tokenizer import train_tokenizer
from rlt_dist.util.errors import UserError

REPOSITORY = Path(__file__).parents[3]


def samples(corpus: CorpusIndex, split: str) -> list[dict]:
    urls = [shard.address for shard in corpus.split(split).shards]
    return list(wds.WebDataset(urls, shardshuffle=False).decode())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number:02d}").write_bytes(b"text %d\r\n\xff" % number * (1 + number % 5))
    return folder


def test_real_text_comes_back_from_the_shards(tmp_path: Path) -> None:
    source = REPOSITORY / "rlt_dist"
    recipe = tmp_path / "bpe.yaml"
    recipe.write_text("kind: bpe\nvocabulary: 400\n")
    options = InputOptions(pattern="*.py")
    made = prepare_corpus(
        [source], tmp_path / "out", recipe, options=options, shard_bytes=30_000
    ).corpus
    names = [
        name
        for name, documents in json.loads((tmp_path / "out" / "sources.json").read_bytes())
        for _ in range(documents)
    ]
    found = {}
    for split in made.splits:
        for sample in samples(made, split):
            *ids, end = sample["npy"]
            assert end == made.tokenizer.end_of_text
            text = made.tokenizer.decode(np.array(ids, np.int32))
            found[names[int(sample["__key__"])]] = text
    files = {f"rlt_dist/{p.relative_to(source)}": p.read_bytes() for p in source.rglob("*.py")}
    assert found == {name: text for name, text in files.items() if text}


def test_plain_webdataset_reads_what_the_index_says(corpus: CorpusIndex) -> None:
    for name, split in corpus.splits.items():
        read = samples(corpus, name)
        listed = np.concatenate([shard.sidecar() for shard in split.shards])
        assert [len(sample["npy"]) for sample in read] == listed["tokens"].tolist()
        assert (listed["bytes"] == listed["tokens"] - 1).all()
        assert {sample["npy"].dtype for sample in read} == {np.dtype(np.uint16)}
        keys = [sample["__key__"] for sample in read]
        assert keys == sorted(set(keys))
        read_plainly = [sample["npy"].tolist() for sample in read]
        through_index = [
            tokens.tolist()
            for shard in split.shards
            for tokens in shard.read(0, shard.entry.documents)
        ]
        assert through_index == read_plainly


def test_sources_count_empty_and_cut_documents_too(tmp_path: Path, bytes_tokenizer: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one,,three,four")
    (tmp_path / "b.jsonl").write_text('{"text": "a long one"}\n{"text": "short"}\n')
    options = InputOptions(separator=",", longest=6)
    made = prepare_corpus(
        [tmp_path / "a.txt", tmp_path / "b.jsonl"],
        *(tmp_path / "out", bytes_tokenizer),
        options=options,
        shares={"train": 1.0},
    ).corpus
    sources = json.loads((tmp_path / "out" / "sources.json").read_bytes())
    assert sources == [["a.txt", 4], ["b.jsonl", 3]]
    found = {
        int(sample["__key__"]): bytes(sample["npy"][:-1].tolist())
        for sample in samples(made, "train")
    }
    assert sorted(found) == [0, 2, 3, 4, 5, 6]
    assert (found[2], found[4] + found[5], found[6]) == (b"three", b"a long one", b"short")
    assert (made.dropped["empty_documents"], made.dropped["cut_documents"]) == (1, 1)


def test_same_input_gives_the_same_bytes(
    texts: Path, tmp_path: Path, bytes_tokenizer: Path
) -> None:
    one = prepare_corpus([texts], tmp_path / "one", bytes_tokenizer, shard_bytes=100).corpus
    two = prepare_corpus([texts], tmp_path / "two", bytes_tokenizer, shard_bytes=100).corpus
    assert contents(Path(one.location)) == contents(Path(two.location))
    assert one.fingerprint == two.fingerprint
    assert [path.name for path in Path(one.location).glob(".*")] == [".lock"]


def test_an_empty_split_is_refused_and_leaves_nothing(
    texts: Path, tmp_path: Path, bytes_tokenizer: Path
) -> None:
    inputs = [texts / "00", texts / "01"]
    with pytest.raises(UserError, match="split 'validation', 'test' would be empty: the inputs ho"):
        prepare_corpus(inputs, tmp_path / "out", bytes_tokenizer)
    assert contents(tmp_path / "out") == {}
    shares = {"train": 0.5, "validation": 0.5, "test": 0.0}
    made = prepare_corpus(inputs, tmp_path / "out", bytes_tokenizer, shares=shares).corpus
    assert {name: split.documents for name, split in made.splits.items()} == {
        "train": 1,
        "validation": 1,
    }


def test_a_finished_folder_is_left_alone(
    texts: Path, tmp_path: Path, bytes_tokenizer: Path
) -> None:
    first = prepare_corpus([texts], tmp_path / "out", bytes_tokenizer)
    folder = Path(first.corpus.location)
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    again = prepare_corpus([texts], tmp_path / "out", bytes_tokenizer)
    assert (first.already_finished, again.already_finished) == (False, True)
    assert {
        path: path.stat().st_mtime_ns for path in Path(first.corpus.location).iterdir()
    } == times


def _change(path: Path) -> None:
    path.write_bytes(b"other")


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda folder: _change(folder / "07"), {}, "input texts/07 has changed"),
        (lambda folder: _change(folder / "new"), {}, "input texts/new is new"),
        (lambda folder: (folder / "07").unlink(), {}, "input texts/07 is gone"),
        (lambda folder: _change(folder / ".h"), {}, "there were 0 hidden files, now 1"),
        (
            lambda folder: (folder / "l").symlink_to(folder),
            {},
            "there were 0 linked folders, now 1",
        ),
        (lambda _: None, {"shard_bytes": 99}, "shard_bytes was 8388608, now 99"),
        (lambda _: None, {"options": InputOptions(separator="x")}, "separator was None, now 'x'"),
    ],
)
def test_another_request_is_refused_by_name(
    texts: Path,
    tmp_path: Path,
    bytes_tokenizer: Path,
    change: Callable[[Path], None],
    options: dict,
    words: str,
) -> None:
    out = tmp_path / "out"
    prepare_corpus([texts], out, bytes_tokenizer)
    change(texts)
    with pytest.raises(UserError, match=f"{words}; choose another.*--overwrite"):
        prepare_corpus([texts], out, bytes_tokenizer, **options)
    fresh = prepare_corpus([texts], tmp_path / "fresh", bytes_tokenizer, **options).corpus
    over = prepare_corpus([texts], out, bytes_tokenizer, overwrite=True, **options).corpus
    assert contents(Path(over.location)) == contents(Path(fresh.location))


def test_another_tokenizer_is_refused(texts: Path, tmp_path: Path, bytes_tokenizer: Path) -> None:
    prepare_corpus([texts], tmp_path / "out", bytes_tokenizer)
    other = tmp_path / "words.json"
    train_tokenizer(Recipe(kind="words", vocabulary=5, lossless=False), [b"a b"] * 9).save(other)
    with pytest.raises(UserError, match="tokenizer was"):
        prepare_corpus([texts], tmp_path / "out", other)


def test_a_folder_that_holds_something_else_is_refused(
    texts: Path, tmp_path: Path, bytes_tokenizer: Path
) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "precious").write_bytes(b"x")
    for overwrite in (False, True):
        with pytest.raises(UserError, match="mine: holds something else"):
            prepare_corpus([texts], tmp_path / "mine", bytes_tokenizer, overwrite=overwrite)
    with pytest.raises(UserError, match="precious: is a file"):
        prepare_corpus([texts], tmp_path / "mine" / "precious", bytes_tokenizer)
    with pytest.raises(UserError, match="lies inside the input"):
        prepare_corpus([texts], texts / "out", bytes_tokenizer)
    tokenizer = tmp_path / "mine" / "tokenizer.json"
    with pytest.raises(UserError, match=r"tokenizer.json: lies inside the output"):
        prepare_corpus([texts], tmp_path / "mine", tokenizer, overwrite=True)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"shard_bytes": 0}, "shard size is 0 bytes"),
        ({"options": InputOptions(separator="")}, "separator is empty"),
    ],
)
def test_impossible_options_are_refused(
    texts: Path, tmp_path: Path, bytes_tokenizer: Path, options: dict, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        prepare_corpus([texts], tmp_path / "out", bytes_tokenizer, **options)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("place", ["/proc/x", "{tokenizer}/out", "{tmp}/" + "n" * 300])
def test_a_place_that_cannot_be_written_is_named(
    texts: Path, tmp_path: Path, bytes_tokenizer: Path, place: str
) -> None:
    output = Path(place.format(tokenizer=bytes_tokenizer, tmp=tmp_path))
    with pytest.raises(UserError, match=r"(x|out|n): cannot be written \(.*\); choose another"):
        prepare_corpus([texts], output, bytes_tokenizer)


def test_a_second_preparation_of_the_folder_is_refused(
    texts: Path, tmp_path: Path, bytes_tokenizer: Path
) -> None:
    out, refusals = tmp_path / "out", []

    def start_another(_: object) -> None:
        if not refusals:
            with pytest.raises(UserError) as refusal:
                prepare_corpus([texts], out, bytes_tokenizer, overwrite=True)
            refusals.append(str(refusal.value))

    prepare_corpus([texts], out, bytes_tokenizer, watch=start_another)
    (refusal,) = refusals
    assert refusal.startswith(f"{out}: process {os.getpid()} on ")
    assert "prepares a corpus here; wait for it" in refusal
    assert prepare_corpus([texts], out, bytes_tokenizer).already_finished


def test_only_what_a_recipe_says_binds_the_folder(texts: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("kind: bpe\nvocabulary: 290\n")
    prepare_corpus([texts], tmp_path / "out", recipe)
    recipe.write_text("# a comment\nvocabulary:   290\nkind: bpe\n")
    assert prepare_corpus([texts], tmp_path / "out", recipe).already_finished
    recipe.write_text("kind: bpe\nvocabulary: 291\n")
    with pytest.raises(UserError, match=r"tokenizer was {.*290.*}, now {.*291.*--overwrite"):
        prepare_corpus([texts], tmp_path / "out", recipe)


def test_a_missing_tokenizer_is_named(texts: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none.yaml: no such file"):
        prepare_corpus([texts], tmp_path / "out", tmp_path / "none.yaml")


def test_a_file_that_is_no_tokenizer_is_named_before_anything_is_read(
    texts: Path, tmp_path: Path, bytes_tokenizer: Path
) -> None:
    bad = tmp_path / "bad.json"
    for content in (b"{}", bytes_tokenizer.read_bytes().replace(b'"bytes"', b'"bpe"')):
        bad.write_bytes(content)
        with pytest.raises(UserError, match=r"bad.json: is "):
            prepare_corpus([texts], tmp_path / "out", bad)
        assert not (tmp_path / "out").exists()


def test_a_recipe_that_fails_does_not_bind_the_folder(texts: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("kind: bpe\nvocabulary: 60000\n")
    with pytest.raises(UserError):
        prepare_corpus([texts], tmp_path / "out", recipe)
    recipe.write_text("kind: bytes\n")
    assert prepare_corpus([texts], tmp_path / "out", recipe).corpus.tokenizer.vocabulary == 257


def test_a_full_disk_is_one_error_and_the_next_start_goes_on(
    texts: Path, tmp_path: Path, bytes_tokenizer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    whole = prepare_corpus([texts], tmp_path / "whole", bytes_tokenizer, shard_bytes=100).corpus
    with monkeypatch.context() as patch:
        patch.setattr(writer, "tar_members", _fail_after(2, writer.tar_members))
        with pytest.raises(UserError, match="out: the disk is full; free some space and run"):
            prepare_corpus([texts], out, bytes_tokenizer, shard_bytes=100)
    assert [path.name for path in out.glob(".*")] == [".lock"]
    finished = {path: path.stat().st_mtime_ns for path in out.glob("*.tar")}
    assert finished
    prepare_corpus([texts], out, bytes_tokenizer, shard_bytes=100)
    assert contents(out) == contents(Path(whole.location))
    assert finished.items() <= {p: p.stat().st_mtime_ns for p in out.glob("*.tar")}.items()


def _fail_after(calls: int, real: Callable) -> Callable:
    left = [calls]

    def members(*arguments: object) -> object:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*arguments)

    return members


def test_fingerprint_covers_what_decides_the_tokens(
    texts: Path, tmp_path: Path, bytes_tokenizer: Path
) -> None:
    first = prepare_corpus([texts], tmp_path / "a", bytes_tokenizer).corpus
    (texts / ".hidden").write_bytes(b"counted, no more")
    hidden = prepare_corpus([texts], tmp_path / "b", bytes_tokenizer).corpus
    (texts / "00").write_bytes(b"Text 0\r\n\xff")
    other = prepare_corpus([texts], tmp_path / "c", bytes_tokenizer).corpus
    assert hidden.dropped == {
        "hidden_files": 1,
        "empty_documents": 0,
        "linked_folders": 0,
        "cut_documents": 0,
    }
    assert first.fingerprint == hidden.fingerprint != other.fingerprint
