"""Choices that contradict each other are refused with their numbers; the rest round-trips."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from rlt_dist.config.load import validate
from rlt_dist.config.run import RunConfig
from rlt_dist.util.errors import UserError

CONTRADICTIONS = {
    "rlt": [
        ("heads=3", ["heads 3", "d_model 8"]),
        ("d_model=12 heads=4", ["width 3", "odd"]),
        ("d_head=5", ["width 5", "odd"]),
        ("heads=4 kv_heads=3", ["kv_heads 3", "heads 4"]),
        ("heads=2 kv_heads=4", ["kv_heads 4", "heads 2"]),
        ("memory_groups=3", ["memory_groups 3", "decoder_layers 2"]),
        ("decoder_layers=0", ["decoder_layers 0", "feedback 0"]),
        ("feedback_from=token feedback=2", ["feedback_from token", "feedback 1"]),
        ("tied=true encoder_layers=3", ["encoder_layers (3)", "decoder_layers (2)"]),
    ],
    "transformer_xl": [
        ("heads=3", ["heads 3", "d_model 8"]),
        ("d_model=9 d_head=2", ["d_model 9", "odd"]),
        ("same_length=true memory_len=0", ["same_length", "memory_len"]),
        ("cutoffs=[10,10]", ["cutoffs [10, 10]", "ascending"]),
        ("cutoffs=[10,5]", ["cutoffs [10, 5]", "ascending"]),
        ("div_val=2", ["div_val 2", "cutoffs"]),
        ("div_val=4 cutoffs=[10,20]", ["div_val 4", "power 2", "d_model 8"]),
        ("div_val=3 cutoffs=[10]", ["div_val 3", "power 1", "d_model 8"]),
    ],
}


@pytest.mark.parametrize(
    ("model", "overrides", "named"),
    [(model, *case) for model, cases in CONTRADICTIONS.items() for case in cases],
)
def test_contradictions_in_a_model_are_refused_with_their_numbers(runs, model, overrides, named):
    message = runs.refuse(None, *(f"model.{o}" for o in overrides.split()), model=model)
    assert message.startswith(f"{runs.path}: model: ")
    assert all(part in message for part in named), message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ("train.micro_batch=3", ["micro_batch 3", "lanes 4"]),
        ("train.micro_batch=8", ["micro_batch 8", "lanes 4"]),
        ("schedule.warmup=11", ["warmup 11", "steps 10"]),
        ("schedule.minimum=0.01", ["minimum 0.01", "learning_rate 0.001"]),
        ("model.memory_len=null", ["memory_len", "max_document"]),
        (
            "model.memory_len=null data.max_document=9 state.reset=never",
            ["memory_len", "state.reset"],
        ),
        ("optimizer.betas=[0.9,1.0]", ["betas", "1.0"]),
        ("optimizer.betas=[1.5,0.9]", ["betas", "1.5"]),
        ("optimizer.betas=[0.9,-0.1]", ["betas", "-0.1"]),
    ],
)
def test_contradictions_in_a_run_are_refused_with_their_numbers(runs, overrides, named):
    message = runs.refuse(None, *overrides.split())
    assert message.startswith(f"{runs.path}: ")
    assert all(part in message for part in named), message
    assert len(message.splitlines()) == 1


@pytest.mark.parametrize(
    ("memory_len", "max_document", "reset", "bound"),
    [
        (16, None, "document", 16),
        (16, 10, "document", 9),
        (4, 10, "document", 4),
        (0, 10, "document", 0),
        (None, 10, "document", 9),
        (None, 1, "document", 0),
        (16, 10, "never", 16),
    ],
)
def test_a_models_memory_is_bounded_by_the_longest_document(
    runs, memory_len, max_document, reset, bound
):
    def word(value: int | None) -> str:
        return "null" if value is None else str(value)

    config = runs.load(
        None,
        f"model.memory_len={word(memory_len)}",
        f"data.max_document={word(max_document)}",
        f"state.reset={reset}",
    )
    assert config.bounded_model.memory_len == bound
    assert config.model.memory_len == memory_len
    others = {"memory_len": memory_len}
    assert config.bounded_model.model_copy(update=others) == config.model


def test_transformer_xl_is_bounded_by_its_own_memory(runs):
    config = runs.load(None, "state.reset=never", model="transformer_xl")
    assert config.bounded_model == config.model


def test_widths_of_heads_follow_from_the_model_unless_given(runs):
    plain = runs.load(None).model
    assert (plain.head_width, plain.key_value_heads) == (4, 2)
    given = runs.load(None, "model.d_head=6", "model.kv_heads=1").model
    assert (given.head_width, given.key_value_heads) == (6, 1)
    assert runs.load(None, "model.d_head=3", model="transformer_xl").model.head_width == 3


def test_a_configuration_cannot_be_changed(runs):
    config = runs.load()
    with pytest.raises(ValidationError):
        config.train.steps = 3


@pytest.mark.parametrize("model", ["rlt", "transformer_xl"])
def test_the_resolved_configuration_writes_every_default_and_loads_as_itself(
    runs, round_trip, model
):
    config = runs.load(None, "data.max_document=7", model=model)
    text = config.to_yaml()
    for name in ("betas", "weight_decay", "warmup", "reset", "dropout", "keep", "segments"):
        assert f"{name}:" in text
    assert round_trip(config) == config
    assert round_trip(config).to_yaml() == text


positive = st.floats(1e-300, 1e300)
names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1)


@settings(
    deadline=None,
    max_examples=150,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    folder=names | st.sampled_from(["null", "1e-4", "~", "yes", "- a", "a: b", "#", "2020-01-01"]),
    rate=positive,
    eps=positive,
    alpha=st.floats(allow_nan=False, allow_infinity=False),
    beta=st.floats(0, 1, exclude_max=True),
    every=st.none() | st.integers(1, 2**63),
)
def test_any_values_survive_the_round_trip(runs, round_trip, folder, rate, eps, alpha, beta, every):
    content = runs.content() | {"run_folder": folder, "validation": {"every": every}}
    content["model"] |= {"alpha": alpha}
    content["optimizer"] = {"learning_rate": rate, "eps": eps, "betas": [beta, 0.5]}
    config = validate(content, RunConfig, "test")
    assert round_trip(config) == config


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.path=null"], "give one corpus as path, or several as mixture"),
        (["data.mixture=[{path: b}]"], "give one corpus as path, or several as mixture"),
        (["data.path=null", "data.mixture=[]"], "give one corpus as path, or several as mixture"),
        (["data.path=null", "data.mixture=[{path: b, weight: 0}]"], "data.mixture.0.weight"),
        (["data.path=null", "data.mixture=[{path: b, wieght: 2}]"], "weight"),
        (["data.workers=-1"], "data.workers"),
        (["data.remote.attempts=0"], "data.remote.attempts"),
    ],
)
def test_what_a_run_reads_is_one_corpus_or_a_mixture(
    runs: Any, overrides: list[str], said: str
) -> None:
    with pytest.raises(UserError) as error:
        runs.load(None, *overrides)
    assert said in str(error.value)


def test_addresses_stay_and_paths_become_absolute(runs: Any) -> None:
    mixture = "data.mixture=[{path: a/b, weight: 2}, {path: 'https://host/c'}]"
    config = runs.load(None, "data.path=null", mixture).resolved()
    assert [corpus.path for corpus in config.data.corpora] == [
        str(Path("a/b").absolute()),
        "https://host/c",
    ]
    assert config.data.reading_processes == 1
    assert runs.load().data.reading_processes == 0
