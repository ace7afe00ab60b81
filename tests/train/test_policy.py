"""Rewards: what a policy learns from them, on the step that pretraining takes."""

import json
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlt_dist.experiments import policy
from rlt_dist.experiments.policy import Learned, learn_policy
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
from rlt_dist.util.lock import locked

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


@pytest.fixture
def learned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds that the command learns, of which 9 is interrupted."""
    seeds: list[int] = []

    def learn(seed: int, steps: int, _: Any) -> Learned:
        seeds.append(seed)
        if seed == 9:
            raise KeyboardInterrupt
        return Learned(seed, [0.5] * steps, {8: seed / 10, 16: 0.0, 32: 0.0})

    monkeypatch.setattr(policy, "learn_policy", learn)
    return seeds


def test_a_seed_that_is_kept_is_shown_and_not_learned_again(
    command: Any, tmp_path: Path, learned: list[int], strict_json: Any
) -> None:
    arguments = ["experiment", "policy", "--output", tmp_path / "out", "--steps", 3, "--json"]
    assert command(*arguments, "--seeds", "5,9")[0] == 130
    code, out, _ = command(*arguments, "--seeds", "5,1", "--target", 0.5)
    rows = [strict_json(line) for line in out.splitlines()]
    assert [row["seed"] for row in rows] == [5, 1]
    assert rows[0]["accuracy"] == {"8": 0.5, "16": 0.0, "32": 0.0}
    assert code == 1  # seed 1 misses it
    assert command(*arguments, "--seeds", "5", "--target", 0.5)[0] == 0
    assert learned == [5, 9, 1]
    results = strict_json((tmp_path / "out" / "results.json").read_text())
    assert results == {"policy": rows[::-1]}


def test_results_of_other_steps_are_not_put_together(
    command: Any, is_one_error: Any, tmp_path: Path, learned: list[int]
) -> None:
    arguments = ["experiment", "policy", "--output", tmp_path, "--seeds", "1", "--steps"]
    assert command(*arguments, 3)[0] == 0
    before = (tmp_path / "results.json").read_bytes()
    is_one_error(command(*arguments, 4), "in 3 steps, not 4; give another --output")
    with locked(tmp_path, "learns a policy"):
        is_one_error(command(*arguments, 3), "learns a policy here; wait for it")
    assert learned == [1]
    assert (tmp_path / "results.json").read_bytes() == before


RESULTS = ["", "[]", '{"policy": 3}', '{"policy": [3]}', '{"state_tracking": []}']


@pytest.mark.parametrize("content", [*RESULTS, json.dumps({"policy": [{"seed": 1}]})])
def test_damaged_results_are_told_before_anything_is_learned(
    command: Any, is_one_error: Any, tmp_path: Path, learned: list[int], content: str
) -> None:
    path = tmp_path / "results.json"
    path.write_text(content)
    is_one_error(command("experiment", "policy", "--output", tmp_path), f"{path}: is damaged")
    assert not learned
    assert path.read_text() == content


def test_a_folder_that_cannot_be_is_told_before_anything_is_learned(
    command: Any, is_one_error: Any, tmp_path: Path, learned: list[int]
) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "results.json").mkdir()
    for output in (tmp_path / "file", tmp_path, Path("/proc/none")):
        is_one_error(command("experiment", "policy", "--output", output), str(output))
    assert not learned
