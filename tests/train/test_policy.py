"""Rewards: what a policy learns from them, on the step that pretraining takes."""

from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlt_dist.experiments.policy import learn_policy
from rlt_dist.inference.replay import replay, to_batch
from rlt_dist.inference.sample import sample
from rlt_dist.inference.sampling import Sampling
from rlt_dist.mesh.world import open_world
from rlt_dist.parallel.engine.engine import make_engine
from rlt_dist.parallel.mesh import mesh_of
from rlt_dist.train.policy import group_advantages, policy_objective
from rlt_dist.train.session import new_model
from rlt_dist.train.step import train_step
from rlt_dist.util.errors import UserError

VOCABULARY, END = 11, 0
SAMPLING = Sampling(temperature=0.8, top_k=9)


def test_advantages_are_deviations_from_the_group() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0, 1.0], [1.0, 1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]])
    found = group_advantages(rewards)
    third = 3**-0.5
    expected = torch.tensor([[1.0, -1.0, -1.0, 1.0], [0.0] * 4, [-third] * 3 + [3 * third]])
    assert torch.allclose(found, expected)


@pytest.mark.parametrize("reward", [0.1, 0.7, 1e-9, 3e7])
def test_a_group_that_did_alike_has_no_advantage(reward: float) -> None:
    assert not any(group_advantages(torch.full((2, n), reward)).any() for n in range(1, 20))


class Lab:
    """A small policy, what it drew, and advantages of it."""

    def __init__(self, config: Any, mesh: Any) -> None:
        self.config, self.mesh = config, mesh
        self.local = new_model(config, VOCABULARY, mesh)
        self.model = self.local.model
        self.advantages = torch.linspace(-1, 1, 8, dtype=torch.float64)
        self.draw()

    def draw(self) -> None:
        """Episodes of the model as it is."""
        prompts = [torch.arange(1, 2 + row % 5) for row in range(8)]
        model = self.model.frozen()
        self.episodes = sample(model, self.config, prompts, range(8), SAMPLING, 6, END)

    def step(self, **choices: Any) -> Any:
        """One step of the policy; the result."""
        return train_step(
            self.local,
            make_engine(self.local, self.config.optimizer, self.mesh),
            to_batch(self.model, self.episodes),
            self.model.empty_state(8),
            config=self.config,
            mesh=self.mesh,
            step=1,
            learning_rate=1e-4,
            objective=policy_objective(self.episodes, self.advantages, **choices),
        )[0]


@pytest.fixture
def lab(configure: Any, tmp_path: Any) -> Any:
    """`lab(model, *overrides)`: a context with a `Lab`."""

    @contextmanager
    def make(model: str, *overrides: str) -> Any:
        config = configure(tmp_path, model, "model.dropout=0.0", *overrides)
        with open_world() as world, mesh_of(config, world) as mesh:
            yield Lab(config, mesh)

    return make


@pytest.mark.parametrize("model", ["rlt1", "rlt2"])
@pytest.mark.parametrize("micro", [8, 2])
def test_a_step_on_policy_is_reinforce(lab: Any, model: str, micro: int) -> None:
    """Sum of A grad log p over the actions, divided by their number; in micro-batches, too."""
    with lab(model, f"train.micro_batch={micro}") as one:
        found = replay(one.model, one.config, one.episodes)
        gains = one.advantages.repeat_interleave(found.lengths)
        plain = -(gains * found.log_probabilities).sum() / len(gains)
        expected = torch.autograd.grad(plain, list(one.model.parameters()), materialize_grads=True)
        result = one.step()
        norm = torch.stack([gradient.square().sum() for gradient in expected]).sum().sqrt()
        assert abs(result.gradient_norm - float(norm)) <= 1e-9 * float(norm)
        assert abs(result.loss + float(gains.mean())) <= 1e-9


def test_a_step_makes_what_was_better_likelier_and_the_rest_less_likely(lab: Any) -> None:
    with lab("rlt1") as one:
        one.advantages = torch.where(torch.arange(8) == 2, 1.0, 0.0).double()
        before = replay(one.model, one.config, one.episodes[2:3]).log_probabilities.sum()
        one.step()
        assert replay(one.model, one.config, one.episodes[2:3]).log_probabilities.sum() > before


def test_ratios_beyond_the_clip_have_no_gradient(lab: Any) -> None:
    with lab("rlt1") as one:
        one.advantages = torch.ones(8, dtype=torch.float64)
        one.episodes = [
            replace(each, log_probabilities=each.log_probabilities - 1) for each in one.episodes
        ]
        result = one.step()
        assert result.gradient_norm == 0
        assert result.loss == pytest.approx(-1.2, rel=1e-9)


def test_entropy_is_rewarded(lab: Any) -> None:
    with lab("rlt1") as one:
        one.advantages = torch.zeros(8, dtype=torch.float64)
        with torch.no_grad():
            one.model.output.weight.mul_(40)  # or there would be none to gain
        one.draw()
        before = replay(one.model, one.config, one.episodes)
        result = one.step(entropy=0.5)
        assert result.loss == pytest.approx(-0.5 * before.entropy.mean().item(), rel=1e-9)
        assert replay(one.model, one.config, one.episodes).entropy.mean() > before.entropy.mean()


def test_actions_that_are_outside_the_support_now_are_refused(lab: Any) -> None:
    with lab("rlt1") as one:
        one.episodes = [replace(each, sampling=Sampling(temperature=0)) for each in one.episodes]
        with pytest.raises(UserError, match="outside the support"):
            one.step()


def test_a_policy_learns_what_is_rewarded() -> None:
    """The shape of an answer, within a few steps; the task itself takes a minute."""
    found = learn_policy(0, 40, lambda _: None)
    assert sum(found.rewards[:5]) / 5 < 0.1
    assert sum(found.rewards[-5:]) / 5 > 0.3
    assert set(found.accuracy) == {8, 16, 32}
