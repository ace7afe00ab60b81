"""Where weights stand still, results are the same, and nothing derived outlives them."""

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlt_dist.config.model import RltConfig, TransformerXLConfig
from rlt_dist.models.build import initial_model
from rlt_dist.models.state import State
from rlt_dist.models.transformer_xl.model import FrozenTransformerXL, TransformerXL

LANES, VOCABULARY, TOKENS = 2, 11, 14
SIZES = {"d_model": 8, "heads": 2, "d_inner": 12, "layers": 2}


def build(**options: Any) -> TransformerXL:
    """A tiny model none of whose parameters is at a special value."""
    config = TransformerXLConfig.model_validate({"memory_len": 5, **SIZES, **options})
    model = initial_model(config, VOCABULARY, 0, torch.float64)
    assert isinstance(model, TransformerXL)
    shift(model, 0.4)
    return model


@torch.no_grad()
def shift(model: TransformerXL, size: float) -> None:
    chance = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=chance, dtype=torch.float64)
        parameter.add_(size * noise)


@dataclass(frozen=True)
class Case:
    """A model, and how a text goes through it."""

    options: dict[str, Any]
    lengths: tuple[int, ...]
    documents: tuple[tuple[int, int], ...]


cases = st.builds(
    Case,
    options=st.fixed_dictionaries(
        {
            "memory_len": st.sampled_from([1, 3, 5, 40]),
            "same_length": st.booleans(),
            "clamp_len": st.sampled_from([None, 1, 4]),
            "pre_norm": st.booleans(),
            "d_head": st.sampled_from([None, 3]),
        }
    ),
    lengths=st.sampled_from([(14,), (4, 4, 4, 2), (1,) * 14, (2, 9, 3), (9, 1, 1, 1, 1, 1)]),
    documents=st.lists(
        st.tuples(st.integers(0, LANES - 1), st.integers(0, TOKENS - 1)), max_size=3
    ).map(tuple),
)


def text() -> Tensor:
    chance = torch.Generator().manual_seed(2)
    return torch.randint(VOCABULARY, (LANES, TOKENS), generator=chance)


def run(model: TransformerXL | FrozenTransformerXL, case: Case) -> tuple[Tensor, State]:
    """Outputs [b, T, d] and the last state."""
    start = torch.zeros(LANES, TOKENS, dtype=torch.bool)
    for lane, at in case.documents:
        start[lane, at] = True
    state, outputs = model.empty_state(LANES), []
    for ids, begins in zip(
        text().split(case.lengths, 1), start.split(case.lengths, 1), strict=True
    ):
        output, state = model(ids, begins, state)
        outputs.append(output)
    return torch.cat(outputs, 1), state


def assert_same(x: Tensor, y: Tensor) -> None:
    assert (x - y).abs().max() <= 1e-12 * y.abs().max()


PLAIN = Case({}, (4, 4, 4, 2), ())


@settings(max_examples=60, deadline=None)
@given(case=cases)
def test_results_are_those_of_weights_that_may_move(case: Case) -> None:
    model = build(**case.options)
    with torch.no_grad():
        expected, after = run(model, case)
        found, state = run(model.frozen(), case)
    assert_same(found, expected)
    assert torch.equal(state["position"], after["position"])
    assert torch.equal(state["tokens"], after["tokens"])
    for n in range(2):
        assert state[f"memory.{n}.k"].shape[:2] == after[f"memory.{n}"].shape[:2]


def test_bfloat16_products_give_the_same_too() -> None:
    model = build().float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        expected, _ = run(model, PLAIN)
        found, _ = run(model.frozen(), PLAIN)
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 0.02 * expected.abs().max()


@torch.no_grad()
def test_another_precision_is_noticed() -> None:
    model = build().float()
    frozen = model.frozen()
    with torch.autocast("cpu", torch.bfloat16):
        run(frozen, PLAIN)
    assert (run(frozen, PLAIN)[0] - run(model, PLAIN)[0]).abs().max() <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("change", [{"clamp_len": 1}, {"memory_len": 2}, {"same_length": True}])
def test_a_setting_that_names_no_parameter_may_change(change: dict[str, Any]) -> None:
    model = build()
    frozen = model.frozen()
    before, _ = run(frozen, PLAIN)
    model.config = model.config.model_copy(update=change)
    found, _ = run(frozen, PLAIN)
    assert_same(found, run(model, PLAIN)[0])
    assert not torch.equal(found, before)


@torch.no_grad()
def test_a_state_holds_keys_and_values_or_inputs_never_both() -> None:
    model = build()
    _, keys = run(model.frozen(), PLAIN)
    _, inputs = run(model, PLAIN)
    assert {name for name in keys if "0" in name} == {"memory.0.k", "memory.0.v"}
    assert {name for name in inputs if "0" in name} == {"memory.0"}


def load(model: TransformerXL) -> None:
    model.load_state_dict({name: x * 1.25 for name, x in model.state_dict().items()})


def step(model: TransformerXL) -> None:
    run(model, PLAIN)[0].sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


@pytest.mark.parametrize("move", [load, step, TransformerXL.float])
def test_weights_that_move_are_noticed(move: Any) -> None:
    model = build()
    frozen = model.frozen()
    with torch.no_grad():
        run(frozen, PLAIN)
    move(model)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="weights have changed"):
            run(frozen, PLAIN)
        expected, _ = run(model, PLAIN)
        assert (run(model.frozen(), PLAIN)[0] - expected).abs().max() <= 1e-5


@torch.no_grad()
def test_nothing_derived_is_there_the_next_time() -> None:
    """Even where weights are set in a way that leaves no trace on them."""
    model = build()
    run(model.frozen(), PLAIN)
    for parameter in model.parameters():
        parameter.data.mul_(1.25)
    assert_same(run(model.frozen(), PLAIN)[0], run(model, PLAIN)[0])


def test_a_model_made_in_inference_mode_gives_the_same_too() -> None:
    with torch.inference_mode():
        model = build()
        expected, _ = run(model, PLAIN)
        assert_same(run(model.frozen(), PLAIN)[0], expected)
    with torch.no_grad():
        assert_same(run(model.frozen(), PLAIN)[0], expected)


def test_gradients_are_refused() -> None:
    with pytest.raises(RuntimeError, match="no gradients"):
        run(build().frozen(), PLAIN)


@pytest.mark.parametrize("gradients", [False, True])
def test_the_model_itself_refuses_a_state_of_keys(gradients: bool) -> None:
    """It could not tell whether they are of its weights, nor give them a gradient."""
    model = build()
    state = model.frozen().empty_state(LANES)
    start = torch.zeros(LANES, TOKENS, dtype=torch.bool)
    with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError, match="empty_state"):
        model(text(), start, state)


def test_the_model_trains_as_ever_in_between() -> None:
    model = build()

    def gradients() -> dict[str, Tensor]:
        model.zero_grad()
        run(model, PLAIN)[0].square().sum().backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    expected, frozen = gradients(), model.frozen()
    with torch.no_grad():
        run(frozen, PLAIN)
    found = gradients()
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient)


@torch.no_grad()
def test_a_copy_of_the_model_is_independent() -> None:
    model = build()
    frozen = model.frozen()
    run(frozen, PLAIN)
    other = copy.deepcopy(model)
    shift(other, 0.3)
    assert "memory.0" in other.empty_state(1)
    assert_same(run(frozen, PLAIN)[0], run(model, PLAIN)[0])
    assert_same(run(other.frozen(), PLAIN)[0], run(other, PLAIN)[0])


def test_rlt_gives_the_same_too() -> None:
    sizes = {"d_model": 8, "heads": 2, "ffn": 12, "encoder_layers": 1, "decoder_layers": 1}
    config = RltConfig.model_validate({**sizes, "window": 3})
    model = initial_model(config, VOCABULARY, 0, torch.float64)
    start = torch.zeros(LANES, TOKENS, dtype=torch.bool)
    with torch.no_grad():
        expected, _ = model(text(), start, model.empty_state(LANES))
        frozen = model.frozen()
        found, _ = frozen(text(), start, frozen.empty_state(LANES))
    assert torch.equal(found, expected)


@pytest.mark.parametrize(("length", "memory_len"), [(5, 5), (9, 5), (3, 5), (4, 0)])
def test_memory_keeps_nothing_but_itself_in_memory(length: int, memory_len: int) -> None:
    model = build(memory_len=memory_len)
    state = model.empty_state(LANES)
    for _ in range(3):
        start = torch.zeros(LANES, length, dtype=torch.bool)
        _, state = model(text()[:, :length], start, state)
    for n in range(2):
        memory = state[f"memory.{n}"]
        assert memory.untyped_storage().nbytes() == memory.numel() * memory.element_size()
