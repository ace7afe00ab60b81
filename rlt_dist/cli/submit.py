"""`rlt-dist submit`, `resume`: a run as a job of Slurm, or of this machine."""

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from rlt_dist.util.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlt_dist.jobs.job import Job
    from rlt_dist.jobs.plan import Room
    from rlt_dist.jobs.submit import Ready, Wanted

PASSED_ON = {"ignore_unknown_options": True}
AFTER = "rlt_dist.after"
"""Where a context keeps what followed `--`."""


class PassesOn(TyperCommand):
    """Unknown options are words like others; what follows `--` is kept apart."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Set aside what follows `--`."""
        cut = args.index("--") if "--" in args else len(args)
        ctx.meta[AFTER] = args[cut + 1 :]
        return super().parse_args(ctx, args[:cut])


NodesMin = Annotated[
    int | None,
    typer.Option(min=1, help="With how few the job may go on [default: as many]."),
]
Gpus = Annotated[
    str | None,
    typer.Option(metavar="[TYPE:]NUMBER", help="GPUs of a node, each with its own rank."),
]
Processes = Annotated[int | None, typer.Option(min=1, help="Ranks of a node, on CPUs.")]
Time = Annotated[str | None, typer.Option(metavar="LIMIT", help="As sbatch has it: 4:00:00.")]
Partition = Annotated[str | None, typer.Option(help="As sbatch has it.")]
Account = Annotated[str | None, typer.Option(help="As sbatch has it.")]
Dependency = Annotated[
    str | None, typer.Option(metavar="CONDITION", help="As sbatch has it: afterok:1234.")
]
Lead = Annotated[
    float | None,
    typer.Option(
        min=1,
        metavar="SECONDS",
        help="Warning before the job's end [default: as long as a step and two saves took].",
    ),
]
Attempts = Annotated[
    int | None,
    typer.Option(min=1, help="Starts in a row without a new checkpoint until the job is given up."),
]
Restarts = Annotated[
    int | None, typer.Option(min=0, help="Restarts of the ranks within one start of the job.")
]
GpuMemory = Annotated[
    float | None, typer.Option(metavar="GIB", help="Memory of a GPU, which the run has to fit.")
]
Template = Annotated[
    Path | None, typer.Option(help="Of the job script [default: slurm/train.sbatch].")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Check, and print the job script; Slurm is not needed.")
]
Local = Annotated[
    bool, typer.Option("--local", help="Run the job script on this machine, without Slurm.")
]


def submit(
    context: typer.Context,
    file: Annotated[str, typer.Argument(help="The run's configuration, a YAML file.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY.SUB=VALUE... OPTION-OF-SBATCH...",
            help="Values that replace the file's, and whatever else sbatch is to be told.",
        ),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes.")] = 1,
    nodes_min: NodesMin = None,
    gpus_per_node: Gpus = None,
    processes_per_node: Processes = None,
    time: Time = None,
    partition: Partition = None,
    account: Account = None,
    array: Annotated[
        str | None,
        typer.Option(
            metavar="TASKS", help="A run for each task, {task} in a value being its number: 0-3."
        ),
    ] = None,
    dependency: Dependency = None,
    lead: Lead = None,
    attempts: Attempts = None,
    in_job_restarts: Restarts = None,
    gpu_memory: GpuMemory = None,
    template: Template = None,
    reset_state: Annotated[
        bool, typer.Option("--reset-state", help="As `rlt-dist train` has it.")
    ] = False,
    dry_run: DryRun = False,
    local: Local = False,
) -> None:
    """Submit a run to Slurm; the job's id is printed.

    All that can be known is checked first: that the mesh fits nodes x ranks, the lanes the mesh,
    the model the memory and its checkpoints the disk, that the corpus is there, and that Slurm
    would take the job. Then RUN/jobs/NNNN gets a copy of the code, its revision and what differs
    from it, the resolved configuration and the job script. The job works from there: what you
    change afterwards changes nothing of it, also after a requeue.

    The job is requeued when it is preempted, runs out of time, or loses a node or a rank, and goes
    on from the newest whole checkpoint; a finished run and a mistake are not. With `--nodes-min` it
    also starts with fewer nodes: the mesh's data axis shrinks to the largest that fits.

    Options that are not listed here go to sbatch as they stand, and so does all that follows `--`.

    Examples:

    `rlt-dist submit configs/rlt_stdlib.yaml --nodes 2 --gpus-per-node 8 --time 4:00:00`

    `rlt-dist submit configs/rlt_stdlib.yaml --nodes 16 --nodes-min 8 --gpus-per-node h200:8
    --qos=high --exclude=node7`

    `rlt-dist submit configs/rlt_stdlib.yaml train.seed={task} run_folder=runs/seed-{task}
    --array 0-3`

    `rlt-dist submit configs/rlt_stdlib.yaml --processes-per-node 2 --dry-run`
    """
    from rlt_dist.jobs import submit as jobs
    from rlt_dist.jobs.job import Job

    named = {"time": time, "partition": partition, "account": account, "dependency": dependency}
    named |= {"gpus_per_node": gpus_per_node}
    overrides, lasting, once = sort_words(file, words or [], context.meta[AFTER], named)
    restarts = {"attempts": attempts, "in_job_restarts": in_job_restarts}
    job = Job(
        run_folder=Path(),
        directory=Path.cwd(),
        nodes=nodes,
        nodes_min=_least(nodes_min, nodes),
        processes=_ranks(gpus_per_node, processes_per_node) or 1,
        gpus=_ranks(gpus_per_node, None) or 0,
        arguments=("--reset-state",) if reset_state else (),
        options=lasting,
        **_given(restarts),
    )
    code = jobs.current_code()
    wanted = jobs.Wanted(job, template_of(template), *code, array, once, lead, local)
    _check_local(wanted)
    configs = jobs.configurations(Path(file), overrides, array)
    _go(jobs.make_ready(wanted, configs, _room(job, gpu_memory, local)), dry_run)


def resume(
    context: typer.Context,
    run: Annotated[str, typer.Argument(help="A run folder.")],
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="OPTION-OF-SBATCH...", help="Whatever else sbatch is to be told."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes [default: as many as last].")
    ] = None,
    nodes_min: NodesMin = None,
    gpus_per_node: Gpus = None,
    processes_per_node: Processes = None,
    time: Time = None,
    partition: Partition = None,
    account: Account = None,
    dependency: Dependency = None,
    lead: Lead = None,
    attempts: Attempts = None,
    in_job_restarts: Restarts = None,
    gpu_memory: GpuMemory = None,
    template: Template = None,
    dry_run: DryRun = False,
    local: Local = False,
) -> None:
    """Submit a run again that was cancelled, stopped or given up; the job's id is printed.

    Code and configuration are those of its last job, and so is whatever you do not ask for anew; it
    goes on from the newest whole checkpoint. To go on with the code or a configuration as they are
    now, `rlt-dist submit` it.

    Examples:

    `rlt-dist resume runs/rlt`

    `rlt-dist resume runs/rlt --nodes 4 --time 8:00:00`
    """
    from rlt_dist.config.load import load_typed
    from rlt_dist.config.run import RunConfig
    from rlt_dist.jobs import submit as jobs
    from rlt_dist.jobs.job import CONFIG, JOB, Job, read_record
    from rlt_dist.jobs.options import has, merged, without

    if has([*(words or []), *context.meta[AFTER]], "--array", "-a"):
        raise UserError("--array: a resume is of one run; resume each task's run folder by itself")
    named = {"time": time, "partition": partition, "account": account, "dependency": dependency}
    named |= {"gpus_per_node": gpus_per_node}
    overrides, lasting, once = sort_words(run, words or [], context.meta[AFTER], named)
    folder = jobs.earlier(Path(run).absolute())
    if overrides:
        raise UserError(
            f"{overrides[0]}: a resumed run keeps its configuration; `rlt-dist submit "
            f"{folder / CONFIG} {overrides[0]}` changes it"
        )
    before = read_record(folder / JOB, Job)
    config = load_typed(folder / CONFIG, RunConfig)
    _check_unfinished(config.run_folder)
    count = nodes or before.nodes
    kept = without(before.options, "--gpus-per-node") if processes_per_node else before.options
    anew = {"attempts": attempts, "in_job_restarts": in_job_restarts}
    anew |= {"processes": _ranks(gpus_per_node, processes_per_node)}
    anew |= {"gpus": _ranks(gpus_per_node, None)}
    job = before.model_copy(
        update={
            "nodes": count,
            "nodes_min": _least(nodes_min or min(before.nodes_min, count), count),
            "options": merged(kept, lasting),
            **_given(anew),
        }
    )
    code = jobs.resumed_code(folder)
    wanted = jobs.Wanted(job, template_of(template), *code, None, once, lead, local)
    _check_local(wanted)
    room = _room(job, gpu_memory, local)
    _go(jobs.make_ready(wanted, {0: config}, room, compare=False), dry_run)


def sort_words(
    first: str, words: "Sequence[str]", after: "Sequence[str]", named: "Mapping[str, str | None]"
) -> tuple[list[str], tuple[str, ...], tuple[str, ...]]:
    """Overrides, and options of sbatch: those that last, and those of this submission alone.

    An override has a `=`: another word is the value of the option before it.

    Args:
        after: what followed `--`.
        named: options by the names of this command's parameters.
    """
    from rlt_dist.jobs.options import misplaced, split

    if first.startswith("-"):
        raise UserError(f"{first}: options of sbatch follow the name of the file or folder")
    overrides: list[str] = []
    options: list[str] = []
    for word in words:
        takes = bool(options) and options[-1].startswith("-") and "=" not in options[-1]
        if word.startswith("-") or ("=" not in word and takes):
            options.append(word)
        else:
            overrides.append(word)
    options += after
    wrong = misplaced(options)
    if wrong is not None:
        raise UserError(wrong)
    options += [f"--{name.replace('_', '-')}={value}" for name, value in named.items() if value]
    return overrides, *split(options)


def _given(values: "Mapping[str, int | None]") -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _ranks(gpus: str | None, processes: int | None) -> int | None:
    """Ranks of a node."""
    if gpus is None:
        return processes
    if processes is not None:
        raise UserError("--processes-per-node: each GPU has one rank; leave it out")
    found = re.fullmatch(r"(?:.+:)?([1-9]\d*)", gpus)
    if found is None:
        raise UserError(f"--gpus-per-node {gpus}: give a number, or as in h200:8")
    return int(found[1])


def _least(wanted: int | None, nodes: int) -> int:
    if wanted is not None and wanted > nodes:
        raise UserError(f"--nodes-min {wanted}: is more than --nodes {nodes}")
    return wanted or nodes


def template_of(wished: Path | None) -> Path:
    """The wished one, or ours: in the package where that is installed, beside it in a checkout."""
    from rlt_dist.jobs.freeze import PACKAGE

    inside, beside = (folder / "slurm" / "train.sbatch" for folder in (PACKAGE, PACKAGE.parent))
    return wished or (inside if inside.is_file() else beside)


def _room(job: "Job", gpu_memory: float | None, local: bool) -> "Room":
    """What is known of the memory: of a GPU by the person, of a node's by Slurm or this machine."""
    from rlt_dist.jobs import slurm
    from rlt_dist.jobs.options import has, value_of
    from rlt_dist.jobs.plan import Room

    room = (job.nodes, job.nodes_min, job.processes)
    if gpu_memory is not None:
        return Room(*room, gpu_memory * float(1 << 30), "--gpu-memory")
    if has(job.options, "--gpus-per-node"):
        return Room(*room)
    if local:
        whole = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        return Room(*room, whole / job.processes, "this machine")
    try:
        node = slurm.node_memory(value_of(job.options, "--partition", "-p"))
    except UserError:  # Slurm does not answer, which matters once it is asked to take the job
        node = None
    if node is None:
        return Room(*room)
    return Room(*room, node / job.processes, "the largest node of the partition")


def _check_local(wanted: "Wanted") -> None:
    if wanted.local and (wanted.job.nodes > 1 or wanted.array is not None):
        raise UserError("--local: this machine is one node and runs one task; leave --array out")


def _check_unfinished(run_folder: Path) -> None:
    from rlt_dist.jobs.status import status_of

    status = status_of(run_folder)
    if status.state == "finished":
        raise UserError(
            f"{run_folder}: is finished, {status.step} of {status.steps} steps; to train on, "
            "`rlt-dist submit` it with more train.steps"
        )


def _go(ready: "Ready", dry_run: bool) -> None:
    """Say what is done, and do it."""
    from rlt_dist.jobs import submit as jobs

    for line in ready.lines():
        typer.echo(line, err=True)
    if dry_run:
        typer.echo(ready.script(), nl=False)
        return
    if ready.wanted.local:
        script = jobs.make_local(ready)
        # The script's signals and exit status are this command's.
        os.execvp("bash", ["bash", str(script)])
    job_id, waits = jobs.submit(ready)
    if waits is not None:
        typer.echo(waits, err=True)
    shown = next(iter(ready.jobs.values())).run_folder
    typer.echo(
        f"submitted; `rlt-dist status {shown}` and `rlt-dist logs -f {shown}` follow it", err=True
    )
    typer.echo(job_id)
