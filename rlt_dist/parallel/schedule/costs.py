"""What work costs, for planning and for simulating: any unit of time, the same for all kinds."""

from collections.abc import Callable, Mapping

from rlt_dist.parallel.schedule.instructions import Kind, Work

Cost = Callable[[int, Work], float]
"""The time that a stage takes for some work."""

_LAYERS = {
    Kind.FORWARD,
    Kind.BACKWARD,
    Kind.ENCODE,
    Kind.ENCODE_BACKWARD,
    Kind.DECODE,
    Kind.DECODE_BACKWARD,
}


def ticks(_stage: int, work: Work) -> float:
    """1 for every pass through a stage's layers and 0 for the rest, as formulas count."""
    return float(work.kind in _LAYERS)


def per_step(costs: Mapping[Kind, float]) -> Cost:
    """Costs by kind and chunk step, alike on all stages."""
    return lambda _stage, work: costs[work.kind] * work.count


TOKEN_BY_TOKEN = per_step(
    {
        Kind.EMBED: 0.01,
        Kind.ENCODE: 0.25,
        Kind.MEMORY: 0.05,
        Kind.DECODE: 1.0,
        Kind.CARRY: 0.01,
        Kind.HEAD: 0.25,
        Kind.REPLAY: 0.25,
        Kind.DECODE_BACKWARD: 1.0,
        Kind.MEMORY_GRADIENT: 0.05,
        Kind.WEIGHTS: 0.25,
        Kind.MEMORY_BACKWARD: 0.1,
        Kind.ENCODE_BACKWARD: 0.5,
        Kind.EMBED_BACKWARD: 0.01,
    }
)
"""Rough costs where only the decoder runs step by step, all else over the whole segment at once.

They decide what fills idle time, never a result; where costs are measured, those are better.
"""

WHOLE_SEGMENTS = per_step(
    {
        Kind.EMBED: 0.01,
        Kind.FORWARD: 1.0,
        Kind.ENCODE: 1.0,
        Kind.MEMORY: 0.2,
        Kind.DECODE: 1.5,
        Kind.HEAD: 1.0,
        Kind.BACKWARD: 2.0,
        Kind.REPLAY: 1.5,
        Kind.DECODE_BACKWARD: 1.5,
        Kind.MEMORY_GRADIENT: 0.2,
        Kind.WEIGHTS: 1.5,
        Kind.MEMORY_BACKWARD: 0.4,
        Kind.ENCODE_BACKWARD: 2.0,
        Kind.EMBED_BACKWARD: 0.01,
    }
)
"""Rough costs where every pass is over a whole segment: Transformer-XL, RLT-0."""
