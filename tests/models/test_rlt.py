"""What the Recurrent Looped Transformer computes, case by case."""

import copy

import pytest
import torch

from rlt_dist.models.dropout import Dropout
from rlt_dist.models.initial import initialise
from rlt_dist.models.rlt.model import RecurrentLoopedTransformer
from rlt_dist.models.state import detach
from rlt_dist.ops.noise import Noise

FEEDBACKS = [0, 1, 2, 4]


# Gradients


@pytest.mark.parametrize("feedback", FEEDBACKS)
@pytest.mark.parametrize("tied", [False, True])
def test_autograd_agrees_with_central_differences(lab, feedback, tied):
    model = lab.model(feedback=feedback, tied=tied, memory_groups=2, kv_heads=1, memory_len=4)
    tokens, starts = lab.tokens(2, 7), lab.starts(2, 7, (1, 3))
    targets = lab.tokens(2, 7, seed=2)

    def loss() -> torch.Tensor:
        return model.nll(lab.run(model, tokens, starts, cuts=[5])[0], targets).mean()

    gradients = lab.gradients(model, loss())
    step = 1e-5
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            at = gradients[name].abs().argmax()
            value = parameter.view(-1)[at].item()
            ends = []
            for sign in (1, -1):
                parameter.view(-1)[at] = value + sign * step
                ends.append(loss())
            parameter.view(-1)[at] = value
            slope = (ends[0] - ends[1]) / (2 * step)
            assert abs(gradients[name].view(-1)[at]) > 1e-6, name
            assert lab.error(slope, gradients[name].view(-1)[at]) <= 1e-6, name


def initial_state_gradient(lab, window: int, cut: str) -> float:
    """Largest gradient that the last of three single-token segments sends to s_star.

    Three, since windows alone reach back (window - 1) tokens a layer: two layers, two tokens.

    Args:
        cut: "s" or "decoder": the part of the state detached between segments; "" for none.
    """
    model = lab.model(window=window)
    tokens, state = lab.tokens(2, 3), model.empty_state(2)
    for t in range(3):
        output, state = model(tokens[:, t : t + 1], lab.starts(2, 1), state)
        state = {
            name: tensor.detach() if cut and name.startswith(cut) else tensor
            for name, tensor in state.items()
        }
    return lab.gradients(model, output.sum())["merge.initial_state"].abs().max().item()


@pytest.mark.parametrize(("window", "paths"), [(1, 1), (2, 2), (4, 2)])
def test_the_gradient_reaches_the_initial_state_on_two_paths_unless_the_window_is_one(
    lab, window, paths
):
    through_windows = initial_state_gradient(lab, window, cut="s")
    through_s = initial_state_gradient(lab, window, cut="decoder")
    assert through_s > 1e-6
    assert (through_windows > 1e-6) == (paths == 2)
    if paths == 1:
        assert through_windows == 0.0
        assert through_s == initial_state_gradient(lab, window, cut="")


@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_a_detached_state_takes_no_gradient_back(lab, feedback):
    """The first segment runs on weights of its own, so that its gradient stands apart."""
    first = lab.model(feedback=feedback, memory_groups=2)
    second = copy.deepcopy(first)
    tokens = lab.tokens(2, 9)
    _, state = lab.run(first, tokens[:, :5])
    for name, tensor in detach(state).items():
        assert not tensor.requires_grad, name
    output, _ = lab.run(second, tokens[:, 5:], state=detach(state))
    gradients = torch.autograd.grad(output.sum(), list(first.parameters()), allow_unused=True)
    assert all(gradient is None for gradient in gradients)


@pytest.mark.parametrize("part", ["s", "boundary", "decoder", "encoder", "memory"])
def test_an_attached_state_takes_gradient_back_through_every_part(lab, part):
    """One row is cut inside a chunk (which runs on from h), the other at its end (from s)."""
    model = lab.model(feedback=4)
    tokens = lab.tokens(2, 9)
    _, state = lab.run(model, tokens[:, :6], lab.starts(2, 6, (1, 2)))
    parts = [tensor for name, tensor in state.items() if name.split(".")[0] == part]
    output, _ = lab.run(model, tokens[:, 6:], state=state)
    for gradient in torch.autograd.grad(output.sum(), parts):
        assert gradient.abs().max() > 1e-6


@pytest.mark.parametrize("feedback", [1, 4])
def test_a_document_on_the_border_starts_from_an_attached_initial_state(lab, feedback):
    model = lab.model(feedback=feedback)
    tokens = lab.tokens(2, 7)
    starts = lab.starts(2, 7, (1, 4))
    _, state = lab.run(model, tokens[:, :4], starts[:, :4])
    output, _ = lab.run(model, tokens[:, 4:], starts[:, 4:], state=detach(state))
    reached = [lab.gradients(model, row.sum())["merge.initial_state"] for row in output]
    assert reached[0].abs().max() == 0.0
    assert reached[1].abs().max() > 1e-6


@pytest.mark.parametrize("truncate", [True, False])
def test_a_running_chunk_loses_its_carried_initial_state_exactly_when_truncated(lab, truncate):
    model = lab.model(feedback=4, window=1)
    tokens = lab.tokens(2, 4)
    _, state = lab.run(model, tokens[:, :2], truncate=truncate)
    output, _ = lab.run(model, tokens[:, 2:], state=state)
    reached = lab.gradients(model, output.sum())["merge.initial_state"].abs().max()
    assert reached == 0.0 if truncate else reached > 1e-6


# Feedback, memory and position


def test_chunks_of_one_token_are_rlt_1(lab):
    """RLT-2's own code path, its boundary state included, at B = 1."""
    model = lab.model(feedback=1)
    tokens, starts = lab.tokens(2, 8), lab.starts(2, 8, (0, 3))
    plain, _ = lab.run(model, tokens, starts, cuts=[5])
    boundary = model.empty_state(2) | {"boundary": torch.full((2, 8), torch.nan).double()}
    chunked, state = lab.run(model, tokens, starts, cuts=[5], state=boundary)
    assert torch.equal(plain, chunked)
    assert state["boundary"].isfinite().all()


def test_merges_of_a_chunk_share_the_boundary_state(lab):
    """The first chunk is the same for every longer interval; a new boundary makes a difference."""
    tokens = lab.tokens(1, 8)
    outputs = {b: lab.run(lab.model(feedback=b), tokens)[0] for b in (1, 4, 8)}
    assert lab.error(outputs[1][:, 0], outputs[4][:, 0]) <= 1e-12
    assert lab.error(outputs[4][:, :4], outputs[8][:, :4]) <= 1e-12
    assert lab.error(outputs[1][:, 1], outputs[4][:, 1]) > 1e-3
    assert lab.error(outputs[4][:, 4], outputs[8][:, 4]) > 1e-3


@pytest.mark.parametrize("feedback", [1, 4])
def test_alpha_zero_cuts_the_feedback(lab, feedback):
    model, plain = lab.model(feedback=feedback, alpha=0.0), lab.model(feedback=0)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in plain.named_parameters():
            parameter.copy_(own[name])
    tokens = lab.tokens(2, 9)
    assert lab.error(lab.run(model, tokens)[0], lab.run(plain, tokens)[0]) <= 1e-12


@pytest.mark.parametrize(("memory_len", "window"), [(2, 1), (2, 3), (1, 4), (0, 3), (0, 1)])
def test_memory_len_and_window_reach_exactly_as_far_as_they_say(lab, memory_len, window):
    """One layer each and no feedback: a token sees e or the window, each of which saw tokens."""
    layers = {"encoder_layers": 1, "decoder_layers": 1, "feedback": 0}
    model = lab.model(memory_len=memory_len, window=window, **layers)
    reach = memory_len + max(memory_len, window - 1)
    tokens = lab.tokens(1, 10)
    before, _ = lab.run(model, tokens, cuts=[4])
    for distance in range(10):
        changed = tokens.clone()
        changed[:, 9 - distance] = (tokens[:, 9 - distance] + 1) % model.vocabulary
        after, _ = lab.run(model, changed, cuts=[4])
        assert torch.equal(before[:, 9], after[:, 9]) == (distance > reach), distance


@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_carried_memory_stops_growing(lab, feedback):
    model = lab.model(feedback=feedback, memory_len=5, window=4)
    tokens, state = lab.tokens(2, 21), model.empty_state(2)
    for seen in range(3, 22, 3):
        _, state = lab.run(model, tokens[:, seen - 3 : seen], state=state)
        for name, tensor in state.items():
            limit = {"encoder": 5, "memory": 5, "decoder": 3}.get(name.split(".")[0])
            if limit is not None:
                assert tensor.shape[1] == min(limit, seen), name


def test_a_window_grows_by_its_lanes_tokens_not_by_their_padding(lab):
    """Else states of micro-batches cannot be joined: their windows differ in length."""
    model = lab.model(feedback=4, window=20)
    tokens, starts = lab.tokens(2, 3), lab.starts(2, 3, (1, 1))
    _, state = lab.run(model, tokens, starts)
    assert state["decoder.0.k"].shape[1] == 3


@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_unlimited_memory_grows_with_the_stream(lab, feedback):
    _, state = lab.run(lab.model(feedback=feedback), lab.tokens(2, 12), cuts=[5])
    assert state["memory.0.k"].shape[1] == state["encoder.1.v"].shape[1] == 12
    assert state["position"].tolist() == state["tokens"].tolist() == [12, 12]


def test_position_counts_from_the_document_and_tokens_from_the_stream(lab):
    starts = lab.starts(3, 6, (0, 0), (1, 4), (2, 1), (2, 3))
    _, state = lab.run(lab.model(), lab.tokens(3, 6), starts, cuts=[2, 4])
    assert state["position"].tolist() == [6, 2, 3]
    assert state["tokens"].tolist() == [6, 6, 6]


def far_state(model: RecurrentLoopedTransformer, lanes: int) -> dict:
    return model.empty_state(lanes) | {"position": torch.full((lanes,), 10**7)}


@pytest.mark.parametrize("feedback", FEEDBACKS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-4)])
def test_splits_agree_at_position_ten_million(lab, feedback, dtype, bound):
    model = lab.model(dtype, feedback=feedback)
    tokens = lab.tokens(2, 9)
    whole, _ = lab.run(model, tokens, state=far_state(model, 2))
    parts, state = lab.run(model, tokens, cuts=[1, 2, 3, 6], state=far_state(model, 2))
    assert lab.error(parts, whole) <= bound
    assert state["position"].tolist() == [10**7 + 9] * 2


def test_float32_is_right_at_position_ten_million(lab):
    wide, narrow = (lab.model(dtype) for dtype in (torch.float64, torch.float32))
    tokens = lab.tokens(2, 9)
    outputs = [lab.run(model, tokens, state=far_state(model, 2))[0] for model in (narrow, wide)]
    assert lab.error(*outputs) <= 1e-4


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-7), (torch.float32, 1e-4)])
def test_without_feedback_only_relative_positions_matter(lab, dtype, bound):
    model = lab.model(dtype, feedback=0)
    tokens = lab.tokens(2, 9)
    near, _ = lab.run(model, tokens)
    far, _ = lab.run(model, tokens, state=far_state(model, 2))
    assert lab.error(far, near) <= bound


# Weights


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tie_output", [False, True])
@pytest.mark.parametrize("feedback", [0, 1])
def test_parameters_carry_the_names_of_exported_checkpoints(lab, tied, tie_output, feedback):
    model = lab.model(tied=tied, tie_output=tie_output, feedback=feedback, memory_groups=2)
    names = {name for name, _ in model.named_parameters()}
    assert any(name.startswith("merge.") for name in names) == bool(feedback)
    assert ("output.weight" in names) != tie_output
    assert ("decoder.1.attn.q.weight" in names) != tied
    assert ("decoder.1.ffn.gate.weight" in names) != tied
    assert {"decoder.1.cross.q.weight", "decoder.1.ffn_norm.weight", "memory.1.k.weight"} <= names


def filled(lab, dtype: torch.dtype, seed: int = 3, **options) -> dict:
    model = RecurrentLoopedTransformer(lab.config(**options), 11).to(dtype)
    initialise(model, seed, model.initial_distribution)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_initial_values_depend_on_seed_and_name_alone(lab):
    wide = filled(lab, torch.float64)
    torch.manual_seed(1)
    for name, values in filled(lab, torch.float32).items():
        assert torch.equal(values, wide[name].float()), name
    other = filled(lab, torch.float64, encoder_layers=1, memory_groups=2, feedback=0)
    for name in other.keys() & wide.keys():
        if not name.endswith(("o.weight", "down.weight")):  # these know the depth
            assert torch.equal(other[name], wide[name]), name
    assert not torch.equal(filled(lab, torch.float64, seed=4)["embed.weight"], wide["embed.weight"])


def test_initial_values_do_not_depend_on_the_order_of_filling(lab):
    class Reversed(RecurrentLoopedTransformer):
        def named_parameters(self, *args, **kwargs):
            return reversed(list(super().named_parameters(*args, **kwargs)))

    model = Reversed(lab.config(), 11).double()
    initialise(model, 3, model.initial_distribution)
    expected = filled(lab, torch.float64)
    assert all(torch.equal(values, expected[name]) for name, values in model.named_parameters())


def test_no_two_tensors_start_alike(lab):
    drawn = [x.flatten()[:8] for name, x in filled(lab, torch.float64).items() if x.dim() == 2]
    directions = torch.stack(drawn)
    directions = directions / directions.norm(dim=1, keepdim=True)
    alike = (directions @ directions.T).abs() - torch.eye(len(drawn))
    assert alike.max() < 0.999


def test_initial_deviations_are_as_documented(lab):
    values = filled(lab, torch.float64, d_model=64, ffn=128, heads=4)
    assert values["embed.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert values["encoder.0.attn.q.weight"].std().item() == pytest.approx(64**-0.5, rel=0.05)
    assert values["decoder.1.cross.o.weight"].std().item() == pytest.approx(512**-0.5, rel=0.05)
    assert values["encoder.1.ffn.down.weight"].std().item() == pytest.approx(1024**-0.5, rel=0.05)
    assert values["merge.initial_state"].std().item() == pytest.approx(0.02, rel=0.4)
    assert (values["merge.gate.bias"] == 0).all()
    assert (values["output_norm.weight"] == 1).all()


# Loss, dropout and precision


def test_nll_is_the_negative_log_probability_of_the_target(lab):
    model = lab.model()
    output, _ = lab.run(model, lab.tokens(2, 5))
    targets = lab.tokens(2, 5, seed=9)
    log_p = model.logits(output).log_softmax(dim=-1).gather(-1, targets[..., None])[..., 0]
    assert lab.error(model.nll(output, targets), -log_p) <= 1e-12


def test_evaluation_drops_nothing(lab):
    tokens = lab.tokens(2, 6)
    outputs = [lab.run(lab.model(dropout=p), tokens)[0] for p in (0.5, 0.0)]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_dropout_reaches_every_sublayer_and_names_each_mask_once(lab, feedback, monkeypatch):
    used = []
    mask = Dropout.mask

    def record(self: Dropout, site: str, layer: int, shape: tuple[int, ...]) -> torch.Tensor | None:
        used.append((site, layer))
        return mask(self, site, layer, shape)

    monkeypatch.setattr(Dropout, "mask", record)
    model = lab.model(feedback=feedback, dropout=0.2)
    lab.run(model, lab.tokens(2, 6), noise=Noise(0, 0, torch.arange(2)))
    sites = [("encoder", "attn"), ("encoder", "ffn")]
    sites += [("decoder", "attn"), ("decoder", "cross"), ("decoder", "ffn")]
    wanted = [(f"{stack}.{sublayer}", layer) for stack, sublayer in sites for layer in (0, 1)]
    assert sorted(used) == sorted([("embed", 0), *wanted])


def test_dropout_of_a_token_does_not_depend_on_the_segments_length(lab):
    model = lab.model(dropout=0.4)
    tokens, noise = lab.tokens(2, 9), Noise(0, 5, torch.arange(2))
    long, _ = lab.run(model, tokens, noise=noise)
    short, _ = lab.run(model, tokens[:, :5], noise=noise)
    assert lab.error(short, long[:, :5]) <= 1e-12


def test_dropout_differs_from_step_to_step_and_repeats_in_a_step(lab):
    model, tokens, lanes = lab.model(dropout=0.4), lab.tokens(2, 6), torch.arange(2)
    first, again, next_step = (
        lab.run(model, tokens, noise=Noise(0, step, lanes))[0] for step in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert lab.error(next_step, first) > 1e-3


@pytest.mark.parametrize("feedback", FEEDBACKS)
def test_bfloat16_products_leave_a_float32_state_and_a_close_loss(lab, feedback):
    model = lab.model(torch.float32, feedback=feedback, dropout=0.1)
    tokens, targets = lab.tokens(3, 12), lab.tokens(3, 12, seed=4)
    losses = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            starts = lab.starts(3, 12, (0, 5))
            noise = Noise(0, 0, torch.arange(3))
            output, state = lab.run(model, tokens, starts, cuts=[4], noise=noise)
            loss = model.nll(output, targets).mean()
        for name, tensor in state.items():
            assert not tensor.is_floating_point() or tensor.dtype == torch.float32, name
        assert loss.dtype == torch.float32
        assert all(g.isfinite().all() for g in lab.gradients(model, loss).values())
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=0.03)
    assert losses[1] != losses[0]
