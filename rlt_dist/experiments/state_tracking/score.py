"""A trained model tested by programs of any length, drawn apart from those trained on.

Longer ones it has never seen, and of as long ones hardly any, but where there are few: of 2^16
programs of 16 bits, parity's recipe trains on a fifth.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlt_dist.data.prepare.labelled import UNSCORED
from rlt_dist.inference.forward import autocast
from rlt_dist.inference.load import Trained, load_trained
from rlt_dist.inference.sample import sample
from rlt_dist.inference.sampling import Sampling
from rlt_dist.tasks.catalogue import TASKS
from rlt_dist.tasks.task import END

_SEED = 3
"""Not that of any programs trained on, nor of those it is validated by."""

_CUT = {"feedback": 1, "feedback_from": "token", "alpha": 0.0}
"""Nothing of what is fed back is left, whatever it is; so all tokens may run together."""

_ROWS, _TOKENS = 256, 64
"""Of a forward: what bounds the memory that scoring takes."""


@dataclass(frozen=True)
class Trial:
    """What a model is tested by.

    Attributes:
        length, programs: of each how long, and how many.
        reach: positions that encoder and cross-attention reach back; None: there is no attention.
        cut: nothing is fed back (alpha 0), which shows what the model does without.
    """

    task: str
    length: int
    programs: int
    reach: int | None
    cut: bool


@dataclass(frozen=True)
class Score:
    """Shares of programs, or of their tokens.

    Attributes:
        final: right after a program's last token.
        prefix: right after a token, of all tokens after which something is to be predicted.
        whole: right after every one of them.
        decoded: programs whose answer is right when the model writes it, its most likely token each
            time; None where programs do not end with an answer.
    """

    final: float
    prefix: float
    whole: float
    decoded: float | None

    @property
    def headline(self) -> float:
        """What a target is compared with: final states that are right, or answers that are."""
        return self.final if self.decoded is None else self.decoded


def score(run_folder: Path, trial: Trial) -> tuple[Path, Trial, Score]:
    """Test a run's model, on one thread; what came of which.

    Raises:
        UserError: there is no whole checkpoint, or no program of that length.
    """
    torch.set_num_threads(1)
    task = TASKS[trial.task]()
    chance = np.random.default_rng((_SEED, trial.length))
    drawn = task.programs(trial.programs, trial.length, chance)
    tokens, labels = map(torch.from_numpy, drawn)
    choices: dict[str, Any] = {} if trial.reach is None else {"memory_len": trial.reach}
    if trial.cut:
        choices |= _CUT
    trained = load_trained(run_folder, choices)
    right = torch.cat(list(_right(trained, tokens, labels)))
    scored, decoded = labels != UNSCORED, None
    if task.answered:
        decoded = _decoded(trained, tokens, labels, task.prompt(trial.length))
    found = Score(
        final=right[:, -1].double().mean().item(),
        prefix=right[scored].double().mean().item(),
        whole=(right | ~scored).all(dim=1).double().mean().item(),
        decoded=decoded,
    )
    return run_folder, trial, found


@torch.no_grad()
def _right(trained: Trained, tokens: Tensor, labels: Tensor) -> Iterator[Tensor]:
    """bool [some, n]: where the most likely id is the label, of some programs after the other."""
    device = next(trained.model.parameters()).device
    frozen = trained.model.frozen()
    for rows, wanted in zip(tokens.split(_ROWS), labels.split(_ROWS), strict=True):
        state, found = frozen.empty_state(len(rows)), []
        for piece in rows.to(device).split(_TOKENS, dim=1):
            with autocast(trained.config, device):
                starts = torch.zeros_like(piece, dtype=torch.bool)
                output, state = frozen(piece, starts, state)
                found.append(frozen.logits(output).argmax(dim=-1).cpu())
        yield torch.cat(found, dim=1) == wanted


def _decoded(trained: Trained, tokens: Tensor, labels: Tensor, prompt: int) -> float:
    """Share of programs whose answer, written greedily behind the prompt, is right."""
    answers, right = labels[:, prompt - 1 :], 0
    for rows, wanted in zip(tokens.split(_ROWS), answers.split(_ROWS), strict=True):
        episodes = sample(
            trained.model.frozen(),
            trained.config,
            list(rows[:, :prompt]),
            [0] * len(rows),
            Sampling(temperature=0),
            wanted.shape[1],
            END,
        )
        right += sum(
            each.actions.tolist() == answer
            for each, answer in zip(episodes, wanted.tolist(), strict=True)
        )
    return right / len(tokens)
