"""`rlt-dist experiment context`: exact losses by context, and the whole of it in small."""

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlt_dist.config.model import ModelConfig, RltConfig, TransformerXLConfig
from rlt_dist.data.corpus.index import SplitIndex, load_corpus
from rlt_dist.data.prepare.prepare import prepare_corpus
from rlt_dist.experiments.context import experiment
from rlt_dist.experiments.context.measure import losses_by_context
from rlt_dist.experiments.context.passages import Scope, read_passages
from rlt_dist.models.build import initial_model
from rlt_dist.util.errors import UserError

VOCABULARY = 257
NARROW: dict[str, Any] = {"d_model": 8, "heads": 2}
MODELS: dict[str, ModelConfig] = {
    "transformer_xl": TransformerXLConfig(
        **NARROW, layers=2, d_inner=8, memory_len=6, same_length=True
    ),
    "rlt": RltConfig(**NARROW, encoder_layers=1, decoder_layers=1, ffn=8, memory_len=5, window=3),
    "transformer": RltConfig(
        **NARROW, encoder_layers=2, decoder_layers=0, ffn=8, feedback=0, memory_len=7
    ),
}


@pytest.fixture(scope="session")
def long_corpus(once: Callable[..., Path]) -> Path:
    """60 documents of 20 to 300 bytes, one id a byte."""

    def make(folder: Path) -> None:
        chance, texts = random.Random(3), folder / "texts"
        texts.mkdir()
        for number in range(60):
            words = chance.choices(["lane", "state", "is", "carried", "on"], k=4 + number)
            (texts / f"{number:02}").write_text(" ".join(words))
        (folder / "recipe.yaml").write_text("kind: bytes\n")
        shares = {"train": 0.8, "test": 0.2}
        prepare_corpus([texts], folder / "corpus", folder / "recipe.yaml", shares=shares)

    return once("long", make) / "corpus"


def _documents(split: SplitIndex) -> list[np.ndarray]:
    return [each for shard in split.shards for each in shard.read(0, shard.entry.documents)]


@pytest.mark.parametrize("name", MODELS)
def test_a_loss_by_context_is_that_of_the_context_alone(long_corpus: Path, name: str) -> None:
    split, scope = load_corpus(long_corpus).split("test"), Scope(step=4, longest=16, tokens=150)
    window = 8 if name == "transformer" else None
    model = initial_model(MODELS[name], VOCABULARY, seed=1, dtype=torch.float64)
    chance = torch.Generator().manual_seed(1)
    with torch.no_grad():  # else all losses are alike
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn(parameter.shape, generator=chance).double()
    passages = read_passages(split, scope)
    found = losses_by_context(model, passages, scope, window)
    assert found.shape == (4, 150)
    scored = [
        (document.astype(np.int64), place)
        for document in _documents(split)
        for place in range(scope.longest, len(document), scope.step)
    ]
    for number, (document, place) in enumerate(scored[:150:11]):
        assert passages.scored[11 * number] == document[place]
        for row, context in enumerate(scope.contexts):
            read = document[place - min(context, window or context) : place]
            assert found[row, 11 * number] == pytest.approx(
                _loss(model, read, document[place]), rel=1e-10
            )


@torch.no_grad()
def _loss(model: Any, read: np.ndarray, target: int) -> float:
    """-log p of a token after others, from an empty state, in one go."""
    tokens = torch.from_numpy(read)[None]
    starts = torch.zeros_like(tokens, dtype=torch.bool)
    output, _ = model(tokens, starts, model.empty_state(1))
    return model.nll(output[:, -1:], torch.tensor([[int(target)]])).item()


def test_documents_shorter_than_the_context_are_refused(long_corpus: Path) -> None:
    split = load_corpus(long_corpus).split("test")
    with pytest.raises(UserError, match="no document of test is longer than 4000 tokens"):
        read_passages(split, Scope(step=4, longest=4000, tokens=10))


def test_too_few_tokens_are_told_before_anything_is_trained(
    command: Any, is_one_error: Any, long_corpus: Path, tmp_path: Path
) -> None:
    given = ["--input", long_corpus, "--longest", 96, "--steps", 1, "--output", tmp_path]
    split, scope = load_corpus(long_corpus).split("test"), Scope(step=32, longest=96, tokens=1)
    documents = _documents(split)
    there = sum(len(range(scope.longest, len(each), scope.step)) for each in documents)
    assert len(read_passages(split, replace(scope, tokens=there)).scored) == there
    result = command("experiment", "context", *given, "--tokens", there + 1)
    is_one_error(result, f"only {there} tokens can be scored", "take fewer --tokens", "--longest")
    assert not (tmp_path / "runs").exists()


def test_a_folder_begun_from_another_text_is_to_be_another_one(
    command: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(experiment, "_RECIPE", "kind: bytes\n")
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        for number in range(20):
            (tmp_path / name / f"{number}").write_text(f"{name} and {number} " * 30)
    given = ["experiment", "context", "--output", tmp_path / "out", "--tokens", 4096, "--input"]
    assert "no document of test is longer" in command(*given, tmp_path / "one")[2]
    code, _, err = command(*given, tmp_path / "two")
    assert code == 2
    assert "was begun from something else" in err.splitlines()[-1]
    assert "choose another output folder (`rlt-dist data prepare`" in err.splitlines()[-1]


@pytest.mark.parametrize("kind", [["context"], ["state-tracking", "--task", "parity"]])
def test_a_folder_that_cannot_be_is_one_line(
    command: Any, is_one_error: Any, tmp_path: Path, kind: list[str]
) -> None:
    (tmp_path / "file").touch()
    for output in (tmp_path / "file", Path("/proc/none")):
        result = command("experiment", *kind, "--output", output)
        is_one_error(result, f"{output}: ", "give a folder that can be written")


def test_the_whole_experiment_in_small(
    command: Any, long_corpus: Path, tmp_path: Path, strict_json: Any
) -> None:
    small = ["--input", long_corpus, "--steps", 2, "--longest", 96, "--tokens", 30]
    arguments = ["experiment", "context", "--output", tmp_path, *small, "--json"]
    code, out, err = command(*arguments)
    assert code == 0, err
    models = [strict_json(line) for line in out.splitlines()]
    assert [model["model"] for model in models] == ["transformer_xl", "rlt", "transformer"]
    sizes = [model["parameters"] for model in models]
    assert max(sizes) < 1.01 * min(sizes)
    for model in models:
        assert all(2 < bits < 12 for bits in model["bits_per_byte_by_context"].values())
        assert model["training_tokens"] == 2 * 32 * 64
        assert model["training_flops"] > 6 * 0.5 * model["parameters"] * model["training_tokens"]
        assert set(model["effective_length"]) == {"0.1", "0.5", "1.0"}
    plain = models[2]["bits_per_byte_by_context"]
    assert plain["32"] != plain["64"] == plain["96"]  # 64 tokens are all that it can see
    assert models[2]["effective_length"]["1.0"] <= 64
    assert set(models[1]["bits_per_byte_by_memory"]) == {"16", "32", "64", "128", "256", "512"}
    results = strict_json((tmp_path / "results.json").read_text())
    assert results["models"] == models
    rows = (tmp_path / "context.csv").read_text().splitlines()
    assert rows[0] == "model,quantity,r,length,value"
    assert (tmp_path / "context.png").stat().st_size > 1000
    metrics = tmp_path / "runs" / "rlt" / "metrics.jsonl"
    steps = [json.loads(line)["step"] for line in metrics.read_text().splitlines()]
    assert steps == [1, 2]
    metrics.unlink()

    again, table, _ = command(*arguments[:-1], "--target", 50)
    assert again == 1  # Nothing is 50 times as long.
    assert not metrics.exists()  # Nor is anything trained again.
    assert "Relative effective context length" in table
    assert command(*arguments[:-1], "--steps", 3)[0] == 2

    measured = tmp_path / "runs" / "rlt" / "context.npz"
    whole = measured.read_bytes()
    place = whole.index(b"losses.npy") + 200
    flipped = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]
    for damaged in (b"", b"text", whole[:-100], flipped):
        measured.write_bytes(damaged)
        code, _, err = command(*arguments)
        assert code == 2
        assert f"{measured}: is damaged; remove it" in err.splitlines()[-1]
    measured.unlink()
    assert command(*arguments)[:2] == (0, out)
    assert measured.read_bytes() == whole


MISTAKES = [
    (["--models", "rlt,lstm"], "no model 'lstm'; take of transformer_xl, rlt, transformer"),
    (["--models", "rlt", "--target", "2"], "--target compares transformer_xl with transformer"),
    (["--longest", "100"], "--longest 100 is not several times --step-size 32"),
    (["--step-size", "48", "--longest", "480"], "--step-size 48 does not divide the segment"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_one_line(
    command: Any, is_one_error: Any, tmp_path: Path, arguments: list[str], message: str
) -> None:
    is_one_error(command("experiment", "context", "--output", tmp_path, *arguments), message)
