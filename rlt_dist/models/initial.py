"""Initial values: each tensor drawn whole from (seed, its global name)."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from rlt_dist.ops.noise import seed_from

Distribution = tuple[float, float]
"""Mean and standard deviation of a normal distribution."""


def initialise(
    model: nn.Module, seed: int, distribution: Callable[[str, Tensor], Distribution]
) -> None:
    """Fill every parameter; `distribution` gives mean and deviation from its name and shape.

    Values are drawn on the CPU in float64 and rounded, so device, precision and mesh do not
    change them.
    """
    for name, parameter in model.named_parameters():
        mean, deviation = distribution(name, parameter)
        values = torch.full(parameter.shape, mean, dtype=torch.float64)
        if deviation:
            generator = torch.Generator().manual_seed(seed_from(seed, name))
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            values += deviation * noise
        with torch.no_grad():
            parameter.copy_(values)
