"""The plan of a model that no axis cuts."""

from torch import nn

from rlt_dist.parallel.plan.cut import Cut
from rlt_dist.parallel.plan.placement import Placement


class WholePlan:
    """What `parallel.plan.layout` asks of a model's plan: every process has all of it."""

    def cut(self, _name: str) -> Cut | None:
        """None: every process has the whole of a parameter."""
        return None

    def partial(self, _name: str) -> bool:
        """Every process finds the whole of a gradient."""
        return False

    def state_cut(self, _name: str) -> Cut | None:
        """Nor is the state cut."""
        return None

    def keep(self, model: nn.Module, placement: Placement) -> None:
        """The only stage has all pieces."""
