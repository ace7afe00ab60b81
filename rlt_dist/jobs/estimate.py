"""What a run needs of memory and disk, from its configuration alone.

Counted is what is there between steps, and what is sent when gradients are summed. Activations come
on top: of RLT's decoder as much as recompute.budget_gib lets it keep, of all else as much as a
micro-batch makes.
"""

import math
from dataclasses import dataclass

from rlt_dist.config.run import RunConfig
from rlt_dist.mesh.axes import Axes
from rlt_dist.parallel.plan.counts import count_parameters
from rlt_dist.parallel.plan.layout import blueprint, plan_for
from rlt_dist.parallel.plan.placement import Placement, place

_UNITS = (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


@dataclass(frozen=True)
class Needs:
    """Bytes.

    Attributes:
        weights, gradients, optimizer, state: of the rank that holds most.
        checkpoint: a whole one on disk.
    """

    weights: int
    gradients: int
    optimizer: int
    state: int
    checkpoint: int

    @property
    def rank(self) -> int:
        """Of the rank that holds most, without activations."""
        return self.weights + self.gradients + self.optimizer + self.state

    def __str__(self) -> str:
        parts = ("weights", "gradients", "optimizer", "state")
        shown = ", ".join(f"{part} {size(getattr(self, part))}" for part in parts)
        return f"{size(self.rank)} a rank before activations ({shown})"


def estimate(config: RunConfig, vocabulary: int, axes: Axes) -> Needs:
    """What a run needs on a mesh.

    The two moments of AdamW are cut over the data axis (ZeRO-1). Where that is longer than one,
    gradients are there twice while they are summed: as sent and as received. Every lane's memory is
    taken to be full.

    Raises:
        UserError: the model cannot be cut like that.
    """
    number = 8 if config.train.precision == "float64" else 4
    counts = count_parameters(config.model, vocabulary, axes)
    held = max(share.parameters for share in counts.shares)
    lanes = config.data.lanes // axes.data
    states = [
        _state(config, vocabulary, placement, axes.tensor)
        for placement in place(config.model, axes.pipeline)
    ]
    (whole,) = (_state(config, vocabulary, placement, 1) for placement in place(config.model, 1))
    return Needs(
        weights=number * held,
        gradients=number * held * (2 if axes.data > 1 else 1),
        optimizer=2 * number * math.ceil(held / axes.data),
        state=number * lanes * max(states),
        checkpoint=number * (3 * counts.parameters + config.data.lanes * whole),
    )


def _state(config: RunConfig, vocabulary: int, placement: Placement, tensors: int) -> int:
    """Numbers that a lane carries on one process of a stage, once its memory is full."""
    model = config.bounded_model
    plan = plan_for(model, vocabulary)
    total = 0
    for name, tensor in blueprint(model, vocabulary, placement).empty_state(1).items():
        shape = list(tensor.shape[1:])
        if shape and shape[0] == 0:  # entries, none of them there yet
            window = name.startswith("decoder.")
            shape[0] = getattr(model, "window", 1) - 1 if window else model.memory_len or 0
        cut = plan.state_cut(name)
        total += math.prod(shape) // (tensors if cut is not None else 1)
    return total


def size(number: float) -> str:
    """Bytes as a person reads them."""
    unit, one = next((unit for unit in _UNITS if number >= unit[1]), _UNITS[-1])
    return f"{number / one:.1f} {unit}"
