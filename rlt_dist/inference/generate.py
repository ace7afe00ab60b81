"""Generation: prefill the prompt, then sample one token at a time."""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from rlt_dist.config.run import RunConfig
from rlt_dist.data.tokenizers.tokenizer import Tokenizer
from rlt_dist.inference.forward import autocast
from rlt_dist.inference.load import Trained
from rlt_dist.models.build import Frozen
from rlt_dist.models.state import State
from rlt_dist.util.errors import UserError


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn.

    Attributes:
        temperature: logits are divided by it; 0 takes the most likely token.
        top_k: only the k most likely tokens; None: all.
        top_p: only the most likely tokens whose probabilities reach p together; 1: all.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise UserError(
                f"temperature {self.temperature} is no temperature; 0 is greedy, 1 plain"
            )
        if self.top_k is not None and self.top_k < 1:
            raise UserError(f"top-k {self.top_k} leaves no token; give at least 1")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top-p {self.top_p} is not a share; give more than 0 and at most 1")


def log_distribution(logits: Tensor, sampling: Sampling) -> Tensor:
    """Log-probabilities [..., V] of the distribution that tokens are really drawn from.

    Temperature comes first, then top-k, then top-p on what is left; tokens outside the support
    have -inf.
    """
    if sampling.temperature == 0:
        best = logits.argmax(dim=-1, keepdim=True)
        return torch.full_like(logits, -torch.inf).scatter(-1, best, 0.0)
    logits = logits / sampling.temperature
    if sampling.top_k is not None:
        kept = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1)
        logits = torch.full_like(logits, -torch.inf).scatter(-1, kept.indices, kept.values)
    if sampling.top_p < 1:
        ordered, order = logits.softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        # A token stays while the more likely ones have not reached p: the first always stays.
        dropped = ordered.cumsum(dim=-1) - ordered >= sampling.top_p
        logits = logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)
    return logits.log_softmax(dim=-1)


@torch.no_grad()
def generate(
    trained: Trained, prompt: bytes, limit: int, sampling: Sampling, seed: int
) -> Iterator[bytes]:
    """The continuation of a prompt, token by token as bytes, until end-of-text or `limit`.

    The model is free for other use between two tokens, but its weights have to stand still.

    Raises:
        UserError: the prompt is empty; the model predicts from what it has read.
        RuntimeError: Transformer-XL's weights were seen to have moved between two tokens.
    """
    frozen, tokenizer = trained.model.frozen(), trained.tokenizer
    ids = tokenizer.encode(prompt)
    if not len(ids):
        raise UserError("the prompt is empty; give at least one character to go on from")
    device = next(trained.model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.from_numpy(ids).long().to(device)[None]
    state, last = frozen.empty_state(1), int(ids[-1])
    for piece in tokens.split(trained.config.data.segment, dim=1):
        logits, state = _read(frozen, trained.config, piece, state)
    for _ in range(limit):
        if logits.isnan().any() or not logits.max().isfinite():
            raise UserError(f"{trained.run_folder}: the model's output is not finite; it diverged")
        probabilities = log_distribution(logits.double().cpu(), sampling).exp()
        token = torch.multinomial(probabilities, 1, generator=generator)
        if token.item() == tokenizer.end_of_text:
            return
        yield _text_after(tokenizer, last, int(token))
        last = int(token)
        logits, state = _read(frozen, trained.config, token[None].to(device), state)


def _text_after(tokenizer: Tokenizer, last: int, token: int) -> bytes:
    """What a token adds to the text behind the one before: a word also adds the space between."""
    return tokenizer.decode([last, token])[len(tokenizer.decode([last])) :]


def _read(model: Frozen, config: RunConfig, tokens: Tensor, state: State) -> tuple[Tensor, State]:
    """Consume tokens [1, n]; logits [V] for the next one, and the new state."""
    start = torch.zeros_like(tokens, dtype=torch.bool)
    with autocast(config, tokens.device):
        output, state = model(tokens, start, state)
        return model.logits(output[:, -1])[0], state
