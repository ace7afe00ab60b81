"""`rlt-dist data stats` and `cat`, on the small corpus of one id a byte."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rlt_dist.data.corpus.index import load_corpus
from rlt_dist.data.corpus.sources import Sources

Command = Callable[..., tuple[int, str, str]]


def texts_of(corpus: Path, split: str = "train") -> list[bytes]:
    index = load_corpus(corpus)
    shards = index.split(split).shards
    return [
        index.tokenizer.decode(tokens[:-1])
        for shard in shards
        for tokens in shard.read(0, shard.entry.documents)
    ]


def test_stats_count_what_there_is(command: Command, small_corpus: Path) -> None:
    code, out, _ = command("data", "stats", small_corpus, "--split", "train", "--json")
    assert code == 0
    found = json.loads(out)
    lengths = np.array([len(text) + 1 for text in texts_of(small_corpus)])
    assert (found["split"], found["documents"], found["tokens"]) == (
        "train",
        len(lengths),
        lengths.sum(),
    )
    for name, share in (("p10", 0.1), ("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        assert found[name] == np.quantile(lengths, share, method="inverted_cdf")
    assert found["longest"] == lengths.max()
    assert found["mean"] == pytest.approx(lengths.mean())
    for bin in found["bins"]:
        inside = lengths[(lengths >= bin["least"]) & (lengths < 2 * bin["least"])]
        assert (bin["documents"], bin["tokens"]) == (len(inside), inside.sum())
    assert sum(bin["documents"] for bin in found["bins"]) == len(lengths)


def test_stats_are_shown_and_drawn(command: Command, small_corpus: Path, tmp_path: Path) -> None:
    code, out, _ = command("data", "stats", small_corpus, "--plot", tmp_path / "lengths.png")
    assert code == 0
    for split in ("train", "validation", "test"):
        assert f"{split}: " in out
    assert "share of tokens" in out
    assert (tmp_path / "lengths.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_of_no_known_kind_is_refused(
    command: Command, small_corpus: Path, tmp_path: Path, is_one_error: Callable[..., None]
) -> None:
    result = command("data", "stats", small_corpus, "--plot", tmp_path / "lengths.xyz")
    is_one_error(result, "lengths.xyz: is no picture's name")


@pytest.mark.parametrize(("first", "count"), [(0, 1), (17, 3), (30, 60)])
def test_documents_are_written_as_they_are(
    command: Command, small_corpus: Path, first: int, count: int
) -> None:
    shown = command("data", "cat", small_corpus, "--document", first, "--documents", count)
    expected = b"".join(
        text + b"<|endoftext|>\n" for text in texts_of(small_corpus)[first : first + count]
    )
    assert shown == (0, expected.decode(), "")


def test_documents_are_named_by_their_source(command: Command, small_corpus: Path) -> None:
    _, _, told = command("data", "cat", small_corpus, "--documents", 99, "--where")
    named = [(small_corpus.parent / name).read_bytes() for name in told.splitlines()]
    assert named == texts_of(small_corpus)[:99]


def test_several_documents_of_an_input_are_numbered() -> None:
    sources = Sources([("a", 1), ("b", 3), ("c", 0), ("d", 2)])
    assert [sources.name(n) for n in range(6)] == ["a", "b#1", "b#2", "b#3", "d#1", "d#2"]


def test_ids_are_one_document_a_line(command: Command, small_corpus: Path) -> None:
    _, out, _ = command("data", "cat", small_corpus, "--document", 3, "--documents", 2, "--ids")
    expected = [[*text, 256] for text in texts_of(small_corpus)[3:5]]
    assert [[int(token) for token in line.split()] for line in out.splitlines()] == expected


def test_a_lane_of_one_is_the_corpus_from_any_cursor(command: Command, small_corpus: Path) -> None:
    options = ("data", "cat", small_corpus, "--lanes", 4, "--lane", 2, "--seed", 5)
    _, whole, _ = command(*options, "--tokens", 700, "--ids")
    _, later, _ = command(*options, "--tokens", 500, "--ids", "--cursor", "0,1,0")
    tokens = whole.split()
    begin = tokens.index("256") + 1
    assert later.split() == tokens[begin : begin + 500]


def test_a_runs_lane_goes_on_where_its_checkpoint_stands(
    command: Command, configure: Callable, driver: object, tmp_path: Path, small_corpus: Path
) -> None:
    config = configure(tmp_path, "rlt1", "train.steps=3", "checkpoint.every=3")
    driver.train(config)
    seen = ("data", "cat", small_corpus, "--lanes", 8, "--lane", 6, "--ids")
    _, whole, _ = command(*seen, "--tokens", 50)
    code, out, _ = command(
        "data", "cat", "--run", tmp_path / "run", "--lane", 6, "--tokens", 20, "--ids"
    )
    assert code == 0
    assert out.split() == whole.split()[30:50]


def test_a_lane_that_reset_state_made_is_shown_before_it_is_in_a_checkpoint(
    command: Command, configure: Callable, driver: ModuleType, tmp_path: Path
) -> None:
    driver.train(configure(tmp_path, "rlt1", "train.steps=2"))
    config = configure(tmp_path, "rlt1", "data.lanes=10", "train.steps=3")
    watched = driver.train(config, reset_state=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000003")
    for lane in (2, 9):
        options = ("--run", tmp_path / "run", "--lane", lane, "--tokens", 10, "--ids")
        code, out, said = command("data", "cat", *options)
        assert code == 0
        assert list(map(int, out.split())) == watched.at(3).tokens[lane].tolist()
        assert "note: --reset-state: 8 lanes became 10; all start with empty state" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "give a corpus, or a run folder with --run"),
        (("CORPUS", "--lanes", 3), "give the lane to show with --lane"),
        (("CORPUS", "--lane", 3), "give the number of lanes with --lanes"),
        (("CORPUS", "--lanes", 3, "--lane", 3), "there are 3 lanes; the last is --lane 2"),
        (("CORPUS", "--lanes", 3, "--lane", 0, "--cursor", "1"), "three or four numbers"),
        (("CORPUS", "--lanes", 3, "--lane", 0, "--cursor", "9,999,0"), "no document 999"),
        (("CORPUS", "--document", 9999), "the last is --document 127"),
        (("CORPUS", "--split", "dev"), "has no split 'dev'"),
        (("nowhere",), "nowhere/index.json: no such file"),
    ],
)
def test_mistakes_are_one_line(
    command: Command,
    small_corpus: Path,
    is_one_error: Callable[..., None],
    options: tuple[object, ...],
    said: str,
) -> None:
    arguments = [small_corpus if option == "CORPUS" else option for option in options]
    is_one_error(command("data", "cat", *arguments), said)
