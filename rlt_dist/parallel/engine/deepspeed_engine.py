"""DeepSpeed's ZeRO in the place of this project's own engine.

It gets gradients of which every process of a replica has the whole sum, as engine torch does. What
it does with them is its own: it sums them over the data axis, each rank keeps the part of its flat
groups that it updates (with gradients of stage 2 the others are let go), and the parameters are
gathered. The norm is taken here, since DeepSpeed's knows nothing of parameters that stages share.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlt_dist.config.run import OptimizerConfig
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.parallel.engine.rows import Rows, own_rows
from rlt_dist.parallel.engine.torch_engine import MOMENTS, decays
from rlt_dist.parallel.local import LocalModel
from rlt_dist.util.errors import UserError


class DeepSpeedEngine:
    """AdamW under ZeRO stage 1 or 2 (Rajbhandari et al., SC 2020), in float32.

    Raises:
        UserError: DeepSpeed is not installed.
    """

    def __init__(self, local: LocalModel, config: OptimizerConfig, mesh: Mesh) -> None:
        """Begin with moments of zeros; parameters become views of DeepSpeed's flat memory."""
        self._parameters, self._mesh, self._clip = local.parameters, mesh, config.clip
        adamw = torch.optim.AdamW(
            _groups(local, config),
            lr=config.learning_rate,
            betas=config.betas,
            eps=config.eps,
        )
        self._zero = _zero_optimizer(local, adamw, config.zero_stage, mesh)
        for (flat,) in (group["params"] for group in self._zero.param_groups):
            moments: dict[str, Any] = {moment: torch.zeros_like(flat) for moment in MOMENTS}
            adamw.state[flat] = {"step": torch.tensor(0.0)} | moments
        self._adamw = adamw
        # DeepSpeed would do it after the first step; a checkpoint may be loaded before that.
        self._zero._lazy_init_hp_params_optimizer_state()

    def zero_gradients(self) -> None:
        """Forget all gradients."""
        self._zero.zero_grad(set_to_none=True)

    def reduce(self) -> Tensor:
        """Let DeepSpeed sum the gradients over the data axis; the square of what counts here."""
        self._zero.reduce_gradients()
        squares = [
            torch.linalg.vector_norm(part, dtype=torch.float64).square()
            for number, group in enumerate(self._zero.param_groups)
            for part in self._zero.averaged_gradients[number]
            if group["counted"]
        ]
        none = torch.zeros((), dtype=torch.float64, device=self._mesh.world.device)
        return torch.stack(squares).sum() if squares else none

    def step(self, learning_rate: float, norm: float) -> None:
        """Clip the gradients, whose norm is given, and let DeepSpeed update."""
        if norm > self._clip:
            for parts in self._zero.averaged_gradients.values():
                for part in parts:
                    part.mul_(self._clip / norm)
        for group in self._zero.param_groups:
            group["lr"] = learning_rate
        self._zero.step()

    def tensors(self) -> dict[str, Tensor]:
        """The same as engine torch's, so that each goes on from the other's checkpoints."""
        from deepspeed.utils import safe_get_full_optimizer_state

        rank, ranks = self._mesh.place.data, self._mesh.axes.data
        moments = {
            f"{moment}.{name}": own_rows(
                safe_get_full_optimizer_state(parameter, moment), rank, ranks
            ).clone()
            for name, parameter in self._parameters.items()
            for moment in MOMENTS
        }
        any_flat = self._zero.param_groups[0]["params"][0]
        return moments | {"updates": self._adamw.state[any_flat]["step"].clone()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over what `tensors()` gave, and the parameters as they now are."""
        from deepspeed.utils import safe_set_full_optimizer_state

        for moment in MOMENTS:
            whole = {name: torch.zeros_like(p.detach()) for name, p in self._parameters.items()}
            rows = Rows(whole, self._mesh)
            for name, own in rows.own.items():
                own.copy_(tensors[f"{moment}.{name}"])
            rows.gather()
            for name, parameter in self._parameters.items():
                safe_set_full_optimizer_state(parameter, whole[name], moment)
        for state in self._adamw.state.values():
            state["step"].copy_(tensors["updates"])
        self._zero.refresh_fp32_params()


def _groups(local: LocalModel, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Parameters by whether they decay and whether they count, which stay apart in flat memory."""
    kinds: dict[tuple[bool, bool], list[Tensor]] = {}
    for name, parameter in local.parameters.items():
        kind = decays(name, parameter), local.counted(name)
        kinds.setdefault(kind, []).append(parameter)
    return [
        {
            "params": parameters,
            "weight_decay": config.weight_decay if decaying else 0.0,
            "counted": counted,
        }
        for (decaying, counted), parameters in kinds.items()
    ]


def _zero_optimizer(local: LocalModel, adamw: torch.optim.AdamW, stage: int, mesh: Mesh) -> Any:
    try:
        import deepspeed
    except ImportError:
        raise UserError(
            "optimizer.engine deepspeed needs DeepSpeed; pip install 'rlt_dist[deepspeed]'"
        ) from None
    choices = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_allreduce_op": "sum",  # The loss is divided by the tokens of all lanes.
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "contiguous_gradients": False,
            "overlap_comm": False,
            "reduce_scatter": False,
            "compute_grad_norm": False,
        },
    }
    engine, *_ = deepspeed.initialize(
        model=local.model,
        optimizer=adamw,
        mpu=_Groups(mesh),
        dist_init_required=False,
        config=choices,
    )
    zero = engine.optimizer
    # Backward fills gradients over several micro-batches, and the other axes are summed after it.
    for hook in zero._grad_acc_hooks:
        hook.remove()
    return zero


class _Groups:
    """The mesh, as DeepSpeed asks for one: the data axis, and all else."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh

    def get_data_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.data.group

    def get_data_parallel_rank(self) -> int:
        return self._mesh.place.data

    def get_data_parallel_world_size(self) -> int:
        return self._mesh.axes.data

    def get_model_parallel_group(self) -> dist.ProcessGroup:
        return self._mesh.replica.group

    def get_model_parallel_rank(self) -> int:
        return dist.get_rank(self._mesh.replica.group)

    def get_model_parallel_world_size(self) -> int:
        return self._mesh.replica.size
