"""A run's numbers: `metrics.jsonl`, one object a step, and the same for TensorBoard."""

from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from rlt_dist.checkpoint.run_folder import METRICS, TENSORBOARD
from rlt_dist.util.files import write_atomic
from rlt_dist.util.interrupts import interrupts_wait
from rlt_dist.util.records import read_records, to_json


class MetricsLog:
    """Appends records; each is handed to the operating system at once, so a kill loses none."""

    def __init__(self, run_folder: Path, step: int) -> None:
        """Go on after `step`: records of later steps, which will be done again, are removed."""
        path = run_folder / METRICS
        kept = [record for record in read_records(path) if record.get("step", 0) <= step]
        write_atomic(path, "".join(to_json(record) + "\n" for record in kept))
        self._file = path.open("a", buffering=1)
        self._board = SummaryWriter(run_folder / TENSORBOARD, purge_step=step + 1)

    def write(self, record: dict[str, Any]) -> None:
        """Add one step's record; its `step` orders it."""
        with interrupts_wait():  # TensorBoard's queue, in which its thread would get stuck.
            self._add(record)

    def _add(self, record: dict[str, Any]) -> None:
        self._file.write(to_json(record) + "\n")
        for name, value in record.items():
            if isinstance(value, dict):
                for key, inner in value.items():
                    self._board.add_scalar(f"{name}/{key}", inner, record["step"])
            elif name != "step":
                self._board.add_scalar(name, value, record["step"])

    def close(self) -> None:
        """Nothing more will be written."""
        self._file.close()
        self._board.close()
