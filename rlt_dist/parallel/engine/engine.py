"""What a training step and a checkpoint ask of an engine, and the one that a run asks for."""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from rlt_dist.config.run import OptimizerConfig
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.parallel.engine.deepspeed_engine import DeepSpeedEngine
from rlt_dist.parallel.engine.torch_engine import TorchEngine
from rlt_dist.parallel.local import LocalModel


class Engine(Protocol):
    """AdamW over a process's parameters, its state cut over the data axis by rows (`engine.rows`).

    A step is `zero_gradients`, backward, `complete_gradients`, `reduce`, and `step` unless it is
    skipped.
    """

    def zero_gradients(self) -> None:
        """Forget all gradients."""

    def reduce(self) -> Tensor:
        """Sum the gradients over the data axis.

        Returns:
            this process's share of the squared norm of the whole gradient, a float64 scalar; over
            all processes of the mesh each number counts once.
        """

    def step(self, learning_rate: float, norm: float) -> None:
        """Clip the gradients, whose norm over the mesh is given, and update the parameters.

        Afterwards they are the same bits on all processes of the data axis.
        """

    def tensors(self) -> dict[str, Tensor]:
        """What is remembered: `updates`, done so far, and `exp_avg.NAME`, `exp_avg_sq.NAME`.

        Moments are this process's rows of those of the parameter that is here.
        """

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors()` gave; the parameters are taken as they are by then."""


def make_engine(local: LocalModel, config: OptimizerConfig, mesh: Mesh) -> Engine:
    """The engine of a run that has done no step.

    Raises:
        UserError: it is not installed.
    """
    if config.engine == "torch":
        return TorchEngine(local, config, mesh)
    return DeepSpeedEngine(local, config, mesh)
