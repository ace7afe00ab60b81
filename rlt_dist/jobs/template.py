"""A job's script, from a template of the folder `slurm/`."""

import math
import shlex
import sys
from pathlib import Path

from jinja2 import Environment, StrictUndefined, TemplateError

from rlt_dist.jobs.job import OUTPUT, Job
from rlt_dist.jobs.options import grouped
from rlt_dist.util.errors import UserError

TASKS = "tasks"
"""In the folder of an array's first job: by task, a link to the job's folder."""


def render(template: Path, folder: Path, job: Job, array: str | None = None) -> str:
    """The script of a job, or of all jobs of an array.

    Args:
        folder: the job's; that of the first job of an array.

    Raises:
        UserError: the template cannot be read, or is none.
    """
    try:
        text = template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{template}: cannot be read as a template: {error}") from None
    nodes = f"{job.nodes_min}-{job.nodes}" if job.nodes_min < job.nodes else f"{job.nodes}"
    own = folder if array is None else folder / TASKS
    # In the name of Slurm's file % begins a symbol.
    output = f"{own}/".replace("%", "%%") + ("" if array is None else "%a/") + OUTPUT
    chosen = [
        f"--job-name={job.run_folder.name}",
        f"--nodes={nodes}",
        # With a number of tasks per node Slurm would take as few nodes of the range as it may.
        f"--cpus-per-task={job.processes}",
        "--requeue",
        f"--signal=B:USR1@{math.ceil(job.lead)}",
        "--open-mode=append",
        f"--output={output}",
        *([] if array is None else [f"--array={array}"]),
        *job.options,
    ]
    values = {
        "run": job.run_folder.name,
        "options": [shlex.join(group) for group in grouped(chosen)],
        "folder": shlex.quote(str(own)),
        "array": array,
        "directory": shlex.quote(str(job.directory)),
        "python": shlex.quote(sys.executable),
        "programs": shlex.quote(str(Path(sys.executable).parent)),
    }
    environment = Environment(
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True
    )
    try:
        return environment.from_string(text).render(values)
    except TemplateError as error:
        raise UserError(f"{template}: is no template: {error}") from None
