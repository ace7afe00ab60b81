"""Properties of every Recurrent Looped Transformer, over random options, documents and cuts."""

import operator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlt_dist.models.state import join_lanes, select_lanes
from rlt_dist.ops.noise import Noise

few = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
some = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))

Options = dict[str, object]


@dataclass(frozen=True)
class Case:
    """One model and one batch."""

    options: Options
    starts: list[list[bool]]
    cuts: list[int]

    @property
    def document_start(self) -> Tensor:
        return torch.tensor(self.starts)


looped_options = st.fixed_dictionaries(
    {
        "feedback": st.sampled_from([0, 1, 2, 4]),
        "tied": st.booleans(),
        "tie_output": st.booleans(),
        "heads": st.just(4),
        "kv_heads": st.sampled_from([1, 2, 4]),
        "memory_groups": st.sampled_from([1, 2]),
        "window": st.sampled_from([1, 2, 3, 6, 20]),
        "memory_len": st.sampled_from([None, 0, 1, 3, 100]),
    }
)


variants: st.SearchStrategy[Options] = st.sampled_from(
    [
        {"feedback": 1, "feedback_from": "token"},
        {"feedback": 0, "decoder_layers": 0, "tied": False, "memory_groups": 1},
    ]
)
model_options = looped_options | st.builds(operator.or_, looped_options, variants)


@st.composite
def cases(draw: st.DrawFn, options: st.SearchStrategy[Options] = model_options) -> Case:
    rows, length = draw(st.integers(1, 3)), draw(st.integers(2, 10))
    start = st.sampled_from([False, False, False, True])
    row = st.lists(start, min_size=length, max_size=length)
    starts = draw(st.lists(row, min_size=rows, max_size=rows))
    return Case(draw(options), starts, draw(st.lists(st.integers(1, length - 1))))


def documents(row: list[bool]) -> list[slice]:
    """The documents of a row, as slices of it."""
    begins = sorted({0, *(t for t, starts in enumerate(row) if starts)})
    return [slice(a, b) for a, b in zip(begins, [*begins[1:], len(row)], strict=True)]


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
@few
@given(case=cases())
def test_any_split_gives_the_same_states_and_logits(lab, dtype, bound, case):
    model = lab.model(dtype, **case.options)
    tokens = lab.tokens(*case.document_start.shape)
    whole, whole_state = lab.run(model, tokens, case.document_start)
    parts, parts_state = lab.run(model, tokens, case.document_start, case.cuts)
    assert lab.error(parts, whole) <= bound
    assert lab.error(model.logits(parts), model.logits(whole)) <= bound
    visible = lab.visible(model.config, parts_state), lab.visible(model.config, whole_state)
    assert lab.worst(*visible) <= bound


@few
@given(case=cases())
def test_without_detaching_a_split_changes_no_gradient(lab, case):
    model = lab.model(**case.options)
    tokens = lab.tokens(*case.document_start.shape)
    weight = lab.tokens(*tokens.shape, seed=2).double()  # so that tokens count differently
    gradients = [
        lab.gradients(
            model,
            (
                model.nll(lab.run(model, tokens, case.document_start, cuts)[0], tokens) * weight
            ).sum(),
        )
        for cuts in ([], case.cuts)
    ]
    assert lab.worst(*gradients) <= 1e-9


@few
@given(case=cases(), data=st.data())
def test_a_token_changes_its_own_output_and_no_earlier_one_by_a_single_bit(lab, case, data):
    model = lab.model(**case.options)
    tokens = lab.tokens(*case.document_start.shape)
    token = data.draw(st.integers(0, tokens.shape[1] - 1))
    changed = tokens.clone()
    changed[:, token] = (changed[:, token] + 1) % model.vocabulary
    before, _ = lab.run(model, tokens, case.document_start)
    after, _ = lab.run(model, changed, case.document_start)
    assert torch.equal(before[:, :token], after[:, :token])
    assert (before[:, token] != after[:, token]).any(dim=1).all()


@few
@given(case=cases())
def test_documents_inside_rows_are_as_documents_alone(lab, case):
    model = lab.model(**case.options)
    tokens = lab.tokens(*case.document_start.shape)
    packed, _ = lab.run(model, tokens, case.document_start, case.cuts)
    for row, starts in enumerate(case.starts):
        for document in documents(starts):
            alone, _ = lab.run(model, tokens[row : row + 1, document])
            assert lab.error(packed[row : row + 1, document], alone) <= 1e-10


@few
@given(case=cases())
def test_a_row_alone_is_as_in_a_batch_with_its_gradient_and_state(lab, case):
    model = lab.model(**case.options)
    starts, tokens = case.document_start, lab.tokens(*case.document_start.shape)
    batch, batch_state = lab.run(model, tokens, starts, case.cuts)
    for row in range(len(tokens)):
        one = slice(row, row + 1)
        alone, alone_state = lab.run(model, tokens[one], starts[one], case.cuts)
        assert lab.error(batch[one], alone) <= 1e-12
        gradients = (
            lab.gradients(model, model.nll(x, tokens[one]).sum()) for x in (batch[one], alone)
        )
        assert lab.worst(*gradients) <= 1e-9
        states = select_lanes(batch_state, one), alone_state
        assert lab.worst(*(lab.visible(model.config, state) for state in states)) <= 1e-12


@few
@given(case=cases())
def test_states_of_micro_batches_join_to_the_state_of_the_batch(lab, case):
    model = lab.model(**case.options)
    starts, tokens = case.document_start, lab.tokens(*case.document_start.shape)
    lanes = [slice(row, row + 1) for row in range(len(tokens))]
    _, whole = lab.run(model, tokens, starts, case.cuts)
    joined = join_lanes([lab.run(model, tokens[i], starts[i], case.cuts)[1] for i in lanes])
    assert {n: x.shape for n, x in joined.items()} == {n: x.shape for n, x in whole.items()}
    assert lab.worst(*(lab.visible(model.config, state) for state in (joined, whole))) <= 1e-12


@few
@given(case=cases())
def test_dropout_does_not_depend_on_micro_batches(lab, case):
    model = lab.model(**case.options, dropout=0.3)
    starts, tokens = case.document_start, lab.tokens(*case.document_start.shape)
    lanes = torch.arange(len(tokens)) + 5
    whole, _ = lab.run(model, tokens, starts, noise=Noise(0, 3, lanes))
    for row in range(len(tokens)):
        one = slice(row, row + 1)
        alone, _ = lab.run(model, tokens[one], starts[one], noise=Noise(0, 3, lanes[one]))
        assert lab.error(whole[one], alone) <= 1e-12


@few
@given(case=cases(looped_options), feedback=st.integers(1, 5))
def test_dropout_of_a_token_is_the_same_however_tokens_are_chunked(lab, case, feedback):
    """Without the fed-back state (alpha 0) chunks change nothing, unless their masks do."""
    starts, tokens = case.document_start, lab.tokens(*case.document_start.shape)
    noise = Noise(0, 3, torch.arange(len(tokens)))
    options = case.options | {"alpha": 0.0, "dropout": 0.3}
    outputs = []
    for interval in (0, feedback):
        model = lab.model(**options | {"feedback": 1})  # parameters of the same values
        model.config = lab.config(**options | {"feedback": interval})
        model.merge = model.merge if interval else None
        outputs.append(lab.run(model, tokens, starts, noise=noise)[0])
    assert lab.error(*outputs) <= 1e-10
