"""All that a configuration costs on a mesh, in one place."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlt_dist.costs.checkpoint import checkpoint_bytes
from rlt_dist.costs.cluster import ClusterConfig
from rlt_dist.costs.effort import Purpose
from rlt_dist.costs.fit import fullest_rank, remedies
from rlt_dist.costs.flops import executed_flops, model_flops
from rlt_dist.costs.memory import RankMemory
from rlt_dist.costs.run import Run
from rlt_dist.costs.traffic import step_traffic
from rlt_dist.mesh.axes import Place

Sent = Mapping[tuple[str, str], tuple[int, int, int]]
"""By axis and kind, of one step: calls, bytes handed over, bytes that leave the rank."""


@dataclass(frozen=True)
class Estimate:
    """What a run costs.

    Attributes:
        parameters: of the whole model.
        model_flops, executed_flops: of a token, by what products are formed for.
        stage, memory: the rank that needs most memory.
        traffic: of the rank that sends most along each axis.
        checkpoint: bytes of all tensors.
    """

    run: Run
    cluster: ClusterConfig | None
    parameters: int
    model_flops: Mapping[Purpose, float]
    executed_flops: Mapping[Purpose, float]
    stage: int
    memory: RankMemory
    traffic: Sent
    checkpoint: int

    @property
    def lanes(self) -> int:
        """Of the whole run."""
        return self.run.config.data.lanes

    def record(self) -> dict[str, Any]:
        """The same in plain values."""
        run = self.run
        return {
            "vocabulary": run.vocabulary,
            "mesh": str(run.axes),
            "micro_batches": run.micro_batches,
            "parameters": self.parameters,
            "model_flops_per_token": dict(self.model_flops),
            "executed_flops_per_token": dict(self.executed_flops),
            "memory": {
                "stage": self.stage,
                "moment": self.memory.fullest,
                "parts": dict(self.memory.parts),
                "peak": self.memory.peak,
                "usable": None if self.cluster is None else self.cluster.usable,
            },
            "traffic": [
                {"axis": axis, "kind": kind, "calls": calls, "bytes": handed, "wire": wire}
                for (axis, kind), (calls, handed, wire) in self.traffic.items()
            ],
            "checkpoint_bytes": self.checkpoint,
        }


def estimate_run(run: Run, cluster: ClusterConfig | None) -> Estimate:
    """Work out what a run costs."""
    config, tokens = run.config, run.config.data.tokens_per_step
    pieces = model_flops(config.bounded_model, run.vocabulary, run.own).values()
    useful: dict[Purpose, float] = {
        purpose: sum(piece.get(purpose, 0) for piece in pieces) / run.own.rows
        for purpose in Purpose
        if purpose != Purpose.AGAIN
    }
    executed = executed_flops(run)
    stage, memory = fullest_rank(run)
    return Estimate(
        run=run,
        cluster=cluster,
        parameters=run.parameters,
        model_flops=useful,
        executed_flops={purpose: executed.get(purpose, 0) / tokens for purpose in Purpose},
        stage=stage,
        memory=memory,
        traffic=busiest(run),
        checkpoint=checkpoint_bytes(run),
    )


def busiest(run: Run) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Of each axis and kind, what the stage that sends most of it sends."""
    found: dict[tuple[str, str], tuple[int, int, int]] = {}
    for stage in range(run.axes.pipeline):
        own: dict[tuple[str, str], tuple[int, int, int]] = {}
        place = Place(0, stage, 0)
        for transfer in step_traffic(run, place):
            key = transfer.axis, transfer.kind
            calls, handed, wire = own.get(key, (0, 0, 0))
            sent = transfer.bytes * transfer.calls
            wire += transfer.on_wire(len(run.axes.members(transfer.group, place)))
            own[key] = calls + transfer.calls, handed + sent, wire
        for key, sums in own.items():
            found[key] = max(found.get(key, sums), sums, key=lambda of: of[1])
    return found


def refusal(found: Estimate, usable: float, giver: str, devices: int | None) -> str | None:
    """One line that says why a run does not fit, and what would; None: it fits.

    Args:
        usable: bytes that a rank may take.
        giver: what gives them, in words.
        devices: how many there are; None: a run may take more.
    """
    peak = found.memory.peak
    if peak <= usable:
        return None
    line = (
        f"a rank of stage {found.stage} needs {peak / 2**30:.1f} GiB, and {giver} gives "
        f"{usable / 2**30:.1f}; "
    )
    ways = [
        f"{' '.join(remedy.overrides)} ({remedy.peak / 2**30:.1f} GiB)"
        for remedy in remedies(found.run, usable, devices)
    ]
    if not ways:
        return line + "neither recomputation nor micro-batches nor axes up to 64 are enough"
    return line + "it fits with " + ", or ".join(ways)
