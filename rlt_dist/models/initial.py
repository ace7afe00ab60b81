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
    """Fill every parameter; `distribution` gives mean and deviation from its name and shape."""
    for name, parameter in model.named_parameters():
        with torch.no_grad():
            spread = distribution(name, parameter)
            parameter.copy_(initial_values(name, parameter.shape, seed, spread))


def initial_values(name: str, shape: torch.Size, seed: int, distribution: Distribution) -> Tensor:
    """A whole tensor's values, in float64 on the CPU: no device, precision or mesh changes them."""
    mean, deviation = distribution
    values = torch.full(shape, mean, dtype=torch.float64)
    if deviation:
        generator = torch.Generator().manual_seed(seed_from(seed, name))
        values += deviation * torch.randn(shape, generator=generator, dtype=torch.float64)
    return values
