"""Reinforcement learning of a state-tracking task, on the step of pretraining.

The model reads a program of bits and "=", and answers. The answer that is rewarded is the parity of
the bits and an end, and no other. What an answer looks like is to be found out, too: of all pairs
of six tokens one is right. Each program is answered several times, and an answer is learned from by
how much better it did than the others (`train.policy`).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlt_dist.config.load import validate
from rlt_dist.config.run import RunConfig
from rlt_dist.inference.replay import to_batch
from rlt_dist.inference.sample import Episode, sample
from rlt_dist.inference.sampling import Sampling
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.mesh.world import open_world
from rlt_dist.models.build import Model
from rlt_dist.ops.noise import seed_from
from rlt_dist.parallel.engine.engine import make_engine
from rlt_dist.parallel.mesh import mesh_of
from rlt_dist.tasks.task import END, FIRST
from rlt_dist.train.policy import group_advantages, policy_objective
from rlt_dist.train.schedule import learning_rate
from rlt_dist.train.session import new_model
from rlt_dist.train.step import train_step
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import make_folder, write_atomic
from rlt_dist.util.lock import locked
from rlt_dist.util.records import to_json

EQUALS, VOCABULARY = FIRST + 2, FIRST + 3
"""By the ids that a tokenizer of the words 0, 1 and = has."""

PROGRAMS, ANSWERS, BITS = 32, 8, (1, 2, 3, 4, 6, 8)
"""Programs of a step, answers to each, and the lengths that programs have, all in every step."""

ENTROPY = 0.2
"""Reward for a nat. Without it, answers to long programs settle on one before any is learned."""

TESTED, ASKED = (8, 16, 32), 512
"""Bits of the programs that a policy is tested by, and how many programs of each length."""

RESULTS = "results.json"
"""In the output folder: all seeds that were ever learned there."""

Watch = Callable[[Mapping[str, Any]], None]


@dataclass(frozen=True)
class Learned:
    """What came of one seed.

    Attributes:
        rewards: mean reward of the answers drawn at each step.
        accuracy: share of right answers to programs of so many bits, each the most likely one.
    """

    seed: int
    rewards: list[float]
    accuracy: dict[int, float]

    @property
    def record(self) -> dict[str, Any]:
        """For results.json."""
        return {"steps": len(self.rewards)} | asdict(self)


def learn_policies(
    output: Path, seeds: Sequence[int], steps: int, watch: Watch
) -> Iterator[Learned]:
    """Learn one seed after the other, each unless its result is kept in the output folder.

    Args:
        watch: see `learn_policy`.

    Raises:
        UserError: the folder cannot be made, or its results are damaged or of other steps.
        Trouble: another process learns there.
    """
    make_folder(output)
    with locked(output, "learns a policy"):
        path = output / RESULTS
        known = _read(path, steps)
        for seed in seeds:
            if seed not in known:
                known[seed] = learn_policy(seed, steps, watch)
                records = [known[each].record for each in sorted(known)]
                write_atomic(path, to_json({"policy": records}) + "\n")
            yield known[seed]


def _read(path: Path, steps: int) -> dict[int, Learned]:
    """What was learned before, by seed; all of it in so many steps."""
    try:
        records = json.loads(path.read_bytes())["policy"]
        known = {each.seed: each for each in map(_of_record, records)}
    except FileNotFoundError:
        return {}
    except (IsADirectoryError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{path}: is damaged, or no policy's results; remove it, or give another --output"
        ) from None
    for each in known.values():
        if len(each.rewards) != steps:
            raise UserError(
                f"{path}: has seeds learned in {len(each.rewards)} steps, not {steps}; give "
                "another --output"
            )
    return known


def _of_record(record: Mapping[str, Any]) -> Learned:
    accuracy = {bits: float(record["accuracy"][str(bits)]) for bits in TESTED}
    return Learned(int(record["seed"]), [float(each) for each in record["rewards"]], accuracy)


def learn_policy(seed: int, steps: int, watch: Watch) -> Learned:
    """Train a policy on rewards alone, and test it.

    Args:
        watch: called after each step with its number, mean reward and loss.
    """
    config, rewards = _config(seed, steps), list[float]()
    with open_world() as world, mesh_of(config, world) as mesh:
        learner = Learner(config, mesh)
        for step in range(1, steps + 1):
            reward, loss = learner.step(step)
            rewards.append(reward)
            watch({"seed": seed, "step": step, "reward": reward, "loss": loss})
        accuracy = {bits: learner.accuracy(bits) for bits in TESTED}
    return Learned(seed, rewards, accuracy)


class Learner:
    """A policy in training."""

    def __init__(self, config: RunConfig, mesh: Mesh) -> None:
        self._config, self._mesh = config, mesh
        self._local = new_model(config, VOCABULARY, mesh)
        self._optimizer = make_engine(self._local, config.optimizer, mesh)

    @property
    def model(self) -> Model:
        """The policy."""
        return self._local.model

    def step(self, step: int) -> tuple[float, float]:
        """Ask, reward, and learn; the mean reward and the loss."""
        seed = self._config.train.seed
        chance = np.random.default_rng((seed, step))
        programs = [_program(chance, bits) for bits in chance.choice(BITS, PROGRAMS)]
        asked = [program for program in programs for _ in range(ANSWERS)]
        answers = self._answers(asked, Sampling(), seed_from(seed, step))
        rewards = _rewards(answers)
        advantages = group_advantages(rewards.view(PROGRAMS, ANSWERS)).flatten()
        result, _ = train_step(
            self._local,
            self._optimizer,
            to_batch(self.model, answers).to(self._mesh.world.device),
            self.model.empty_state(len(answers)),
            config=self._config,
            mesh=self._mesh,
            step=step,
            learning_rate=learning_rate(self._config, step),
            objective=policy_objective(answers, advantages, ENTROPY),
        )
        return rewards.mean().item(), result.loss

    def accuracy(self, bits: int) -> float:
        """Share of right answers, the most likely one to each program."""
        chance = np.random.default_rng((self._config.train.seed, 0, bits))
        asked = [_program(chance, bits) for _ in range(ASKED)]
        return _rewards(self._answers(asked, Sampling(temperature=0), 0)).mean().item()

    def _answers(self, asked: Sequence[Tensor], sampling: Sampling, seed: int) -> list[Episode]:
        seeds = [seed_from(seed, number) for number in range(len(asked))]
        return sample(self.model.frozen(), self._config, asked, seeds, sampling, 2, END)


def _program(chance: np.random.Generator, bits: int) -> Tensor:
    return torch.from_numpy(np.append(FIRST + chance.integers(0, 2, bits), EQUALS))


def _rewards(episodes: Sequence[Episode]) -> Tensor:
    """1 for an answer that is the parity and an end, else 0: float32 [episodes]."""
    return torch.tensor(
        [float(each.actions.tolist() == [_parity(each.prompt), END]) for each in episodes]
    )


def _parity(program: Tensor) -> int:
    return FIRST + int((program[:-1] - FIRST).sum() % 2)


def _config(seed: int, steps: int) -> RunConfig:
    """About 17,000 parameters; nothing is read from a corpus, and nothing written."""
    content = {
        "run_folder": "policy",
        "model": {
            "kind": "rlt",
            "d_model": 32,
            "heads": 2,
            "ffn": 64,
            "encoder_layers": 1,
            "decoder_layers": 1,
            "window": 4,
            "memory_len": 64,
            "alpha": 1.0,
        },
        "data": {"path": "drawn", "lanes": PROGRAMS * ANSWERS, "segment": BITS[-1] + 2},
        "optimizer": {"learning_rate": 3e-3},
        "schedule": {"warmup": min(20, steps), "minimum": 3e-4},
        "train": {"steps": steps, "seed": seed},
    }
    return validate(content, RunConfig, "the policy experiment")
