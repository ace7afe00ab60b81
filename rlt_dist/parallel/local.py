"""The model of one process: the pieces of its stage, each weight cut to its tensor rank."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from rlt_dist.config.model import ModelConfig
from rlt_dist.mesh.axes import Axes, Place
from rlt_dist.models.build import Model
from rlt_dist.models.initial import initial_values
from rlt_dist.ops.recurrence.dispatch import DEFAULT, Recurrence
from rlt_dist.ops.seam import Seam
from rlt_dist.parallel.plan.layout import Layout, Plan, blueprint, layouts, plan_for
from rlt_dist.parallel.plan.placement import Placement, place


@dataclass(frozen=True)
class LocalModel:
    """What one process has of a model.

    Attributes:
        model: its pieces, called as those of a whole one.
        placement: which pieces.
        tensor, tensors: its rank on the tensor axis, of how many.
        layouts: of every parameter here, by name.
    """

    model: Model
    plan: Plan
    placement: Placement
    tensor: int
    tensors: int
    layouts: dict[str, Layout]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """By global name."""
        return dict(self.model.named_parameters())

    def counted(self, name: str) -> bool:
        """Whether a parameter counts here, where each number counts once over a replica."""
        layout = self.layouts[name]
        first = layout.stages[0] == self.placement.stage
        copies = self.tensors if layout.cut is None else layout.cut.copies(self.tensors)
        return first and self.tensor % copies == 0


def build_local(
    config: ModelConfig,
    vocabulary: int,
    seed: int,
    axes: Axes,
    where: Place,
    seam: Seam,
    dtype: torch.dtype = torch.float32,
    recurrence: Recurrence = DEFAULT,
    recompute_layers: bool = False,
) -> LocalModel:
    """Build a process's part of the model that `seed` names; no mesh changes a value of it.

    Args:
        where: the process's coordinates.
        seam: joins what the tensor axis cuts.
    """
    plan, placement = plan_for(config, vocabulary), place(config, axes.pipeline)[where.stage]
    model = blueprint(config, vocabulary, placement, dtype, recurrence, recompute_layers)
    for name, parameter in list(model.named_parameters()):
        spread = model.initial_distribution(name, parameter)
        values = initial_values(name, parameter.shape, seed, spread)
        cut = plan.cut(name)
        if cut is not None:
            values = cut.part(values, where.tensor, axes.tensor)
        _fill(model, name, values.to(dtype, copy=True).contiguous())
    _join(model, seam)
    every = layouts(config, vocabulary, axes.pipeline)
    here = {name: every[name] for name, _ in model.named_parameters()}
    return LocalModel(model, plan, placement, where.tensor, axes.tensor, here)


def _join(model: Any, seam: Seam) -> None:
    """Tell every piece that may be cut where it is joined."""
    for module in model.modules():
        if hasattr(module, "seam"):
            module.seam = seam


def _fill(model: nn.Module, name: str, values: Tensor) -> None:
    """Put a tensor in the place of a parameter."""
    module, _, own = name.rpartition(".")
    setattr(model.get_submodule(module), own, nn.Parameter(values))
