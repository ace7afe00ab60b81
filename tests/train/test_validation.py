"""Validation looks on: it changes no bit of the training, and measures what it says."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlt_dist.data.corpus.index import load_corpus
from rlt_dist.data.stream.loader import LaneLoader
from rlt_dist.data.stream.mixture import Share
from rlt_dist.data.stream.reading import Reading
from rlt_dist.util.errors import UserError


def training_only(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in record.items() if k != "validation"} for record in records]


@pytest.mark.parametrize("model", ["rlt1", "rlt2", "xl"])
def test_training_is_bit_identical_with_validation_on_and_off(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any, model: str
) -> None:
    runs = {}
    for every in ("null", "1", "2"):
        watched = driver.train(configure(tmp_path / every, model, f"validation.every={every}"))
        runs[every] = metrics(tmp_path / every / "run"), watched
    records, plain = runs["null"]
    assert not any("validation" in record for record in records)
    assert [r["step"] for r in runs["2"][0] if "validation" in r] == [2, 4, 5]
    for every in ("1", "2"):
        found, watched = runs[every]
        assert training_only(found) == records
        for one, other in (
            (plain.parameters, watched.parameters),
            (plain.session.state, watched.session.state),
        ):
            assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_same_step_is_validated_alike_however_often_it_is_done(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    for every in ("1", "2"):
        driver.train(configure(tmp_path / every, "rlt1", f"validation.every={every}"))
    often, seldom = (metrics(tmp_path / every / "run") for every in ("1", "2"))
    for step in (2, 4, 5):
        assert often[step - 1]["validation"] == seldom[step - 1]["validation"]


def test_the_validation_loss_is_that_of_its_first_segments(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any, small_corpus: Path
) -> None:
    """By hand: 3 segments of 8 lanes, state carried, nothing dropped."""
    config = configure(tmp_path, "rlt1", "validation.every=5")
    model = driver.train(config).session.model
    corpus = load_corpus(small_corpus)
    reading = Reading((Share(corpus.split("validation"), 1),), 8, 10, config.train.seed)
    loader = LaneLoader(reading, range(8))
    state, scored, size = model.empty_state(8), [], 0
    with torch.no_grad():
        for batch in (loader.next() for _ in range(3)):
            output, state = model(batch.tokens[:, :-1], batch.document_start, state)
            targets = batch.tokens[:, 1:]
            scored.append(model.nll(output, targets)[batch.loss_mask])
            size += int((targets[batch.loss_mask] < 256).sum())
    nll = torch.cat(scored)
    found = metrics(tmp_path / "run")[-1]["validation"]
    assert found["loss"] == pytest.approx(float(nll.mean()), rel=1e-12)
    assert found["perplexity"] == pytest.approx(float(nll.mean().exp()), rel=1e-12)
    bits = float(nll.sum() / torch.log(torch.tensor(2.0, dtype=torch.float64))) / size
    assert found["bits_per_byte"] == pytest.approx(bits, rel=1e-12)


def test_too_few_documents_to_validate_on_are_refused_before_anything_is_written(
    driver: Any, configure: Any, tmp_path: Path
) -> None:
    config = configure(tmp_path, "rlt1", "data.lanes=64", "validation.every=2")
    with pytest.raises(UserError, match=r"64 lanes cannot share \d+ documents"):
        driver.train(config)
    assert not config.run_folder.exists()
