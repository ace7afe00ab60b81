"""What a checkpoint holds, and what may be read from it."""

from pathlib import Path
from typing import Any

import pytest
import torch

from rlt_dist.checkpoint.load import find_checkpoint, load_parameters, stored_tensors
from rlt_dist.checkpoint.manifest import read_manifest
from rlt_dist.config.run import RunConfig
from rlt_dist.data.corpus.index import load_corpus
from rlt_dist.models.build import build_model
from rlt_dist.util.errors import UserError


def test_names_are_global_and_lanes_are_whole(run: RunConfig) -> None:
    stored = stored_tensors(find_checkpoint(run.run_folder))
    assert list(stored["cursors"][0]) == [8, 1, 4]
    assert list(stored["state.s"][0]) == [8, 16]
    assert list(stored["model.embed.weight"][0]) == [257, 16]
    parameters = {n.removeprefix("model.") for n in stored if n.startswith("model.")}
    for moment in ("exp_avg", "exp_avg_sq"):
        prefix = f"optimizer.{moment}."
        assert {n.removeprefix(prefix) for n in stored if n.startswith(prefix)} == parameters


def test_its_facts_say_what_it_is(run: RunConfig, small_corpus: Path) -> None:
    facts = read_manifest(find_checkpoint(run.run_folder)).facts
    corpus = load_corpus(small_corpus)
    assert (facts.step, facts.tokens) == (5, 5 * 80)
    assert (facts.tokenizer, facts.corpus) == (corpus.tokenizer.hash, corpus.fingerprint)
    assert facts.identity == run.identity()
    assert facts.identity["data.lanes"] == 8


def test_parameters_alone_are_read_into_the_same_model(run: RunConfig, driver: Any) -> None:
    expected = driver.train(run).parameters
    model = build_model(run.model, 257, torch.float64)
    load_parameters(find_checkpoint(run.run_folder), model)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name])


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [("rlt1", "model.ffn=32", "ffn"), ("rlt2", "model.feedback=3", "decoder"), ("xl", "", "")],
)
def test_parameters_of_another_model_are_refused(
    run: RunConfig, configure: Any, tmp_path: Path, kind: str, change: str, named: str
) -> None:
    other = configure(tmp_path / "other", kind, *filter(None, [change]))
    model = build_model(other.model, 257, torch.float64)
    with pytest.raises(UserError, match=f"holds another model; .*{named}"):
        load_parameters(find_checkpoint(run.run_folder), model)
