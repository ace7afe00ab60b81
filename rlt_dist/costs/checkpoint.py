"""The size of a checkpoint."""

from dataclasses import replace

from rlt_dist.costs.run import Run
from rlt_dist.costs.state import state_bytes
from rlt_dist.mesh.axes import Axes

_MOMENTS = 2
_UPDATES = 4
"""Bytes of the optimizer's count of its updates, float32."""
_CURSOR = 4 * 8
"""Bytes of a lane's place in a corpus (`data.stream.lanes.Cursor`)."""


def checkpoint_bytes(run: Run, seen: int | None = None) -> int:
    """Bytes of all tensors, each counted once: what a manifest says as `tensor_bytes`.

    Args:
        seen: tokens of its document that every lane has read, and of all documents since the run
            began; None: so many that the state is full.
    """
    alone = replace(run, axes=Axes(1, 1, 1))
    read = run.own.seen if seen is None else seen
    lanes = run.config.data.lanes
    cursors = lanes * len(run.config.data.corpora) * _CURSOR
    weights = (1 + _MOMENTS) * run.parameters * run.numbers.real
    return weights + _UPDATES + state_bytes(alone, 0, 0, lanes, read) + cursors
