"""Where every parameter belongs: how it is cut, who else has it, who gives it what gradient."""

from copy import copy
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import nn

from rlt_dist.config.model import GruConfig, ModelConfig, RltConfig, TransformerXLConfig
from rlt_dist.config.run import cut_trouble
from rlt_dist.models.build import Model, build_model
from rlt_dist.models.transformer_xl.adaptive import Clusters
from rlt_dist.parallel.plan.cut import Cut
from rlt_dist.parallel.plan.placement import Placement, place
from rlt_dist.parallel.plan.rlt import RltPlan
from rlt_dist.parallel.plan.transformer_xl import TransformerXLPlan
from rlt_dist.parallel.plan.whole import WholePlan
from rlt_dist.util.errors import UserError

M = TypeVar("M", bound=nn.Module)


class Plan(Protocol):
    """What a model's plan says."""

    def cut(self, name: str) -> Cut | None:
        """How a parameter is cut over the tensor axis; None: every process has the whole."""

    def partial(self, name: str) -> bool:
        """Whether an uncut parameter's gradient on one process is but a part of it."""

    def state_cut(self, name: str) -> Cut | None:
        """How a tensor of the state is cut over the tensor axis."""

    def keep(self, model: Any, placement: Placement) -> None:
        """Take away the pieces that are not on a stage."""


@dataclass(frozen=True)
class Layout:
    """Of one parameter.

    Attributes:
        whole: shape of the whole.
        cut: over the tensor axis; None: every process there has the whole.
        partial: it is whole, but what one process of the tensor axis finds of its gradient is not.
        stages: the pipeline stages that hold it, first to last.
    """

    whole: torch.Size
    cut: Cut | None
    partial: bool
    stages: tuple[int, ...]


def plan_for(config: ModelConfig, vocabulary: int) -> Plan:
    """The plan of a model."""
    if isinstance(config, RltConfig):
        return RltPlan(config, vocabulary)
    if isinstance(config, GruConfig):
        return WholePlan()
    return TransformerXLPlan(config, vocabulary)


def check_vocabulary(config: ModelConfig, vocabulary: int, tensor: int) -> None:
    """Check that a model can have a vocabulary, cut over so many processes.

    Raises:
        UserError: some process would get none of it, or cutoffs do not lie below it.
    """
    trouble = cut_trouble("the vocabulary of", vocabulary, tensor)
    if trouble is not None:
        raise UserError(trouble)
    if isinstance(config, TransformerXLConfig):
        Clusters(config.cutoffs, vocabulary)


def blueprint(config: ModelConfig, vocabulary: int, placement: Placement, *choices: Any) -> Model:
    """A stage's model without numbers: whole weights on the meta device.

    Args:
        choices: the other arguments of `build_model`.
    """
    with torch.device("meta"):
        model = build_model(config, vocabulary, *choices)
    plan_for(config, vocabulary).keep(model, placement)
    return model


def layouts(config: ModelConfig, vocabulary: int, stages: int) -> dict[str, Layout]:
    """Of all parameters of all stages, by name."""
    plan = plan_for(config, vocabulary)
    shapes: dict[str, torch.Size] = {}
    holders: dict[str, list[int]] = {}
    with torch.device("meta"):
        whole = build_model(config, vocabulary)
    for placement in place(config, stages):
        # A deep model is soon copied, but takes seconds to build.
        model = _twin(whole)
        plan.keep(model, placement)
        for name, parameter in model.named_parameters():
            shapes[name] = parameter.shape
            holders.setdefault(name, []).append(placement.stage)
    return {
        name: Layout(shape, plan.cut(name), plan.partial(name), tuple(holders[name]))
        for name, shape in shapes.items()
    }


def _twin(module: M) -> M:
    """The same parameters in modules of its own."""
    twin = copy(module)
    twin._modules = {
        name: None if part is None else _twin(part) for name, part in module._modules.items()
    }
    return twin


def parameter_shapes(config: ModelConfig, vocabulary: int) -> dict[str, torch.Size]:
    """Whole shape of every parameter of a model by its name, in the model's order."""
    return {name: layout.whole for name, layout in layouts(config, vocabulary, stages=1).items()}


def shared_stages(config: ModelConfig, stages: int) -> list[tuple[int, ...]]:
    """The sets of stages that share a parameter, each once, in one order for all processes."""
    # Which they are does not depend on the vocabulary, which may not be known yet.
    cutoffs = config.cutoffs if isinstance(config, TransformerXLConfig) else ()
    every = layouts(config, max(cutoffs, default=0) + 1, stages).values()
    return sorted({layout.stages for layout in every if len(layout.stages) > 1})
