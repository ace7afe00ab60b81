"""`rlt-dist train`: one YAML file is one run."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from rlt_dist.util.children import end_with, when_gone
from rlt_dist.util.ending import OWNER, START, STATUS, is_over, may_be_over
from rlt_dist.util.errors import UserError
from rlt_dist.util.signals import Signals, heard


def train(
    file: Annotated[Path, typer.Argument(help="The run's configuration, a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY.SUB=VALUE...", help="Values that replace the file's."),
    ] = None,
    skip_bad_shards: Annotated[
        bool,
        typer.Option("--skip-bad-shards", help="The same as data.skip_bad_shards=true."),
    ] = False,
    stop_before: Annotated[
        str | None,
        typer.Option(
            "--stop-before",
            metavar="TIME|DURATION",
            help="Save and end in time before this: 2h, 1h30m, 2026-12-01T08:00. "
            "Under Slurm also before the job's end.",
        ),
    ] = None,
    reset_state: Annotated[
        bool,
        typer.Option(
            "--reset-state",
            help="Go on with parameters, optimizer and counts, every lane's state empty; with "
            "another data.lanes, from the start of the first epoch that no lane has begun.",
        ),
    ] = False,
) -> None:
    """Train a model, or go on with a run that was stopped.

    A run folder that holds checkpoints is resumed from the newest whole one: the same command
    starts and resumes. Several processes are started with `rlt-dist launch`; each takes its share
    of the lanes, and their number never changes the result.

    A run whose number of lanes was changed goes on only with `--reset-state`: all lanes start with
    empty state, and what they had left to read of their epochs is passed over. With the same number
    of lanes each goes on where it was in the data. Run again, the same command goes on from its own
    checkpoints without emptying the state again.

    A run with `initial=RUN` begins from the parameters of another run's newest checkpoint (or of
    one that is named), with optimizer, state and place in the data of its own: fine-tuning.

    SIGTERM, SIGUSR1 or SIGINT (Ctrl-C) at any one process make all finish the step, save and end; a
    second one ends them at once. Exit status: 0 finished; 75 stopped and saved, the same command
    goes on; 2 a mistake that you can correct, or stopped by the guard; 1 a defect, a full disk, a
    network that is away, a lost or stuck process, or a second signal. RUN/ended.json says it too:
    torchrun's own status is 1 whatever the processes' is. `rlt-dist launch` ends with the
    processes' status.

    Examples:

    `rlt-dist train configs/rlt_stdlib.yaml train.steps=100`

    `rlt-dist train configs/rlt_stdlib.yaml --stop-before 90m`

    `rlt-dist train configs/rlt_stdlib.yaml data.lanes=32 --reset-state`

    `rlt-dist train configs/rlt_stdlib.yaml run_folder=runs/talks data.path=corpora/talks
    initial=runs/rlt`

    `rlt-dist launch torchrun --processes 2 configs/rlt_stdlib.yaml`
    """
    began = time.time()
    if START in os.environ:  # Nobody else would end a rank whose launcher was killed.
        end_with(os.getppid(), signal.SIGKILL)
    wished = [*(overrides or ()), *["data.skip_bad_shards=true"] * skip_bad_shards]
    if _is_over(file, wished):
        return
    with heard() as signals:
        if OWNER in os.environ:  # Not every launcher's end is noticed by those between.
            when_gone(os.environ[OWNER], lambda: _stop(signals))
        finished = _train(file, wished, reset_state, Asked(signals, stop_before, began))
    if not finished:
        raise typer.Exit(STATUS["stopped"])


def _stop(signals: Signals) -> None:
    """Unless the launcher has passed it on."""
    if signals.first is None:
        os.kill(os.getpid(), signal.SIGTERM)


@dataclass(frozen=True)
class Asked:
    """What may end the run before its last step."""

    signals: Signals
    stop_before: str | None
    began: float


def _is_over(file: Path, overrides: list[str]) -> bool:
    """Whether torchrun has started this rank again although the run has ended as it was to."""
    from rlt_dist.config.load import load_typed
    from rlt_dist.config.run import RunConfig

    if not may_be_over(os.environ):
        return False
    try:
        folder = load_typed(file, RunConfig, overrides).run_folder
    except UserError:
        return False
    return is_over(folder, os.environ)


def _train(file: Path, overrides: list[str], reset_state: bool, asked: Asked) -> bool:
    """Train as one process of a run; whether it is finished."""
    from rlt_dist.checkpoint.run_folder import check_moved, is_run_folder
    from rlt_dist.config.load import load_typed
    from rlt_dist.config.run import RunConfig
    from rlt_dist.mesh.collectives import together
    from rlt_dist.mesh.world import open_world
    from rlt_dist.parallel.mesh import mesh_of
    from rlt_dist.train.loop import run_training
    from rlt_dist.train.session import open_session
    from rlt_dist.train.stop import Wishes, deadline_of

    with open_world() as world:
        asked.signals.at_second = world.end
        config = together(world, lambda: load_typed(file, RunConfig, overrides))
        if is_run_folder(config.run_folder) or START in os.environ:  # `launch` has made it.
            world.keep_in(config.run_folder)
        deadline = together(world, lambda: deadline_of(asked.stop_before, asked.began, os.environ))
        together(world, lambda: check_moved(file, config))
        with (
            mesh_of(config, world) as mesh,
            open_session(config, mesh, reset_state=reset_state) as session,
        ):
            return run_training(session, Wishes(asked.signals, deadline))
