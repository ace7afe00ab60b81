"""Loss on held-out text, with the state carried across segments or cut at each."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlt_dist.config.run import RunConfig
from rlt_dist.data.loader import Batch
from rlt_dist.inference.forward import batch_nll
from rlt_dist.models.build import Model
from rlt_dist.models.state import detach
from rlt_dist.util.errors import UserError


@dataclass(frozen=True)
class Evaluation:
    """Sums over scored tokens.

    A document's first token is never predicted, for nothing stands before it; its end-of-text is,
    and stands for no byte.

    Attributes:
        nll: sum of -log p, in nats.
        tokens: how many tokens were scored.
        bytes: how many bytes of text they stand for; 0 where the tokenizer is not lossless.
    """

    nll: float
    tokens: int
    bytes: int

    @property
    def loss(self) -> float:
        """Mean -log p per token, in nats."""
        return self.nll / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def bits_per_byte(self) -> float | None:
        """Bits per byte of text; None where tokens do not stand for exact bytes."""
        return self.nll / math.log(2) / self.bytes if self.bytes else None


@torch.no_grad()
def evaluate(
    model: Model,
    batches: Iterable[Batch],
    byte_lengths: Tensor,
    config: RunConfig,
    *,
    carried: bool = True,
) -> Tensor:
    """Run batches of the same lanes, from an empty state.

    Args:
        byte_lengths: int64 [V], bytes that each token stands for.
        carried: False: every segment starts from an empty state.

    Returns:
        float64 [3]: sums of -log p, of tokens, of bytes; to be summed over ranks.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=byte_lengths.device)
    frozen, state = model.frozen(), None
    for batch in batches:
        if state is None or not carried:
            state = frozen.empty_state(batch.tokens.shape[0])
        nll, new_state = batch_nll(frozen, batch, state, config)
        state = detach(new_state)
        mask = batch.loss_mask
        scored_bytes = byte_lengths[batch.tokens[:, 1:]][mask].sum()
        sums += torch.stack((nll[mask].double().sum(), mask.sum(), scored_bytes))
    return sums


def to_evaluation(sums: Tensor) -> Evaluation:
    """The result of `evaluate` as numbers with names.

    Raises:
        UserError: nothing was scored.
    """
    nll, tokens, size = sums.tolist()
    if not tokens:
        raise UserError("nothing was scored: the text read holds no token that has a next one")
    return Evaluation(nll, int(tokens), int(size))
