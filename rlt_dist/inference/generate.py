"""Generation: prefill the prompt, then sample one token at a time, as text."""

from collections.abc import Iterator
from itertools import islice

import torch

from rlt_dist.data.tokenizers.tokenizer import Tokenizer
from rlt_dist.inference.load import Trained
from rlt_dist.inference.sample import read, walk
from rlt_dist.inference.sampling import Sampling
from rlt_dist.util.errors import UserError


@torch.no_grad()
def generate(
    trained: Trained, prompt: bytes, limit: int, sampling: Sampling, seed: int
) -> Iterator[bytes]:
    """The continuation of a prompt, token by token as bytes, until end-of-text or `limit`.

    The model is free for other use between two tokens, but its weights have to stand still.

    Raises:
        UserError: the prompt is empty; the model predicts from what it has read. Or the model's
            output is not finite.
        RuntimeError: Transformer-XL's weights were seen to have moved between two tokens.
    """
    frozen, tokenizer = trained.model.frozen(), trained.tokenizer
    ids = tokenizer.encode(prompt)
    if not len(ids):
        raise UserError("the prompt is empty; give at least one character to go on from")
    tokens, last = torch.from_numpy(ids).long()[None], int(ids[-1])
    logits, state = read(frozen, trained.config, tokens, None, frozen.empty_state(1))
    for step in islice(walk(frozen, trained.config, logits, state, sampling, seed), limit):
        if step.token == tokenizer.end_of_text:
            return
        yield _text_after(tokenizer, last, step.token)
        last = step.token


def _text_after(tokenizer: Tokenizer, last: int, token: int) -> bytes:
    """What a token adds to the text behind the one before: a word also adds the space between."""
    return tokenizer.decode([last, token])[len(tokenizer.decode([last])) :]
