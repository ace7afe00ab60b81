"""Operators that each kind of work starts, and numbers that they read and write, as dispatched."""

from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from rlt_dist.config.run import RunConfig
from rlt_dist.costs.demand import demand_of
from rlt_dist.costs.run import run_of
from rlt_dist.mesh.axes import Axes
from rlt_dist.mesh.world import open_world
from rlt_dist.parallel.execute.stage import BaseStage
from rlt_dist.parallel.mesh import mesh_of
from rlt_dist.parallel.schedule.instructions import Kind, Work
from rlt_dist.train.rehearsal import Rehearsal

VOCABULARY, ENDLESS = 61, 1 << 60
PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_"}
FREE = {
    *("empty", "empty_strided", "empty_like", "new_empty", "detach", "_unsafe_view"),
    *("_local_scalar_dense", "lift_fresh"),
}
RLT = {
    **{"kind": "rlt", "d_model": 24, "heads": 4, "kv_heads": 2, "ffn": 72},
    **{"encoder_layers": 5, "decoder_layers": 5, "window": 4, "memory_len": 16},
}
XL = {"kind": "transformer_xl", "d_model": 24, "heads": 4, "d_inner": 72, "layers": 5}
XL |= {"memory_len": 16}
SMALL = (Kind.EMBED, Kind.EMBED_BACKWARD, Kind.CARRY, Kind.MEMORY)
"""What is a hundredth of a step."""


class Dispatched(TorchDispatchMode):
    """Counts operators, and numbers of those that are no products."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.numbers = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
        given = kwargs or {}
        result = operator(*args, **given)
        name = operator._overloadpacket.__name__
        if operator.is_view or name in FREE:
            return result
        self.operations += 1
        if name not in PRODUCTS and "scaled_dot_product" not in name:
            leaves = tree_flatten((args, given, result))[0]
            self.numbers += sum(x.numel() for x in leaves if isinstance(x, Tensor))
        return result


@pytest.mark.parametrize("model", [RLT, RLT | {"feedback": 4}, XL], ids=["rlt1", "rlt2", "xl"])
def test_what_works_take_besides_products_is_what_torch_is_told(
    model: dict[str, Any], tmp_path: Path
) -> None:
    content = {
        "run_folder": str(tmp_path),
        "model": model,
        "data": {"path": "none", "lanes": 4, "segment": 16},
        "optimizer": {"learning_rate": 1e-3},
        "train": {"steps": 1},
        "recompute": {"decoder_chunk": 8, "layers": True},
        "ops": {"recurrence": "python"},
    }
    config = RunConfig.model_validate(content)
    found: Counter[tuple[Kind, str]] = Counter()
    do = BaseStage.do

    def watched(stage: Any, work: Work) -> None:
        with Dispatched() as mode:
            do(stage, work)
        found[work.kind, "operations"] += mode.operations
        found[work.kind, "numbers"] += mode.numbers

    with open_world({"OMP_NUM_THREADS": "1"}) as world, mesh_of(config, world) as mesh:
        rehearsal = Rehearsal(config, VOCABULARY, mesh, document=ENDLESS)
        for _ in range(2):
            rehearsal.pass_through()
        with mock.patch.object(BaseStage, "do", watched):
            rehearsal.pass_through()
    run = run_of(config, VOCABULARY, Axes(1, 1, 1))
    rank = run.rank(0)
    predicted: Counter[tuple[Kind, str]] = Counter()
    for work, count in rank.alike():
        demand = demand_of(rank, work)
        predicted[work.kind, "operations"] += count * demand.operations
        predicted[work.kind, "numbers"] += count * demand.numbers
    for key, count in found.items():
        near = 0.9 if key[0] in SMALL else 0.2 if key[1] == "numbers" else 0.1
        assert predicted[key] == pytest.approx(count, rel=near), key
