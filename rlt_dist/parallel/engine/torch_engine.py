"""The engine of this project: torch's AdamW on rows of the parameters."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rlt_dist.config.run import OptimizerConfig
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.parallel.engine.rows import Rows
from rlt_dist.parallel.local import LocalModel

MOMENTS = ("exp_avg", "exp_avg_sq")


class TorchEngine:
    """AdamW (Loshchilov, Hutter, ICLR 2019), the moments cut by rows (ZeRO-1, Rajbhandari, 2020).

    Weights decay; norms, biases (Transformer-XL's u and v too) and the initial state do not.
    """

    def __init__(self, local: LocalModel, config: OptimizerConfig, mesh: Mesh) -> None:
        """Begin with moments of zeros."""
        self._rows = Rows(local.parameters, mesh)
        self._counted = {name for name in local.parameters if local.counted(name)}
        self._clip, self._device = config.clip, mesh.world.device
        decaying: dict[bool, list[Tensor]] = {True: [], False: []}
        for name, parameter in local.parameters.items():
            decaying[decays(name, parameter)].append(self._rows.own[name])
        groups: list[dict[str, Any]] = [
            {"params": decaying[True]},
            {"params": decaying[False], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            groups,
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
        )
        for rows in self._rows.own.values():
            moments: dict[str, Any] = {moment: torch.zeros_like(rows) for moment in MOMENTS}
            self._adamw.state[rows] = {"step": torch.tensor(0.0)} | moments

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        self._adamw.zero_grad(set_to_none=True)

    def reduce(self) -> Tensor:
        """Sum the gradients over the data axis; the square of what counts here."""
        self._rows.reduce()
        squares = [
            torch.linalg.vector_norm(rows.grad, dtype=torch.float64).square()
            for name, rows in self._rows.own.items()
            if rows.grad is not None and name in self._counted
        ]
        none = torch.zeros((), dtype=torch.float64, device=self._device)
        return torch.stack(squares).sum() if squares else none

    def step(self, learning_rate: float, norm: float) -> None:
        """Clip the gradients, whose norm is given, and update."""
        scale = self._clip / norm if norm > self._clip else 1.0
        for rows in self._rows.own.values():
            if scale != 1.0 and rows.grad is not None:
                rows.grad.mul_(scale)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        self._rows.gather()

    def tensors(self) -> dict[str, Tensor]:
        """Moments of the rows that are here, and `updates`."""
        moments = {
            f"{moment}.{name}": self._adamw.state[rows][moment]
            for name, rows in self._rows.own.items()
            for moment in MOMENTS
        }
        any_rows = next(iter(self._rows.own.values()))
        return moments | {"updates": self._adamw.state[any_rows]["step"].clone()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors()` gave."""
        for name, rows in self._rows.own.items():
            own = self._adamw.state[rows]
            own["step"].copy_(tensors["updates"])
            for moment in MOMENTS:
                own[moment].copy_(tensors[f"{moment}.{name}"])


def decays(name: str, parameter: Tensor) -> bool:
    """Whether weight decay applies to a parameter."""
    return parameter.dim() > 1 and not name.endswith("bias")
