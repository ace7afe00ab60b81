"""Evaluation scores every document exactly once, however the split is read."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rlt_dist.data.corpus.index import load_corpus
from rlt_dist.inference.evaluate import Evaluation
from rlt_dist.inference.held_out import HeldOut, evaluate_split
from rlt_dist.util.errors import UserError

Evaluate = Callable[..., Evaluation]


@pytest.fixture
def evaluated(trained: Any, small_corpus: Path) -> Evaluate:
    """`evaluated(name, ...)`: the test split through a trained model."""

    def run(
        name: str,
        segment: int = 10,
        lanes: int = 4,
        max_tokens: int | None = None,
        carried: bool = True,
        corpus: Path = small_corpus,
        split: str = "test",
        **choices: object,
    ) -> Evaluation:
        wanted = HeldOut(str(corpus), split, segment, lanes, max_tokens, carried)
        return evaluate_split(trained(name, **choices), wanted, lambda *_: None)

    return run


def by_hand(model: Any, documents: list[Any]) -> float:
    """Each document alone, from an empty state, in one piece."""
    nll = 0.0
    with torch.no_grad():
        for document in documents:
            tokens = torch.from_numpy(document.astype("int64"))[None]
            start = torch.zeros_like(tokens[:, :-1], dtype=torch.bool)
            output, _ = model(tokens[:, :-1], start, model.empty_state(1))
            nll += float(model.nll(output, tokens[:, 1:]).sum())
    return nll


@pytest.mark.parametrize("name", ["rlt1", "rlt2", "free"])
def test_every_token_but_each_documents_first_is_scored_once(
    evaluated: Evaluate, small_corpus: Path, name: str
) -> None:
    split = load_corpus(small_corpus).split("test")
    for segment, lanes in ((10, 4), (3, 1), (7, 3), (64, 16), (200, 99)):
        assert evaluated(name, segment, lanes).tokens == split.tokens - split.documents


@pytest.mark.parametrize("name", ["rlt1", "rlt2", "xl"])
def test_carried_the_result_does_not_depend_on_segment_or_lanes(
    evaluated: Evaluate, name: str
) -> None:
    expected = evaluated(name, segment=10, lanes=4)
    for segment, lanes in ((3, 1), (7, 3), (64, 16)):
        found = evaluated(name, segment, lanes)
        assert found.nll == pytest.approx(expected.nll, rel=1e-10)
        assert found.bytes == expected.bytes


@pytest.mark.parametrize("name", ["rlt1", "rlt2"])
def test_carried_it_is_what_each_document_gives_on_its_own(
    evaluated: Evaluate, trained: Any, documents: Any, name: str
) -> None:
    test = documents("test")
    nll = by_hand(trained(name).model, test)
    found = evaluated(name)
    assert found.nll == pytest.approx(nll, rel=1e-10)
    size = sum(len(document) - 2 for document in test)
    assert found.bytes == size
    assert found.bits_per_byte == pytest.approx(nll / math.log(2) / size, rel=1e-10)
    assert found.perplexity == pytest.approx(math.exp(nll / found.tokens), rel=1e-10)


@pytest.mark.parametrize("name", ["rlt1", "rlt2", "xl", "free"])
def test_cut_the_result_differs(evaluated: Evaluate, name: str) -> None:
    carried, cut = evaluated(name), evaluated(name, carried=False)
    assert carried.tokens == cut.tokens
    assert abs(carried.nll - cut.nll) > 1e-6 * carried.nll


def test_cut_at_segments_longer_than_any_lane_is_carried(evaluated: Evaluate) -> None:
    one = evaluated("rlt1", segment=300, lanes=8)
    other = evaluated("rlt1", segment=300, lanes=8, carried=False)
    assert one == other


def test_a_longer_memory_is_used(evaluated: Evaluate) -> None:
    for name in ("rlt1", "xl"):
        short, long = evaluated(name), evaluated(name, memory_len=100)
        assert long.tokens == short.tokens
        assert abs(long.nll - short.nll) > 1e-6 * short.nll


def test_no_memory_at_all_is_possible(evaluated: Evaluate) -> None:
    assert evaluated("free", memory_len=0).loss > 0


def test_it_stops_after_about_as_many_tokens_as_it_was_told(evaluated: Evaluate) -> None:
    found = evaluated("rlt1", max_tokens=80)
    assert 40 <= found.tokens <= 80


def test_another_tokenizers_corpus_is_refused(evaluated: Evaluate, words_corpus: Path) -> None:
    with pytest.raises(UserError, match="another tokenizer"):
        evaluated("rlt1", corpus=words_corpus)


def test_a_choice_that_the_model_does_not_have_is_refused(evaluated: Evaluate) -> None:
    with pytest.raises(UserError, match="no clamp_len"):
        evaluated("rlt1", clamp_len=3)


def test_the_command_prints_carried_and_cut_and_keeps_a_record(
    command: Any, run_of: Any, strict_json: Any
) -> None:
    run = run_of("rlt1")
    code, out, _ = command("eval", run, "--state", "both", "--json")
    printed = [strict_json(line) for line in out.splitlines()]
    assert code == 0
    assert [row["state"] for row in printed] == ["carried", "cut"]
    assert all(row["step"] == 20 and row["split"] == "test" for row in printed)
    assert printed[0]["loss"] != printed[1]["loss"]
    kept = (run / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in kept] == printed


def test_the_command_shows_a_table_for_people(command: Any, run_of: Any) -> None:
    code, out, _ = command("eval", run_of("xl"), "--state", "both", "--memory-len", "40")
    assert code == 0
    for word in ("carried", "cut", "perplexity", "bits per byte", "40"):
        assert word in out


def test_a_perplexity_beyond_all_numbers_is_json_all_the_same(
    command: Any, run_of: Any, strict_json: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Evaluation, "loss", property(lambda _: 1000.0))
    _, out, _ = command("eval", run_of("rlt1"), "--json")
    strict_json(out)


def test_a_tokenizer_that_loses_bytes_has_no_bits_per_byte(
    driver: Any, configure: Any, command: Any, tmp_path: Path, words_corpus: Path, strict_json: Any
) -> None:
    adaptive = ("model.cutoffs=[6]", "train.steps=2", f"data.path={words_corpus}")
    config = configure(tmp_path, "xl", *adaptive)
    driver.train(config)
    code, out, _ = command("eval", config.run_folder, "--json")
    assert code == 0
    assert strict_json(out)["bits_per_byte"] is None
    assert strict_json(out)["tokens"] > 0
