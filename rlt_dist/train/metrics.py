"""A run's numbers: `metrics.jsonl`, one object a step, and the same for TensorBoard."""

from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from rlt_dist.checkpoint.run_folder import METRICS, TENSORBOARD
from rlt_dist.util.errors import disk_trouble
from rlt_dist.util.files import write_atomic
from rlt_dist.util.records import read_records, to_json


class MetricsLog:
    """Appends records; each is handed to the operating system at once, so a kill loses none.

    While the disk is full, records wait in memory, and TensorBoard does without.

    Attributes:
        trouble: why the last record could not be written; None: it was.
    """

    def __init__(self, run_folder: Path, step: int) -> None:
        """Go on after `step`: records of later steps, which will be done again, are removed."""
        path = run_folder / METRICS
        kept = [record for record in read_records(path) if record.get("step", 0) <= step]
        write_atomic(path, "".join(to_json(record) + "\n" for record in kept))
        self._file = path.open("ab", buffering=0)
        self._waiting = b""
        self._board_folder = run_folder / TENSORBOARD
        self._board: SummaryWriter | None = SummaryWriter(self._board_folder, purge_step=step + 1)
        self.trouble: str | None = None

    def write(self, record: dict[str, Any]) -> None:
        """Add one step's record; its `step` orders it."""
        self._waiting += (to_json(record) + "\n").encode()
        try:
            self._write_waiting()
            self.trouble = None
        except OSError as error:
            self.trouble = disk_trouble(error)
            if self.trouble is None:
                raise
        try:
            self._show(record)
        except OSError as error:
            if disk_trouble(error) is None:
                raise
            self._close_board()

    def close(self) -> None:
        """Nothing more will be written.

        Raises:
            OSError: records are still waiting and cannot be written.
        """
        self._close_board()
        with self._file:
            self._write_waiting()

    def _write_waiting(self) -> None:
        while self._waiting:
            self._waiting = self._waiting[self._file.write(self._waiting) :]

    def _show(self, record: dict[str, Any]) -> None:
        if self._board is None:
            self._board = SummaryWriter(self._board_folder)
        for name, value in record.items():
            if isinstance(value, dict):
                for key, inner in value.items():
                    self._board.add_scalar(f"{name}/{key}", inner, record["step"])
            elif name != "step":
                self._board.add_scalar(name, value, record["step"])

    def _close_board(self) -> None:
        if self._board is not None:
            # Its thread tells of a full disk whenever it is spoken to.
            with suppress(OSError):
                self._board.close()
        self._board = None
