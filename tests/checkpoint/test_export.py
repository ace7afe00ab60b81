"""`rlt-dist checkpoint export`: what is written, and that it comes back to the last bit."""

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

import rlt_dist.checkpoint.exchange.export
from rlt_dist.config.model import RltConfig
from rlt_dist.config.run import RunConfig
from rlt_dist.data.tokenizers.tokenizer import load_tokenizer
from rlt_dist.models.build import build_model

FILES = {"README.md", "config.json", "model.safetensors", "tokenizer.json"}


@st.composite
def models(draw: Any) -> tuple[str, dict[str, Any]]:
    """A kind of model and choices that change which tensors it has."""
    kind = draw(st.sampled_from(["rlt1", "xl", "gru", "token", "transformer"]))
    if kind in ("gru", "token", "transformer"):
        return kind, {}
    if kind == "rlt1":
        tied = draw(st.booleans())
        return "rlt1", {
            "encoder_layers": 2 if tied else draw(st.integers(1, 2)),
            "feedback": draw(st.sampled_from([0, 1, 3])),
            "kv_heads": draw(st.sampled_from([None, 1])),
            "memory_groups": draw(st.integers(1, 2)),
            "tie_output": draw(st.booleans()),
            "tied": tied,
        }
    cutoffs = draw(st.sampled_from([[], [5], [3, 8]]))
    return "xl", {
        "cutoffs": cutoffs,
        "div_val": draw(st.sampled_from([1, 2])) if cutoffs else 1,
        "pre_norm": draw(st.booleans()),
        "tie_projections": draw(st.booleans()),
    }


def in_yaml(value: object) -> str:
    return json.dumps(value)


def weights(config: RunConfig, vocabulary: int) -> dict[str, torch.Tensor]:
    """Random parameters of a run's model."""
    model = build_model(config.model, vocabulary, torch.float64)
    chance = torch.Generator().manual_seed(1)
    return {
        name: torch.randn(parameter.shape, generator=chance, dtype=torch.float64)
        for name, parameter in model.named_parameters()
    }


@pytest.fixture
def numbered(tmp_path: Path) -> Callable[[], Path]:
    """A new folder at every call: examples of one test share its own."""
    count = itertools.count()
    return lambda: tmp_path / str(next(count))


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind_and_choices=models(), shard=st.sampled_from([5.0, 2e-6]))
def test_export_and_import_are_exact_for_every_model(
    command: Any,
    configure: Any,
    numbered: Any,
    stored_model: Any,
    same: Any,
    words_corpus: Path,
    kind_and_choices: tuple[str, dict[str, Any]],
    shard: float,
) -> None:
    folder, (kind, choices) = numbered(), kind_and_choices
    overrides = [f"model.{key}={in_yaml(value)}" for key, value in choices.items()]
    config = configure(folder, kind, f"data.path={words_corpus}", *overrides)
    expected = weights(config, 16)
    save_file(expected, folder / "given.safetensors")
    given = ("--config", folder / "run.yaml")
    first, out, second = folder / "first", folder / "out", folder / "second"
    for line in (
        ("import", folder / "given.safetensors", "--output", first, *given),
        ("export", first, "--output", out, "--shard-gib", shard),
        ("import", out, "--output", second, *given),
    ):
        code, _, err = command("checkpoint", *line)
        assert code == 0, err
    assert same(stored_model(first), expected)
    assert same(stored_model(second), expected)
    written = [load_file(path) for path in out.glob("*.safetensors")]
    assert sum(map(len, written)) == len(expected)
    assert same({name: t for file in written for name, t in file.items()}, expected)
    assert (len(written) > 1) == (shard < 1)


def test_a_folder_holds_weights_configuration_tokenizer_and_card(
    command: Any, run: RunConfig, stored_model: Any, same: Any, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code, shown, _ = command("checkpoint", "export", run.run_folder, "--output", out)
    assert (code, {path.name for path in out.iterdir()}) == (0, FILES)
    assert "step 5" in shown
    assert same(load_file(out / "model.safetensors"), stored_model(run.run_folder))
    about = json.loads((out / "config.json").read_text())
    assert RltConfig.model_validate(about["model"]) == run.model
    assert about["vocabulary"] == 257
    own = load_tokenizer(run.run_folder / "tokenizer.json")
    assert load_tokenizer(out / "tokenizer.json").hash == own.hash
    modes = {path.stat().st_mode for path in out.iterdir()}
    assert len(modes) == 1


def test_the_card_says_what_it_is_how_it_was_trained_and_how_to_use_it(
    command: Any, run: RunConfig, tmp_path: Path
) -> None:
    records = [
        {"step": 5, "split": "test", "state": "carried", "tokens": 1234, "loss": 2.5},
        {"step": 4, "split": "test", "state": "carried", "tokens": 1234, "loss": 9.75},
    ]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (run.run_folder / "evaluations.jsonl").write_text(lines)
    command("checkpoint", "export", run.run_folder, "--output", tmp_path / "small")
    card = (tmp_path / "small" / "README.md").read_text()
    facts = json.loads((run.run_folder / "checkpoints/step-00000005/manifest.json").read_text())
    assert card.startswith("# small\n\nRLT-1, a Recurrent Looped Transformer")
    assert "1 encoder and 2 decoder layers, width 16" in card
    assert re.search(r"optimizer steps \| 5 \|\n\| tokens \| 400 \|", card)
    assert facts["facts"]["corpus"] in card
    assert "learning_rate: 0.01" in card
    assert "| test | carried | 1,234 | 2.5000 |" in card
    assert "9.75" not in card  # of other parameters
    for verb in ("checkpoint import small", "generate", "eval", "train"):
        assert f"rlt-dist {verb}" in card
    assert str(tmp_path) not in card


def test_an_older_checkpoint_is_exported_by_name(
    command: Any, run: RunConfig, stored_model: Any, same: Any, tmp_path: Path
) -> None:
    older = run.run_folder / "checkpoints" / "step-00000002"
    code, shown, _ = command("checkpoint", "export", older, "--output", tmp_path / "out")
    assert (code, "step 2" in shown) == (0, True)
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert same(found, stored_model(older))
    assert not same(found, stored_model(run.run_folder))


def test_large_models_are_several_files_with_an_index(
    command: Any, run: RunConfig, stored_model: Any, same: Any, tmp_path: Path
) -> None:
    out, limit = tmp_path / "out", 1e-5
    command("checkpoint", "export", run.run_folder, "--output", out, "--shard-gib", limit)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    count = len(files)
    assert files == [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    expected, found = stored_model(run.run_folder), {}
    for file in files:
        held = load_file(out / file)
        assert sum(t.nbytes for t in held.values()) <= limit * 2**30 or len(held) == 1
        assert {name for name, where in index["weight_map"].items() if where == file} == set(held)
        found |= held
    assert same(found, expected)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in expected.values())


def test_the_metadata_say_what_is_tied(
    command: Any, configure: Any, driver: Any, tmp_path: Path
) -> None:
    config = configure(tmp_path, "rlt2", "train.steps=2")
    driver.train(config)
    command("checkpoint", "export", config.run_folder, "--output", tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names, metadata = set(file.keys()), file.metadata()
    tied = json.loads(metadata["tied"])
    assert metadata["format"] == "pt"
    assert tied["output.weight"] == "embed.weight"
    assert tied["decoder.1.attn.k.weight"] == "encoder.1.attn.k.weight"
    assert tied["decoder.0.ffn.down.weight"] == "encoder.0.ffn.down.weight"
    assert not names & tied.keys()
    assert set(tied.values()) <= names
    assert not any("norm" in name or "cross" in name for name in tied)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_numbers_are_written_in_the_type_asked_for(
    command: Any, run: RunConfig, stored_model: Any, same: Any, tmp_path: Path, dtype: str
) -> None:
    out, kind = tmp_path / "out", getattr(torch, dtype)
    command("checkpoint", "export", run.run_folder, "--output", out, "--dtype", dtype)
    expected = {name: t.to(kind) for name, t in stored_model(run.run_folder).items()}
    assert same(load_file(out / "model.safetensors"), expected)
    given = ("--output", tmp_path / "again", "--config", run.run_folder / "config.yaml")
    code, shown, _ = command("checkpoint", "import", out, *given)
    assert code == 0
    assert (f"type {dtype} become float64" in shown) == (dtype != "float64")
    wide = {name: t.double() for name, t in expected.items()}
    assert same(stored_model(tmp_path / "again"), wide)


def test_a_folder_with_something_in_it_is_refused(
    command: Any, is_one_error: Any, run: RunConfig, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "mine.txt").write_text("x")
    is_one_error(command("checkpoint", "export", run.run_folder, "--output", out), "mine.txt")
    assert [path.name for path in out.iterdir()] == ["mine.txt"]
    is_one_error(
        command("checkpoint", "export", run.run_folder, "--output", out / "mine.txt"), "is a file"
    )


def test_an_empty_folder_and_what_was_left_of_a_killed_export_are_taken(
    command: Any, run: RunConfig, tmp_path: Path
) -> None:
    out, left = tmp_path / "out", tmp_path / ".out.partial"
    out.mkdir()
    left.mkdir()
    (left / "model.safetensors").write_text("half")
    assert command("checkpoint", "export", run.run_folder, "--output", out)[0] == 0
    assert {path.name for path in out.iterdir()} == FILES
    assert not left.exists()


def test_a_disk_that_fills_up_leaves_nothing(
    command: Any,
    is_one_error: Any,
    run: RunConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    written = []

    def full(tensors: Any, path: Path, metadata: Any) -> None:
        if written:
            raise SafetensorError("I/O error: No space left on device (os error 28)")
        save_file(tensors, path, metadata)
        written.append(path)

    monkeypatch.setattr(rlt_dist.checkpoint.exchange.export, "save_file", full)
    out = tmp_path / "deep" / "out"
    result = command("checkpoint", "export", run.run_folder, "--output", out, "--shard-gib", 1e-5)
    is_one_error(result, "No space left on device", "make room")
    assert written
    assert list(out.parent.iterdir()) == []


def test_a_damaged_checkpoint_or_another_model_is_refused(
    command: Any, is_one_error: Any, configure: Any, run: RunConfig, tmp_path: Path
) -> None:
    configure(tmp_path / "other", "rlt1", "model.ffn=32", "model.memory_groups=2")
    text = (tmp_path / "other" / "run.yaml").read_text()
    config = run.run_folder / "config.yaml"
    config.write_text(text)
    result = command("checkpoint", "export", run.run_folder, "--output", tmp_path / "out")
    is_one_error(result, "missing: memory.1.k.weight", "another shape: encoder.0.ffn.gate.weight")
    folder = run.run_folder / "checkpoints" / "step-00000003"
    next(folder.glob("*.distcp")).unlink()
    result = command("checkpoint", "export", folder, "--output", tmp_path / "out")
    is_one_error(result, "step-00000003", "is missing")
    assert not (tmp_path / "out").exists()
