"""The backends of the recurrence core give what the reference gives, gradients included."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlt_dist.config.model import RltConfig
from rlt_dist.models.build import initial_model
from rlt_dist.models.state import State, detach
from rlt_dist.ops.noise import Noise
from rlt_dist.ops.reach import segment_positions
from rlt_dist.ops.recurrence import dispatch
from rlt_dist.ops.recurrence.arithmetic import normalise
from rlt_dist.ops.recurrence.chunks import plan_chunks
from rlt_dist.ops.recurrence.dispatch import Recurrence
from rlt_dist.ops.recurrence.parts import Choice
from rlt_dist.ops.recurrence.problem import Operands, Plan
from rlt_dist.ops.recurrence.reference import run_reference

FAST = ["python", "native"]
VOCABULARY, LANES = 29, 3
some = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
many = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
pytestmark = pytest.mark.usefixtures("empty_memory_holds_nan")


@dataclass(frozen=True)
class Case:
    """A model, and how a sequence goes through it."""

    options: dict[str, Any]
    tokens: int = 11
    segment: int = 4
    recompute: Choice = "none"
    detached: bool = False
    document_share: float = 0.15


cases = st.builds(
    Case,
    options=st.fixed_dictionaries(
        {
            "kv_heads": st.sampled_from([1, 2, 4]),
            "d_head": st.sampled_from([None, 2, 6]),
            "window": st.sampled_from([1, 2, 3, 6, 20]),
            "memory_groups": st.sampled_from([1, 2]),
            "memory_len": st.sampled_from([None, 0, 3, 50]),
            "feedback": st.sampled_from([0, 1, 2, 4]),
            "tied": st.booleans(),
            "dropout": st.sampled_from([0.0, 0.3]),
        }
    ),
    segment=st.sampled_from([1, 3, 4, 11]),
    recompute=st.sampled_from(["none", 1, 2, 3, 5]),
    detached=st.booleans(),
    document_share=st.sampled_from([0.0, 0.2]),
)


def run(
    case: Case,
    backend: str,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
    bfloat16: bool = False,
) -> dict[str, Tensor]:
    """Outputs, the state after the last segment, and the gradient of a loss that reads both."""
    sizes = {"d_model": 16, "heads": 4, "ffn": 20, "encoder_layers": 2, "decoder_layers": 2}
    config = RltConfig.model_validate({**sizes, "alpha": 0.5, **case.options})
    model = initial_model(config, VOCABULARY, seed, dtype)
    model.recurrence = Recurrence(backend, case.recompute)
    chance = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=chance, dtype=torch.float64)
        parameter.data += (0.2 * noise).to(dtype)
    tokens = torch.randint(VOCABULARY, (LANES, case.tokens), generator=chance)
    start = torch.rand(tokens.shape, generator=chance) < case.document_share
    state: State = model.empty_state(LANES)
    outputs = []
    for step, first in enumerate(range(0, case.tokens, case.segment)):
        part = slice(first, first + case.segment)
        noise = Noise(1, step, torch.arange(LANES))
        state = detach(state) if case.detached else state
        with torch.autocast("cpu", torch.bfloat16, enabled=bfloat16):
            output, state = model(tokens[:, part], start[:, part], state, noise)
        outputs.append(output)
    output = torch.cat(outputs, dim=1)
    carried = {f"state.{k}": v for k, v in state.items() if v.is_floating_point()}
    loss = model.nll(output, tokens).mean() + sum(v.square().mean() for v in carried.values())
    loss.backward()
    found = {"output": output} | carried
    found |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {name: tensor.detach() for name, tensor in found.items()}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative error of any tensor.

    Where the reference itself is nothing but rounding (queries and keys have no gradient where a
    softmax has one key) the largest gradient stands for the tensor's size.
    """
    assert found.keys() == expected.keys()
    sizes = {name: y.abs().max().item() for name, y in expected.items() if y.numel()}
    largest = max(sizes.values())
    return max(
        (found[name] - expected[name]).abs().max().item()
        / (max(size, 1e-6) if size > 1e-12 * largest else largest)
        for name, size in sizes.items()
    )


@some
@given(case=cases, seed=st.integers(0, 3), fast=st.sampled_from(FAST))
def test_every_option_gives_the_reference_s_gradients_to_1e_12(case, seed, fast):
    assert worst(run(case, fast, seed=seed), run(case, "reference", seed=seed)) <= 1e-12


@pytest.mark.parametrize("fast", FAST)
@pytest.mark.parametrize("feedback", [0, 1, 3])
def test_float32_is_close_to_the_reference_in_float64(fast, feedback):
    case = Case({"feedback": feedback, "memory_len": 6, "window": 4})
    found = {name: tensor.double() for name, tensor in run(case, fast, torch.float32).items()}
    assert worst(found, run(case, "reference")) <= 1e-4


@pytest.mark.parametrize("recompute", ["none", 2])
@pytest.mark.parametrize("feedback", [0, 1, 3])
def test_bfloat16_products_of_the_loop_in_torch_are_close_also_where_chunks_are_padded(
    feedback, recompute
):
    case = Case({"feedback": feedback, "memory_len": 6, "window": 4}, recompute=recompute)
    found = run(case, "python", torch.float32, bfloat16=True)["output"].double()
    expected = run(case, "reference")["output"]
    assert 1e-5 < worst({"output": found}, {"output": expected}) <= 0.1


def test_norms_are_not_rounded_where_products_are():
    x = torch.randn(5, 64)
    with torch.autocast("cpu", torch.bfloat16):
        found = normalise(x, 1e-5)
    assert all(map(torch.equal, found, normalise(x, 1e-5)))


@pytest.mark.parametrize("feedback", [0, 1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_compiled_loop_gives_the_same_bits_on_one_thread_and_on_more(
    feedback, dtype, monkeypatch
):
    """Only the loop is asked: the encoder's products may differ with the threads."""
    problems = []

    def remember(plan: Plan, operands: Operands) -> tuple[Tensor, list[Tensor]]:
        problems.append((plan, operands))
        return run_reference(plan, operands)

    monkeypatch.setattr(dispatch, "run_reference", remember)
    run(Case({"feedback": feedback, "window": 4, "dropout": 0.2}), "reference", dtype)
    before = torch.get_num_threads()
    try:
        for plan, operands in problems:
            results = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                s, windows = Recurrence("native").run(plan, operands)
                results.append([s, *windows])
            assert all(map(torch.equal, results[0], results[1]))
            assert all(map(torch.equal, results[0], results[2]))
    finally:
        torch.set_num_threads(before)


# -- chunks ------------------------------------------------------------------------------------


@st.composite
def positions(draw: st.DrawFn) -> Tensor:
    """Positions [T, B] of a segment with documents starting anywhere."""
    lanes, tokens = draw(st.integers(1, 3)), draw(st.integers(1, 12))
    flags = st.lists(st.booleans(), min_size=tokens, max_size=tokens)
    start = torch.tensor(draw(st.lists(flags, min_size=lanes, max_size=lanes)))
    carried = torch.tensor(draw(st.lists(st.integers(0, 20), min_size=lanes, max_size=lanes)))
    return segment_positions(start, carried)[0].T


def borders(position: list[int], feedback: int) -> list[int]:
    """Where a lane's chunks begin."""
    return [t for t, p in enumerate(position) if t == 0 or (feedback and p % feedback == 0)]


@many
@given(position=positions(), feedback=st.integers(0, 5))
def test_a_plan_puts_every_token_in_one_chunk_and_keeps_their_order(position, feedback):
    chunks = plan_chunks(position, feedback)
    for lane, row in enumerate(position.T.tolist()):
        begins = borders(row, feedback)
        wanted = list(zip(begins, [*begins[1:], len(row)], strict=True))
        first, length = chunks.first[:, lane].tolist(), chunks.length[:, lane].tolist()
        found = [(a, a + n) for a, n in zip(first, length, strict=True) if n]
        assert found == wanted
        for k, (a, _) in enumerate(wanted):
            assert bool(chunks.start[k, lane]) == (row[a] == 0)
            assert bool(chunks.fresh[k, lane]) == bool(feedback and row[a] % feedback == 0)


@many
@given(position=positions(), feedback=st.integers(0, 5))
def test_lanes_run_their_chunks_together_never_token_by_token(position, feedback):
    chunks = plan_chunks(position, feedback)
    assert len(chunks) == max(len(borders(row, feedback)) for row in position.T.tolist())
    assert int(chunks.length.max()) <= (feedback or len(position))


@many
@given(position=positions(), feedback=st.integers(0, 5))
def test_slots_read_and_write_every_token_once_and_padding_elsewhere(position, feedback):
    chunks = plan_chunks(position, feedback)
    tokens, lanes = position.shape
    times = torch.arange(tokens + 1)[:, None].expand(-1, lanes)
    written = torch.full_like(times, -1)
    for k, at in enumerate(chunks.slots):
        seen = at.get(times)
        for lane in range(lanes):
            real = int(chunks.length[k, lane])
            assert (seen[:real, lane] < tokens).all() and (seen[real:, lane] == tokens).all()
        at.put(written, seen)
    assert torch.equal(written[:tokens], times[:tokens])
