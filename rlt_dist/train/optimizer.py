"""AdamW whose state is known by the global names of the parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rlt_dist.config.run import OptimizerConfig

_MOMENTS = ("exp_avg", "exp_avg_sq")


class NamedAdamW:
    """AdamW (Loshchilov, Hutter, ICLR 2019) over a model's named parameters.

    Weights decay; norms, biases (Transformer-XL's u and v too) and the initial state do not.
    """

    def __init__(self, parameters: Mapping[str, Tensor], config: OptimizerConfig) -> None:
        self.parameters = dict(parameters)
        self.clip = config.clip
        groups: list[dict[str, Any]] = [
            {"params": [p for n, p in self.parameters.items() if _decays(n, p)]},
            {
                "params": [p for n, p in self.parameters.items() if not _decays(n, p)],
                "weight_decay": 0.0,
            },
        ]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        for parameter in self.parameters.values():
            self._adamw.state[parameter] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }

    def gradient_square(self, counted: Callable[[str], bool]) -> Tensor:
        """Sum of squares over the gradients of the parameters that count, a float64 scalar."""
        squares = [
            torch.linalg.vector_norm(parameter.grad, dtype=torch.float64).square()
            for name, parameter in self.parameters.items()
            if parameter.grad is not None and counted(name)
        ]
        return torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64)

    def step(self, learning_rate: float, norm: float) -> None:
        """Clip the gradients, whose norm is given, and update."""
        scale = self.clip / norm if norm > self.clip else 1.0
        for parameter in self.parameters.values():
            if scale != 1.0 and parameter.grad is not None:
                parameter.grad.mul_(scale)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """What the optimizer remembers: `exp_avg.NAME`, `exp_avg_sq.NAME`, and `updates`."""
        moments = {
            f"{moment}.{name}": self._adamw.state[parameter][moment]
            for name, parameter in self.parameters.items()
            for moment in _MOMENTS
        }
        any_parameter = next(iter(self.parameters.values()))
        return moments | {"updates": self._adamw.state[any_parameter]["step"].clone()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors()` gave."""
        for name, parameter in self.parameters.items():
            own = self._adamw.state[parameter]
            own["step"].copy_(tensors["updates"])
            for moment in _MOMENTS:
                own[moment].copy_(tensors[f"{moment}.{name}"])


def _decays(name: str, parameter: Tensor) -> bool:
    return parameter.dim() > 1 and not name.endswith("bias")
