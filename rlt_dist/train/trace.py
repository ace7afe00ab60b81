"""One step through the pipeline's stages, as it was planned and as it was run.

This module is also the program of the ranks: `python -m rlt_dist.train.trace FOLDER`, where
FOLDER/request.json says what to run; the leading rank writes everything else.
"""

import sys
from pathlib import Path

import torch.distributed as dist
from pydantic import BaseModel

from rlt_dist.config.model import RltConfig, one_piece
from rlt_dist.config.run import RunConfig
from rlt_dist.inference.forward import recurrence
from rlt_dist.mesh.axes import least_axes
from rlt_dist.mesh.local import run_ranks, shown_on_one_rank
from rlt_dist.mesh.mesh import Mesh
from rlt_dist.mesh.world import open_world
from rlt_dist.parallel.execute.step import Passed
from rlt_dist.parallel.mesh import mesh_of
from rlt_dist.parallel.schedule.chrome import chrome_trace
from rlt_dist.parallel.schedule.compare import Share, Use, measured, shares, uses
from rlt_dist.parallel.schedule.instructions import Schedule, Work
from rlt_dist.parallel.schedule.picture import picture
from rlt_dist.parallel.schedule.simulate import Timed, Timeline, simulate
from rlt_dist.train.rehearsal import Rehearsal
from rlt_dist.train.start import check_mesh
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import write_atomic

REQUEST, SUMMARY, TRACE, PICTURE = "request.json", "summary.json", "trace.json", "trace.svg"
_BEFORE = 2
"""Passes before the one that is shown: connections, buffers and schedules are made in the first."""


class Request(BaseModel):
    """What to run, on random tokens from a vocabulary."""

    config: RunConfig
    vocabulary: int


class Summary(BaseModel):
    """The trace in numbers.

    Attributes:
        mesh: data x pipeline x tensor, of which one replica's stages are shown.
        micro_batches: of a data-parallel rank.
        seconds: of the pass.
        seconds_planned: of the same work, had messages and waiting for cores taken no time.
        uses: of the ring or pipeline.
        stages: how each spent the time.
        sent: by stage, bytes of its messages.
    """

    mesh: str
    micro_batches: int
    seconds: float
    seconds_planned: float
    uses: list[Use]
    stages: list[Share]
    sent: list[int]


def trace(config: RunConfig, vocabulary: int, output: Path) -> Summary:
    """Run a step as ranks on this machine; trace, picture and summary are written to `output`.

    Raises:
        UserError: lanes do not fit the mesh, the model or the recurrence has no steps, or a rank
            failed.
    """
    axes = least_axes(config.mesh)
    check_mesh(config, vocabulary, axes)
    piece = one_piece(config.model)
    if piece is not None:
        raise UserError(f"{piece}: runs in one piece and has no steps to show")
    if isinstance(config.model, RltConfig) and recurrence(config).backend == "reference":
        raise UserError(
            "ops.recurrence: reference is one autograd graph and has no steps to show; take another"
        )
    output.mkdir(parents=True, exist_ok=True)
    request = Request(config=config, vocabulary=vocabulary)
    write_atomic(output / REQUEST, request.model_dump_json(indent=2))
    run_ranks(axes.size, ["-m", "rlt_dist.train.trace", str(output)], output / "ranks.txt")
    return Summary.model_validate_json((output / SUMMARY).read_text())


def trace_rank(folder: Path) -> None:
    """One rank's part in it."""
    request = Request.model_validate_json((folder / REQUEST).read_text())
    with open_world() as world, mesh_of(request.config, world) as mesh:
        rehearsal = Rehearsal(request.config, request.vocabulary, mesh)
        for _ in range(_BEFORE):
            rehearsal.pass_through()
        dist.barrier(group=mesh.world.group)
        passed = rehearsal.pass_through()
        run, sent = _gathered(passed, mesh)
        if world.leads:
            _write(request.config, passed.planned, run, sent, folder)


def _gathered(passed: Passed, mesh: Mesh) -> tuple[Timeline, list[int]]:
    """On the first stage: what all stages of its replica have done, and bytes that each has sent.

    All ranks are on one machine, so their clocks are one.
    """
    stages: list[tuple[list[Timed], int] | None] = [None] * mesh.axes.pipeline
    dist.all_gather_object(stages, (passed.done, passed.sent), group=mesh.pipeline.group)
    found = [stage for stage in stages if stage is not None]
    origin = min(t.start for done, _ in found for t in done)
    run = (
        tuple(Timed(what, start - origin, end - origin) for what, start, end in done)
        for done, _ in found
    )
    return tuple(run), [sent for _, sent in found]


def _write(
    config: RunConfig, schedule: Schedule, run: Timeline, sent: list[int], folder: Path
) -> None:
    planned = simulate(schedule, measured(run))
    summary = Summary(
        mesh=str(least_axes(config.mesh)),
        micro_batches=len({what.micro for what in schedule[0] if isinstance(what, Work)}),
        seconds=_end(run),
        seconds_planned=_end(planned),
        uses=list(uses(schedule, run, config.pipeline.group)),
        stages=shares(run),
        sent=sent,
    )
    both = {"planned": planned, "run": run}
    title = f"{config.model.kind}, mesh {summary.mesh}, {summary.micro_batches} micro-batches"
    write_atomic(folder / TRACE, chrome_trace(both))
    write_atomic(folder / PICTURE, picture(both, title, "s"))
    write_atomic(folder / SUMMARY, summary.model_dump_json(indent=2))


def _end(timeline: Timeline) -> float:
    return max(t.end for stage in timeline for t in stage)


if __name__ == "__main__":
    with shown_on_one_rank():
        trace_rank(Path(sys.argv[1]))
