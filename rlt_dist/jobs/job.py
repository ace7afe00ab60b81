"""One submission of a run, and what became of it: the folder that a job works from.

RUN/jobs/0001/        the run's first submission
  job.json            what was asked for (`Job`)
  config.yaml         the run's configuration, resolved
  code/               the code as it was, so that a job that waits or is requeued does not change
  revision.txt        its commit, and what differed from it
  job.sbatch          the job script
  submitted.json      the batch system's answer (`Submitted`)
  cancelled.json      when a person cancelled it (`Cancelled`)
  running.json        the start that is at work (`Begun`)
  starts.jsonl        one object a start that has ended (`Start`)
  output.log          what the job script and its ranks printed
  tasks/              of an array's first job: by task, a link to the task's job folder
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt, ValidationError

from rlt_dist.checkpoint.run_folder import JOBS
from rlt_dist.config.load import Strict
from rlt_dist.util import ending
from rlt_dist.util.errors import UserError
from rlt_dist.util.files import write_atomic
from rlt_dist.util.records import append_record, read_records

JOB, CONFIG, CODE, REVISION = "job.json", "config.yaml", "code", "revision.txt"
SCRIPT, SUBMITTED, STARTS, OUTPUT = "job.sbatch", "submitted.json", "starts.jsonl", "output.log"
RUNNING, CANCELLED = "running.json", "cancelled.json"

Record = TypeVar("Record", bound=Strict)
How = ending.How | Literal["sick"]
"""How a start ended; sick: a node was not fit, and no rank was started."""


class Job(Strict):
    """What was asked for."""

    run_folder: Path
    """Absolute."""
    directory: Path
    """Absolute; where it was submitted, and relative paths of the configuration begin."""
    nodes: PositiveInt
    nodes_min: PositiveInt
    """With how few the job may go on; its data axis shrinks with them."""
    processes: PositiveInt
    """Ranks of one node."""
    gpus: NonNegativeInt = 0
    """Of one node, as they were asked for; one that has fewer is sick."""
    in_job_restarts: NonNegativeInt = 3
    """How often torchrun starts all ranks again while the nodes are healthy."""
    attempts: PositiveInt = 3
    """Starts in a row without a new checkpoint, after which the job is given up."""
    lead: PositiveFloat = 120.0
    """Seconds before its end in which Slurm warns the job."""
    arguments: tuple[str, ...] = ()
    """Further options of `rlt-dist train`."""
    options: tuple[str, ...] = ()
    """Further options of sbatch that hold for later submissions, too, such as `--qos=high`."""


class Submitted(Strict):
    """The batch system's answer."""

    job_id: str
    """`1234`, `1234_7` for a task of an array, `local` without a batch system."""
    when: PositiveFloat
    """Seconds since the epoch."""


class Cancelled(Strict):
    """A person's wish."""

    when: PositiveFloat
    """Seconds since the epoch."""


class Begun(Strict):
    """A start of the ranks, while they are at work."""

    job_id: str
    nodes: tuple[str, ...]
    mesh: str
    """As in 2x1x4."""
    idle: NonNegativeInt = 0
    """Places for ranks on these nodes that the mesh does not use."""
    began: PositiveFloat
    """Seconds since the epoch."""
    from_step: NonNegativeInt
    """Of the newest whole checkpoint before."""


class Start(Begun):
    """One start of the ranks."""

    ended: PositiveFloat
    how: How
    why: str | None = None
    to_step: NonNegativeInt
    """Of the newest whole checkpoint after."""
    sick: tuple[str, ...] = ()
    """Nodes that failed their check."""


def job_folders(run_folder: Path) -> list[Path]:
    """A run's submissions, oldest first."""
    found = (run_folder / JOBS).glob("[0-9]" * 4)
    return sorted(path for path in found if (path / JOB).is_file())


def write_record(path: Path, record: Strict) -> None:
    """One object of one file."""
    write_atomic(path, record.model_dump_json(indent=1) + "\n")


def read_record(path: Path, kind: type[Record]) -> Record:
    """One object of one file.

    Raises:
        UserError: it cannot be read, or holds something else.
    """
    try:
        return kind.model_validate_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(f"{path}: no such file; submit the run anew") from None
    except ValidationError:
        doomed = path.parent if path.name == JOB else "it"
        raise UserError(f"{path}: is damaged; remove {doomed}") from None


def is_cancelled(folder: Path) -> bool:
    """Whether a person has cancelled a job."""
    return (folder / CANCELLED).is_file()


def add_start(folder: Path, start: Start) -> None:
    """Remember a start that has ended."""
    append_record(folder / STARTS, start.model_dump_json())


def starts(folder: Path) -> Iterator[Start]:
    """What has been started, oldest first.

    Raises:
        UserError: what is written there is something else.
    """
    for number, record in enumerate(read_records(folder / STARTS), 1):
        try:
            yield Start(**record)
        except ValidationError:
            raise UserError(f"{folder / STARTS}:{number}: is damaged; remove the line") from None
