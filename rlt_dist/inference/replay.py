"""Replay: what was drawn, scored anew by a model that may have changed since, with gradients.

The whole history runs through the model again, prompts too: encoder memory, recurrent state and
window caches are those of the current weights. Each action is scored by what was read before it,
under the temperature, top-k and top-p that it was drawn under.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rlt_dist.config.run import RunConfig
from rlt_dist.data.stream.loader import Batch, cursors_at_start
from rlt_dist.inference.forward import autocast, batch_output
from rlt_dist.inference.sample import Episode, check_reach
from rlt_dist.inference.sampling import log_distribution
from rlt_dist.models.build import Model
from rlt_dist.util.errors import UserError

_NEVER = -1e4
"""Stands for the log of 0 where it is multiplied by 0."""


@dataclass(frozen=True, eq=False)
class Replayed:
    """The actions of episodes, one episode's after the other's.

    Attributes:
        log_probabilities: [n], under the current weights, with gradients; -inf for an action
            outside the support, which top-k or top-p would no longer let be drawn.
        entropy: [n], of the distribution at each action, in nats, with gradients.
        recorded: float64 [n], when they were drawn.
        lengths: int64 [episodes], how many actions each has.
    """

    log_probabilities: Tensor
    entropy: Tensor
    recorded: Tensor
    lengths: Tensor

    @property
    def unsupported(self) -> int:
        """How many actions are outside the support of the current distribution."""
        return int(self.log_probabilities.isneginf().sum())

    def ratios(self) -> Tensor:
        """Importance ratios [n]: the probability of each action now over that when it was drawn.

        Raises:
            UserError: an action has none: it is outside the support.
        """
        if self.unsupported:
            raise UserError(
                f"{self.unsupported:,} of {len(self.recorded):,} actions are outside the support "
                "of the current weights' top-k or top-p, and have no importance ratio; leave "
                "their episodes out, or sample without top-k and top-p"
            )
        return (self.log_probabilities - self.recorded).exp()


def replay(model: Model, config: RunConfig, episodes: Sequence[Episode]) -> Replayed:
    """Run episodes through a model, without dropout, and score their actions.

    The full gradient runs through the whole history.

    Raises:
        UserError: see `to_batch`.
    """
    state = model.empty_state(len(episodes))
    batch = to_batch(model, episodes).to(state["position"].device)
    output, _ = batch_output(model, batch, state, config, None)
    return score(model, output, batch, episodes, config)


def to_batch(model: Model, episodes: Sequence[Episode]) -> Batch:
    """Episodes as lanes of one segment, to be run from an empty state; the actions are scored.

    Lane i is episode i. A row goes on behind its last action with tokens that nothing depends on.

    Raises:
        UserError: there is no episode; or what a token sees depends on where segments are cut, so
            what was read token by token would be scored by another history.
    """
    if not episodes:
        raise UserError("there is no episode; give at least one")
    tokens = pad_sequence([episode.tokens for episode in episodes], batch_first=True)
    prompts = torch.tensor([[len(episode.prompt)] for episode in episodes])
    ends = prompts + torch.tensor([[len(episode.actions)] for episode in episodes])
    place = torch.arange(1, tokens.shape[1])
    check_reach(model.config, int(ends.max()) - 1)
    return Batch(
        tokens=tokens,
        targets=tokens[:, 1:],
        document_start=torch.zeros(tokens[:, 1:].shape, dtype=torch.bool),
        loss_mask=(prompts <= place) & (place < ends),
        lanes=torch.arange(len(episodes)),
        cursors=cursors_at_start(len(episodes), 0),
    )


def score(
    model: Model, output: Tensor, batch: Batch, episodes: Sequence[Episode], config: RunConfig
) -> Replayed:
    """Score the actions of `to_batch`, or of some of its rows.

    Args:
        output: the model's, [b, T, d].
        episodes: those of the rows, in their order.
    """
    scored, actions = output[batch.loss_mask], batch.targets[batch.loss_mask, None]
    with autocast(config, output.device):
        logits = model.logits(scored)
    lengths = batch.loss_mask.sum(dim=1)
    found, entropy = torch.zeros_like(logits[:, 0]), torch.zeros_like(logits[:, 0])
    for sampling in dict.fromkeys(episode.sampling for episode in episodes):
        own = torch.tensor([episode.sampling == sampling for episode in episodes])
        rows = own.to(lengths.device).repeat_interleave(lengths)
        scores = log_distribution(logits[rows], sampling)
        found[rows] = scores.gather(-1, actions[rows])[:, 0]
        entropy[rows] = -(scores.exp() * scores.clamp(min=_NEVER)).sum(dim=-1)
    recorded = torch.cat([episode.log_probabilities for episode in episodes])
    return Replayed(found, entropy, recorded.to(output.device), lengths)
