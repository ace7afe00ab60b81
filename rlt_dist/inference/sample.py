"""Sampling: read prompts, then draw one token of each at a time and read it.

Rows of a batch may be of any lengths, and change nothing of each other: what a row is given depends
on its prompt and its seed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlt_dist.config.model import ModelConfig, TransformerXLConfig
from rlt_dist.config.run import RunConfig
from rlt_dist.inference.forward import autocast
from rlt_dist.inference.sampling import Sampling, draw
from rlt_dist.models.build import Frozen
from rlt_dist.models.state import State, select_lanes
from rlt_dist.util.errors import UserError


@dataclass(frozen=True, eq=False)
class Episode:
    """A prompt, and what was drawn behind it.

    Attributes:
        prompt: int64 [p], p > 0.
        actions: int64 [n], n > 0: the tokens drawn, an end-of-text included.
        log_probabilities: float64 [n], of each in the distribution that it was drawn from.
        sampling: what made that distribution.
    """

    prompt: Tensor
    actions: Tensor
    log_probabilities: Tensor
    sampling: Sampling

    @property
    def tokens(self) -> Tensor:
        """int64 [p + n], prompt and actions."""
        return torch.cat((self.prompt, self.actions))


class Step(NamedTuple):
    """One token drawn.

    Attributes:
        state: that before the token is read.
    """

    token: int
    log_probability: float
    state: State


@torch.no_grad()
def sample(
    model: Frozen,
    config: RunConfig,
    prompts: Sequence[Tensor],
    seeds: Sequence[int],
    sampling: Sampling,
    limit: int,
    end_of_text: int,
) -> list[Episode]:
    """Continue prompts side by side, each until end-of-text or `limit` tokens.

    Args:
        prompts: int64 [p] each, of any lengths.
        seeds: of each prompt. The same prompt and seed give the same tokens in any batch, up to
            the rounding of sums.
        limit: at least 1.

    Raises:
        UserError: there is no prompt, one is empty, or `limit` is less than 1; what a token sees
            would depend on where segments are cut (`check_reach`), and so on the other rows; or
            the model's output is not finite.
    """
    check_limit(limit)
    tokens, starts = _aligned(prompts)
    check_reach(config.model, tokens.shape[1] + limit - 1)  # the last drawn is not read
    logits, state = read(model, config, tokens, starts, model.empty_state(len(prompts)))
    chances = [torch.Generator().manual_seed(seed) for seed in seeds]
    actions: list[list[int]] = [[] for _ in prompts]
    found: list[list[float]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    while True:
        tokens, scores = draw(logits, sampling, _uniform([chances[row] for row in rows], logits))
        for row, token, score in zip(rows, tokens.tolist(), scores.tolist(), strict=True):
            actions[row].append(token)
            found[row].append(score)
        going = [
            place
            for place, row in enumerate(rows)
            if actions[row][-1] != end_of_text and len(actions[row]) < limit
        ]
        if not going:
            break
        if len(going) < len(rows):
            rows = [rows[place] for place in going]
            tokens, state = tokens[going], select_lanes(state, torch.tensor(going))
        logits, state = read(model, config, tokens[:, None], None, state)
    return [
        Episode(prompt, torch.tensor(drawn), torch.tensor(scores, dtype=torch.float64), sampling)
        for prompt, drawn, scores in zip(prompts, actions, found, strict=True)
    ]


@torch.no_grad()
def walk(
    model: Frozen, config: RunConfig, logits: Tensor, state: State, sampling: Sampling, seed: int
) -> Iterator[Step]:
    """Go on with one row for ever, from where `read` left it.

    Args:
        logits: [1, V], of the first token.

    Raises:
        UserError: the model's output is not finite.
    """
    chance = torch.Generator().manual_seed(seed)
    while True:
        token, score = draw(logits, sampling, _uniform([chance], logits))
        yield Step(int(token), float(score), state)
        logits, state = read(model, config, token[:, None], None, state)


def read(
    model: Frozen, config: RunConfig, tokens: Tensor, document_start: Tensor | None, state: State
) -> tuple[Tensor, State]:
    """Read tokens, a segment at a time.

    Args:
        tokens: int64 [b, n], n > 0.
        document_start: bool [b, n], True where a row's state starts afresh; None: nowhere.

    Returns:
        logits [b, V] of the next token, and the state after the last.
    """
    device, length = state["position"].device, config.data.segment
    if document_start is None:
        document_start = torch.zeros_like(tokens, dtype=torch.bool)
    pieces = zip(tokens.split(length, dim=1), document_start.split(length, dim=1), strict=True)
    with autocast(config, device):
        for piece, starts in pieces:
            output, state = model(piece.to(device), starts.to(device), state)
        return model.logits(output[:, -1]), state


def check_limit(limit: int) -> None:
    """Raises UserError where no token may be drawn."""
    if limit < 1:
        raise UserError(f"a limit of {limit} tokens leaves nothing to draw; give at least 1")


def check_reach(config: ModelConfig, length: int) -> None:
    """Check that each of the first `length` tokens sees the same, wherever segments are cut.

    Raises:
        UserError: this is Transformer-XL without same_length, and its memory is shorter.
    """
    if not isinstance(config, TransformerXLConfig) or config.same_length:
        return
    if length > config.memory_len + 1:
        raise UserError(
            f"{length:,} tokens exceed Transformer-XL's memory_len of {config.memory_len:,}, and "
            "what a token sees depends on where segments are cut; choose same_length: true, for "
            "sampling and replay alike, or a longer memory_len"
        )


def _aligned(prompts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Prompts of any lengths as rows that end together, int64 [b, n], and where each starts.

    What stands in front is of another document, which a row does not see.
    """
    if not len(prompts):
        raise UserError("there is no prompt; give at least one to go on from")
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    if not lengths.all():
        raise UserError("the prompt is empty; give at least one token to go on from")
    tokens = pad_sequence(list(prompts), batch_first=True, padding_side="left")
    return tokens, torch.arange(tokens.shape[1]) == tokens.shape[1] - lengths[:, None]


def _uniform(chances: Sequence[torch.Generator], like: Tensor) -> Tensor:
    """float64 [b] in [0, 1), the next number of each row's generator."""
    drawn = [torch.rand(1, generator=chance, dtype=torch.float64) for chance in chances]
    return torch.cat(drawn).to(like.device)
