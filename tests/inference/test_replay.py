"""Sampling and replay: what was drawn is scored as it was drawn, however it is cut and batched."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.inference.replay import replay, to_batch
from rlt_dist.inference.sample import Episode, sample
from rlt_dist.inference.sampling import Sampling, draw, log_distribution
from rlt_dist.models.build import Model, initial_model
from rlt_dist.util.errors import UserError

VOCABULARY, END = 11, 0
SHARP = Sampling(temperature=0.7, top_k=6, top_p=0.9)
SAMPLINGS = [Sampling(), Sampling(temperature=1.7), SHARP, Sampling(temperature=0)]
MODELS = {
    "rlt1": ("rlt1", "model.memory_len=5"),
    "rlt2": ("rlt2", "model.memory_len=5"),
    "rlt0": ("rlt1", "model.feedback=0"),
    "xl": ("xl", "model.same_length=true"),
    "cutoffs": ("xl", "model.memory_len=64", "model.cutoffs=[4,8]"),
}


@pytest.fixture(scope="session")
def lively(configure: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`lively(name, precision)`: a model whose distributions are far from even, its configuration.

    Segments are of 4 tokens, so prompts are read in pieces.
    """

    def make(name: str, precision: str = "float64") -> tuple[Model, Any]:
        model, *more = MODELS[name]
        config = configure(
            tmp_path_factory.mktemp(name),
            model,
            f"train.precision={precision}",
            "data.segment=4",
            *more,
        )
        dtype = torch.float64 if precision == "float64" else torch.float32
        net = initial_model(config.bounded_model, VOCABULARY, 3, dtype)
        with torch.no_grad():
            for parameter in net.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(3)
        return net.eval(), config

    return make


def prompts(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(1, VOCABULARY, (length,), generator=generator) for length in lengths]


def drawn(
    case: tuple[Model, Any], given: list[torch.Tensor], sampling: Sampling, limit: int = 14
) -> list[Episode]:
    model, config = case
    seeds = range(len(given))
    return sample(model.frozen(), config, given, seeds, sampling, limit, END)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("precision", "tolerance"), [("float64", 1e-12), ("float32", 1e-5)])
def test_a_replay_gives_the_probabilities_that_were_drawn_from(
    lively: Any, name: str, precision: str, tolerance: float
) -> None:
    case = lively(name, precision)
    for sampling in SAMPLINGS:
        episodes = drawn(case, prompts(1, 9, 4, 14), sampling)
        assert sampling.temperature == 0 or any(e.log_probabilities.any() for e in episodes)
        found = replay(*case, episodes)
        assert found.log_probabilities.requires_grad
        assert found.unsupported == 0
        assert (found.log_probabilities - found.recorded).abs().max() <= tolerance
        assert (found.ratios() - 1).abs().max() <= tolerance


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=10)
@given(data=st.data())
def test_neither_splits_nor_batches_change_a_score(lively: Any, name: str, data: Any) -> None:
    case = lively(name)
    model, config = case
    sampling = data.draw(st.sampled_from(SAMPLINGS))
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    episodes = drawn(case, prompts(*lengths), sampling, 8)
    expected = replay(*case, episodes).log_probabilities
    at = [0, *torch.cumsum(replay(*case, episodes).lengths, 0).tolist()]
    # Another split into prompt and response, in another order, some twice.
    order = data.draw(st.lists(st.integers(0, len(episodes) - 1), min_size=1, max_size=5))
    others, rows = [], []
    for number in order:
        episode = episodes[number]
        moved = data.draw(st.integers(0, len(episode.actions) - 1))
        others.append(
            replace(
                episode,
                prompt=episode.tokens[: len(episode.prompt) + moved],
                actions=episode.actions[moved:],
                log_probabilities=episode.log_probabilities[moved:],
            )
        )
        rows += range(at[number] + moved, at[number + 1])
    found = replay(*case, others).log_probabilities
    assert (found - expected[rows]).abs().max() <= 1e-12
    # Sampling goes on from any split, too: the first draw is from the distribution replayed.
    first = sample(
        model.frozen(), config, [e.prompt for e in others], [7] * len(others), sampling, 1, END
    )
    again = replay(*case, first)
    assert (again.log_probabilities - again.recorded).abs().max() <= 1e-12


@pytest.mark.parametrize("name", ["rlt1", "rlt2", "xl"])
def test_a_row_draws_the_same_alone_and_among_others(lively: Any, name: str) -> None:
    model, config = lively(name)
    given = prompts(3, 11, 1, 6)
    together = drawn((model, config), given, SHARP)
    assert len({len(episode.actions) for episode in together}) > 1
    for seed, (prompt, episode) in enumerate(zip(given, together, strict=True)):
        (alone,) = sample(model.frozen(), config, [prompt], [seed], SHARP, 14, END)
        assert torch.equal(alone.actions, episode.actions)
        assert (alone.log_probabilities - episode.log_probabilities).abs().max() <= 1e-12
        assert torch.equal(episode.prompt, prompt)
        assert END not in episode.actions[:-1]
        assert len(episode.actions) == 14 or episode.actions[-1] == END


def test_draws_follow_the_distribution_that_is_recorded(lively: Any) -> None:
    case = lively("rlt1")
    (prompt,) = prompts(5)
    model, config = case
    episodes = sample(model.frozen(), config, [prompt] * 4000, range(4000), SHARP, 1, END)
    chosen = torch.stack([episode.actions[0] for episode in episodes])
    scores = torch.stack([episode.log_probabilities[0] for episode in episodes])
    seen = chosen.bincount(minlength=VOCABULARY) / 4000
    probability = torch.zeros(VOCABULARY, dtype=torch.float64)
    probability[chosen] = scores.exp()
    assert abs(float(probability.sum()) - 1) < 1e-9
    assert (seen - probability).abs().max() < 0.03


@pytest.mark.parametrize("name", ["rlt1", "rlt2"])
def test_the_gradient_is_that_of_the_whole_history(lively: Any, name: str) -> None:
    """Of log p under the recorded temperature, top-k and top-p; prompts give gradients, too."""
    model, config = lively(name)
    episodes = drawn((model, config), prompts(2, 7), SHARP)
    total = replay(model, config, episodes).log_probabilities.sum()
    found = torch.autograd.grad(total, list(model.parameters()), materialize_grads=True)
    plain = torch.zeros((), dtype=torch.float64)
    for episode in episodes:
        tokens = episode.tokens[None]
        output, _ = model(tokens, torch.zeros_like(tokens, dtype=torch.bool), model.empty_state(1))
        scores = log_distribution(model.logits(output[0]), SHARP)
        for place in range(len(episode.prompt), tokens.shape[1]):
            plain = plain + scores[place - 1, tokens[0, place]]
    expected = torch.autograd.grad(plain, list(model.parameters()), materialize_grads=True)
    for one, two in zip(found, expected, strict=True):
        assert (one - two).abs().max() <= 1e-9 * two.abs().max().clamp(min=1e-6)


def test_actions_outside_the_support_are_counted_and_their_ratios_refused(lively: Any) -> None:
    model, config = lively("rlt1")
    episodes = drawn((model, config), prompts(4, 2, 6), SHARP)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(-1.3)
    found = replay(model, config, episodes)
    lost = found.log_probabilities.isneginf()
    assert 0 < found.unsupported == int(lost.sum()) < len(lost)
    with pytest.raises(UserError, match=f"{found.unsupported} of {len(lost)} actions are outside"):
        found.ratios()
    # Those that are inside have their scores and gradients all the same.
    gradients = torch.autograd.grad(
        found.log_probabilities[~lost].sum(), list(model.parameters()), materialize_grads=True
    )
    assert all(gradient.isfinite().all() for gradient in gradients)
    # Without top-k and top-p, everything can be drawn.
    assert replay(model, config, [replace(e, sampling=Sampling()) for e in episodes]).ratios().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("temperature", [1e-9, 1e-38, 1e-45, 1e-300])
def test_however_cold_it_is_the_most_likely_token_is_drawn(
    dtype: torch.dtype, temperature: float
) -> None:
    logits = torch.tensor([[1e3, -1e3, 1001.0, 0.0], [-5.0, -6.0, -9.0, -7.0]], dtype=dtype)
    uniform = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    for sampling in (Sampling(temperature), Sampling(temperature, top_k=3, top_p=0.9)):
        tokens, scores = draw(logits, sampling, uniform)
        assert tokens.tolist() == [2, 0]
        assert scores.tolist() == [0, 0]


def test_each_episode_is_scored_under_its_own_sampling(lively: Any) -> None:
    case = lively("rlt2")
    mixed = [drawn(case, prompts(3), sampling)[0] for sampling in SAMPLINGS]
    found = replay(*case, mixed)
    assert (found.log_probabilities - found.recorded).abs().max() <= 1e-12


def test_a_reach_that_depends_on_segments_is_refused(configure: Any, tmp_path: Path) -> None:
    """Where memory_len is 12, the 14th token would be seen by one that is read by itself."""
    config = configure(tmp_path, "xl", "data.segment=4")
    case = initial_model(config.model, VOCABULARY, 0, torch.float64), config
    episodes = drawn(case, prompts(9, 2), Sampling(top_k=9), 5)
    assert max(len(episode.tokens) for episode in episodes) == 14
    found = replay(*case, episodes)
    assert (found.log_probabilities - found.recorded).abs().max() <= 1e-12
    longer = replace(episodes[0], prompt=prompts(10)[0])
    with pytest.raises(UserError, match="same_length"):
        replay(*case, [longer, episodes[1]])
    # Nor are such episodes drawn: rows would change each other.
    with pytest.raises(UserError, match=r"14 tokens exceed .* same_length"):
        drawn(case, prompts(2, 10), Sampling(), 5)


def test_an_empty_prompt_is_refused(lively: Any) -> None:
    with pytest.raises(UserError, match="prompt is empty"):
        drawn(lively("rlt1"), [*prompts(3), torch.zeros(0, dtype=torch.int64)], SHARP)


def test_nothing_to_draw_or_to_score_is_refused(lively: Any) -> None:
    case = lively("rlt1")
    with pytest.raises(UserError, match="there is no prompt"):
        drawn(case, [], SHARP)
    with pytest.raises(UserError, match="limit of 0 tokens"):
        drawn(case, prompts(3), SHARP, 0)
    with pytest.raises(UserError, match="there is no episode"):
        replay(*case, [])


def test_a_model_that_diverged_is_refused(lively: Any) -> None:
    model, config = lively("rlt1")
    with torch.no_grad():
        model.output_norm.weight.fill_(torch.inf)
    with pytest.raises(UserError, match="not finite; it diverged"):
        drawn((model, config), prompts(3), SHARP)


def test_rows_behind_their_last_action_reach_nothing(lively: Any) -> None:
    model, config = lively("rlt1")
    episodes = drawn((model, config), prompts(2, 9), SHARP)
    batch = to_batch(model, episodes)
    assert batch.loss_mask.sum(1).tolist() == [len(episode.actions) for episode in episodes]
    for row, episode in enumerate(episodes):
        assert torch.equal(batch.targets[row][batch.loss_mask[row]], episode.actions)
