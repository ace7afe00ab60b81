"""What a lane remembers: joined, cut, detached, checked and restarted."""

import pytest
import torch

from rlt_dist.models.state import (
    counters,
    detach,
    finite_lanes,
    join_lanes,
    restart_lanes,
    select_lanes,
)

FEEDBACKS = [0, 1, 4]


@pytest.fixture(params=FEEDBACKS)
def model(lab, request):
    return lab.model(feedback=request.param, memory_len=4)


@pytest.fixture
def state(lab, model):
    """The state of three lanes at different positions."""
    return lab.run(model, lab.tokens(3, 7), lab.starts(3, 7, (1, 3), (2, 6)))[1]


def poisoned(state: dict, lane: int, value: float = torch.nan) -> dict:
    """The state with every number of one lane replaced."""
    state = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in state.values():
        if tensor.is_floating_point():
            tensor.data[lane] = value
    return state


def test_counters_of_a_new_lane_are_zero_and_separate():
    state = counters(2, torch.device("cpu"))
    state["tokens"] += 5
    assert state["position"].tolist() == [0, 0]
    assert state["position"].dtype == torch.int64


def test_joining_selected_lanes_gives_the_state_back(state):
    joined = join_lanes([select_lanes(state, rows) for rows in (slice(0, 2), slice(2, 3))])
    assert joined.keys() == state.keys()
    assert all(torch.equal(joined[name], tensor) for name, tensor in state.items())


def test_selected_lanes_run_as_they_did_among_the_others(lab, model, state):
    tokens = lab.tokens(3, 5, seed=7)
    whole, _ = lab.run(model, tokens, state=state)
    part, _ = lab.run(model, tokens[1:], state=select_lanes(state, slice(1, 3)))
    assert lab.error(part, whole[1:]) <= 1e-12


def test_detaching_cuts_every_tensor_and_changes_no_value(state):
    assert any(tensor.requires_grad for tensor in state.values())
    cut = detach(state)
    assert not any(tensor.requires_grad for tensor in cut.values())
    assert all(torch.equal(cut[name], tensor) for name, tensor in state.items())


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_one_bad_number_anywhere_makes_its_lane_not_finite(state, value):
    assert finite_lanes(state).tolist() == [True, True, True]
    for name, tensor in state.items():
        if tensor.is_floating_point():
            bad = tensor.detach().clone()
            bad[1].view(-1)[-1] = value
            assert finite_lanes(state | {name: bad}).tolist() == [True, False, True], name


def test_lanes_of_an_empty_state_are_finite(model):
    assert finite_lanes(model.empty_state(2)).tolist() == [True, True]


def test_a_bad_lane_does_not_poison_the_others(lab, model, state):
    tokens = lab.tokens(3, 6, seed=7)
    clean, _ = lab.run(model, tokens, state=state)
    mixed, after = lab.run(model, tokens, state=poisoned(state, 1))
    assert torch.equal(mixed[[0, 2]], clean[[0, 2]])
    assert finite_lanes(after).tolist() == [True, False, True]


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_restarted_lane_is_as_at_a_document_start(lab, model, state, value):
    tokens = lab.tokens(3, 6, seed=7)
    bad = poisoned(state, 1, value)
    restarted = restart_lanes(bad, ~finite_lanes(bad))
    assert finite_lanes(restarted).all()
    output, after = lab.run(model, tokens, state=restarted)
    fresh, _ = lab.run(model, tokens[1:2])
    others, _ = lab.run(model, tokens, state=state)
    assert lab.error(output[1:2], fresh) <= 1e-12
    assert torch.equal(output[[0, 2]], others[[0, 2]])
    assert after["tokens"].tolist() == [13, 13, 13]
    assert after["position"].tolist() == [13, 6, 7]


def test_a_restarted_lane_sends_the_gradient_of_a_document_start(lab, model, state):
    tokens = lab.tokens(3, 6, seed=7)
    restarted = restart_lanes(detach(poisoned(state, 1)), torch.tensor([False, True, False]))
    runs = lab.run(model, tokens, state=restarted)[0][1:2], lab.run(model, tokens[1:2])[0]
    assert lab.worst(*(lab.gradients(model, output.sum()) for output in runs)) <= 1e-10


def test_restarting_no_lane_changes_nothing(state):
    same = restart_lanes(state, torch.zeros(3, dtype=torch.bool))
    assert all(torch.equal(same[name], tensor) for name, tensor in state.items())
