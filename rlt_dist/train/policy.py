"""Learning from rewards: a policy's objective, for `train_step` in the place of the likelihood."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rlt_dist.config.run import RunConfig
from rlt_dist.data.stream.loader import Batch
from rlt_dist.inference.forward import Objective
from rlt_dist.inference.replay import score
from rlt_dist.inference.sample import Episode
from rlt_dist.models.build import Model


def group_advantages(rewards: Tensor) -> Tensor:
    """How much better than its group each episode did, in the group's standard deviations.

    Shao et al., "DeepSeekMath" (2024), GRPO with a reward for the outcome. Where all of a group did
    alike nothing is to be learned, and advantages are 0.

    Args:
        rewards: [groups, n], of n episodes that answer the same prompt.
    """
    above = rewards - rewards.mean(dim=1, keepdim=True)
    spread = above.square().mean(dim=1, keepdim=True).sqrt()
    # Not by the spread, which the mean's rounding leaves above 0.
    alike = (rewards == rewards[:, :1]).all(dim=1, keepdim=True)
    return (above / spread.clamp(min=1e-12)).masked_fill(alike, 0.0)


def policy_objective(
    episodes: Sequence[Episode], advantages: Tensor, entropy: float = 0.0, clip: float = 0.2
) -> Objective:
    """The clipped surrogate of Schulman et al., "Proximal Policy Optimization" (2017), eq. 7 and 9.

    While the weights are those that sampled, ratios are 1 and its gradient is REINFORCE's.

    Args:
        episodes: those of `replay.to_batch`, whose batch, or rows of it, the objective is given.
        advantages: [episodes].
        entropy: reward for each nat of the distributions' entropy, which keeps a policy trying.
        clip: how far from 1 a ratio may go before it has no gradient.

    Returns:
        what raises UserError for actions outside the support of the current weights.
    """

    def objective(model: Model, output: Tensor, batch: Batch, config: RunConfig) -> Tensor:
        own = [episodes[lane] for lane in batch.lanes.tolist()]
        found = score(model, output, batch, own, config)
        gains = advantages.to(output.device)[batch.lanes].repeat_interleave(found.lengths)
        ratios = found.ratios()
        surrogate = torch.minimum(ratios * gains, ratios.clamp(1 - clip, 1 + clip) * gains)
        return -(surrogate + entropy * found.entropy).sum()

    return objective
