"""`rlt-dist train`: one YAML file is one run."""

from pathlib import Path
from typing import Annotated

import typer


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
    starts and resumes. Several processes are started with torchrun; each takes its share of the
    lanes, and their number never changes the result.

    A run whose number of lanes was changed goes on only with `--reset-state`; what the lanes had
    left to read of their epochs is then passed over. With the same number of lanes each goes on
    where it was in the data. Given again, it empties the state again: leave it out of job scripts
    that are started more than once.

    Examples:

    `rlt-dist train configs/rlt_stdlib.yaml train.steps=100`

    `rlt-dist train configs/rlt_stdlib.yaml data.lanes=32 --reset-state`

    `torchrun --standalone --nproc-per-node 2 -m rlt_dist train configs/rlt_stdlib.yaml`
    """
    from rlt_dist.checkpoint.run_folder import check_moved
    from rlt_dist.config.load import load_typed
    from rlt_dist.config.run import RunConfig
    from rlt_dist.mesh.collectives import together
    from rlt_dist.mesh.world import open_world
    from rlt_dist.parallel.mesh import mesh_of
    from rlt_dist.train.loop import run_training
    from rlt_dist.train.session import open_session

    wished = [*(overrides or ()), *["data.skip_bad_shards=true"] * skip_bad_shards]
    with open_world() as world:
        config = together(world, lambda: load_typed(file, RunConfig, wished))
        together(world, lambda: check_moved(file, config))
        with (
            mesh_of(config, world) as mesh,
            open_session(config, mesh, reset_state=reset_state) as session,
        ):
            run_training(session)
