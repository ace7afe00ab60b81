"""From logits to a token: the distribution that is really drawn from, and a draw from it."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

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

    Temperature comes first, then top-k, then top-p on what is left. Tokens outside the support have
    -inf. Gradients run to the logits of those inside; which those are has none.
    """
    scaled = _scaled(logits, sampling.temperature)
    outside = _outside(scaled.detach(), sampling)
    return (scaled if outside is None else scaled.masked_fill(outside, -torch.inf)).log_softmax(-1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    """Logits by temperature, the greatest of them 0: so none overflows however cold it is."""
    if temperature == 0:
        return logits
    greatest = logits.detach().amax(dim=-1, keepdim=True)
    return (logits - greatest) / max(temperature, torch.finfo(logits.dtype).tiny)


def _outside(scaled: Tensor, sampling: Sampling) -> Tensor | None:
    """bool [..., V], True for what cannot be drawn; None: everything can."""
    outside = None
    kept = 1 if sampling.temperature == 0 else sampling.top_k
    if kept is not None:
        best = scaled.topk(min(kept, scaled.shape[-1]), dim=-1).indices
        outside = torch.ones_like(scaled, dtype=torch.bool).scatter_(-1, best, False)
        scaled = scaled.masked_fill(outside, -torch.inf)
    if sampling.top_p < 1:
        # In float64: the border must not lie elsewhere for the way a sum is rounded.
        ordered, order = scaled.double().softmax(dim=-1).sort(dim=-1, descending=True, stable=True)
        # A token stays while the more likely ones have not reached p: the first always stays.
        dropped = ordered.cumsum(dim=-1) - ordered >= sampling.top_p
        dropped = torch.empty_like(dropped).scatter_(-1, order, dropped)
        outside = dropped if outside is None else outside | dropped
    return outside


def draw(logits: Tensor, sampling: Sampling, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Draw a token in each row.

    Args:
        logits: [b, V].
        uniform: float64 [b], each in [0, 1): what decides.

    Returns:
        int64 [b], and their log-probabilities [b] in the type of the logits.

    Raises:
        UserError: the logits are not finite.
    """
    if logits.isnan().any() or not logits.amax(dim=-1).isfinite().all():
        raise UserError("the model's output is not finite; it diverged")
    log_probabilities = log_distribution(logits, sampling)
    reached = log_probabilities.double().exp().cumsum(dim=-1)
    # The last is exactly 1, above whatever was drawn; a token that adds nothing is never the first.
    reached = reached / reached[:, -1:]
    token = torch.searchsorted(reached, uniform[:, None], right=True)
    return token[:, 0], log_probabilities.gather(-1, token)[:, 0]
