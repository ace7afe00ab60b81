"""`rlt-dist launch`: a run's ranks, by a launcher of your choice."""

import os
from collections.abc import Mapping
from pathlib import Path
from socket import gethostbyname, gethostname
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from rlt_dist.mesh.launched import LAUNCHER, address_towards, free_port
from rlt_dist.util.ending import START
from rlt_dist.util.errors import UserError

if TYPE_CHECKING:
    from rlt_dist.jobs.launchers import Launch

launch_app = typer.Typer(
    name="launch",
    no_args_is_help=True,
    help="Train as several ranks, started by torchrun, mpirun, srun or DeepSpeed's launcher.\n\n"
    "The result is the same with each. Options of `rlt-dist train` are passed on, and so are "
    "SIGTERM, SIGUSR1 and SIGINT (Ctrl-C): the run is saved and stops. The exit status is that of "
    "`rlt-dist train`, whatever the launcher's is, and the error of the first rank that failed is "
    "the last line. What each rank said is in logs/ of the run folder. No process is left behind.",
)

_PASSED_ON = {"ignore_unknown_options": True}

Arguments = Annotated[
    list[str], typer.Argument(metavar="FILE [KEY.SUB=VALUE...]", help="As of `rlt-dist train`.")
]


@launch_app.command("torchrun", context_settings=_PASSED_ON)
def by_torchrun(
    arguments: Arguments,
    processes: Annotated[int, typer.Option(min=1, help="Ranks of this machine.")],
    nodes: Annotated[int, typer.Option(min=1, help="Machines in all.")] = 1,
    meeting: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="On one of several machines: where all meet."),
    ] = None,
    restarts: Annotated[
        int, typer.Option(min=0, help="How often all ranks start again after one has failed.")
    ] = 0,
) -> None:
    """Ranks by torchrun. On several machines the command is given on each.

    Examples:

    `rlt-dist launch torchrun --processes 2 configs/rlt_stdlib.yaml train.steps=100`

    `rlt-dist launch torchrun --processes 8 --nodes 2 --meeting node1:29500 configs/rlt_stdlib.yaml`
    """
    from rlt_dist.jobs.launchers import torchrun

    if (nodes > 1) is not (meeting is not None):
        raise UserError("--nodes and --meeting belong together: give both, or neither")
    program = _program(arguments)
    if meeting is None:
        _run(torchrun(program, processes, restarts=restarts), arguments)
    own, there = _addresses(meeting)
    several = torchrun(
        program,
        processes,
        nodes=nodes,
        meeting=meeting,
        address=own,
        serves=own == there and not own.startswith("127."),
        restarts=restarts,
    )
    _run(several, arguments, {START: meeting})


@launch_app.command("mpirun", context_settings=_PASSED_ON)
def by_mpirun(
    arguments: Arguments,
    processes: Annotated[int, typer.Option(min=1, help="Ranks in all.")],
    hosts: Annotated[
        Path | None, typer.Option(help="A file with a machine a line; this one without.")
    ] = None,
) -> None:
    """Ranks by MPICH's mpirun, which the extra `mpi` brings.

    Example:

    `rlt-dist launch mpirun --processes 16 --hosts hosts.txt configs/rlt_stdlib.yaml`
    """
    from rlt_dist.jobs.launchers import mpirun

    _run(mpirun(_program(arguments), processes, hosts), arguments)


@launch_app.command("srun", context_settings=_PASSED_ON)
def by_srun(
    arguments: Arguments,
    processes: Annotated[int, typer.Option(min=1, help="Ranks in all.")],
    nodes: Annotated[int, typer.Option(min=1, help="Nodes in all.")] = 1,
) -> None:
    """Ranks as tasks of a Slurm step. srun's own variables say the rest, such as SLURM_PARTITION.

    With RLT_DIST_LAUNCHER=mpi they find each other by MPI over `pmi2`, and not by Slurm's
    variables.

    Example:

    `rlt-dist launch srun --processes 16 --nodes 2 configs/rlt_stdlib.yaml`
    """
    from rlt_dist.jobs.launchers import srun

    options = (f"--nodes={nodes}", f"--ntasks={processes}")
    mpi = os.environ.get(LAUNCHER) == "mpi"
    _run(srun(_program(arguments), options, mpi=mpi), arguments)


@launch_app.command("deepspeed", context_settings=_PASSED_ON)
def by_deepspeed(
    arguments: Arguments,
    hosts: Annotated[Path, typer.Option(help="Its hostfile: lines such as `node1 slots=8`.")],
) -> None:
    """Ranks by DeepSpeed's launcher, which the extra `deepspeed` brings; any optimizer.engine.

    Example:

    `rlt-dist launch deepspeed --hosts hosts.txt configs/rlt_stdlib.yaml`
    """
    from rlt_dist.jobs.launchers import deepspeed

    if not hosts.is_file():
        raise UserError(f"{hosts}: no such file; give DeepSpeed's hostfile")
    lines = [line for line in hosts.read_text().splitlines() if line.split("#")[0].strip()]
    here = [line.split()[0] for line in lines] in (["localhost"], [gethostname()])
    _run(deepspeed(_program(arguments), hosts, free_port() if here else None), arguments)


def _program(arguments: list[str]) -> tuple[str, ...]:
    return ("-m", "rlt_dist", "train", *arguments)


def _run(
    launch: "Launch", arguments: list[str], environment: Mapping[str, str] = MappingProxyType({})
) -> NoReturn:
    """Start the ranks and end as they do; what is wrong with the configuration is said before."""
    from rlt_dist.checkpoint.run_folder import check_free
    from rlt_dist.config.load import load_typed
    from rlt_dist.config.run import RunConfig
    from rlt_dist.jobs.ranks import run_ranks_with

    file, *more = arguments
    overrides = [argument for argument in more if "=" in argument and argument[0] != "-"]
    run_folder = load_typed(Path(file), RunConfig, overrides).run_folder
    check_free(run_folder)
    all_of_it = {**launch.environment_in(os.environ), **environment}
    raise typer.Exit(run_ranks_with(launch.command, all_of_it, run_folder).status)


def _addresses(meeting: str) -> tuple[str, str]:
    """This machine's, as seen from where all meet, and that of where all meet."""
    host, _, port = meeting.rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"--meeting {meeting}: give HOST:PORT")
    try:
        return address_towards(host, int(port)), gethostbyname(host)
    except OSError as error:
        raise UserError(f"--meeting {meeting}: cannot be reached ({error.strerror})") from None
