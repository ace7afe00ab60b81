"""The learning rate as a pure function of the step: nothing to save, nothing to restore."""

import math

from rlt_dist.config.run import RunConfig


def learning_rate(config: RunConfig, step: int) -> float:
    """Linear warm-up, then a cosine to `schedule.minimum` at the last step.

    Args:
        step: number of the optimizer step, from 1 to train.steps.
    """
    peak, minimum = config.optimizer.learning_rate, config.schedule.minimum
    warmup, steps = config.schedule.warmup, config.train.steps
    if step <= warmup:
        return peak * step / warmup
    done = (step - warmup) / max(1, steps - warmup)
    return minimum + (peak - minimum) * 0.5 * (1.0 + math.cos(math.pi * min(1.0, done)))
