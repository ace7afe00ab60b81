"""How long before its end a job is to be warned."""

from pathlib import Path

from rlt_dist.checkpoint.run_folder import METRICS
from rlt_dist.util.records import read_records

UNMEASURED = 120.0
"""Seconds, of a run that has not been measured."""
_MARGIN = 30.0
"""Seconds until all ranks know, and until all have ended."""


def lead_of(run_folder: Path) -> float:
    """Seconds that a run needs to stop and save: of its job's `--signal`.

    The longest step, two of the slowest saves, since one may be under way, and a margin; what was
    measured of the run so far, or a guess before there is a checkpoint.
    """
    records = read_records(run_folder / METRICS)
    steps = [record["seconds"] for record in records]
    saves = [record["checkpoint"]["seconds"] for record in records if "checkpoint" in record]
    return max(steps) + 2 * max(saves) + _MARGIN if saves else UNMEASURED
