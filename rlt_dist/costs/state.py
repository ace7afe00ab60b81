"""The carried state: what lanes keep between segments."""

from math import prod

from rlt_dist.config.model import GruConfig, RltConfig
from rlt_dist.costs.looped import looped_share
from rlt_dist.costs.run import Run
from rlt_dist.parallel.plan.placement import place

_COUNTERS = 2
"""`position` and `tokens`, int64."""


def state_shapes(run: Run, stage: int, tensor: int, seen: int) -> dict[str, tuple[int, ...]]:
    """By name, what a lane's tensors of the state hold on a rank, counters aside.

    Args:
        seen: tokens of its document that the lane has read.
    """
    model = run.config.bounded_model
    where = place(model, run.axes.pipeline)[stage]
    if isinstance(model, GruConfig):
        return {f"gru.{i}.h": (model.d_model,) for i in where.layers}
    if not isinstance(model, RltConfig):
        length = min(seen, model.memory_len)
        return {f"memory.{n}": (length, model.d_model) for n in where.layers}
    share = looped_share(model, run.vocabulary, where, tensor, run.axes.tensor)
    past = seen if model.memory_len is None else min(seen, model.memory_len)
    window = min(model.window - 1, seen)
    lengths = {f"encoder.{i}": past for i in where.encoder}
    lengths |= {f"memory.{g}": past for g in {model.memory_group(j) for j in where.decoder}}
    lengths |= {f"decoder.{j}": window for j in where.decoder}
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.{part}": (length, share.kv_heads, model.head_width)
        for name, length in lengths.items()
        for part in "kv"
    }
    if where.first and model.feedback:
        shapes["s"] = (model.d_model,)
        if model.feedback > 1:
            shapes["boundary"] = (model.d_model,)
    return shapes


def state_bytes(run: Run, stage: int, tensor: int, lanes: int, seen: int) -> int:
    """Of so many lanes on a rank."""
    numbers = sum(map(prod, state_shapes(run, stage, tensor, seen).values()))
    return lanes * (numbers * run.numbers.real + _COUNTERS * 8)
