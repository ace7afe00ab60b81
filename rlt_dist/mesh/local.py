"""All ranks of a run on this machine, without another launcher."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from rlt_dist.mesh.launched import SERVED
from rlt_dist.mesh.watch import first_failure
from rlt_dist.mesh.world import TIMEOUT
from rlt_dist.util.errors import UserError

_HERE = "127.0.0.1"
_PATIENCE = 5.0
"""Seconds between the signal that asks a rank to end and the one that ends it."""

_MISTAKE = 2
"""Exit status after a mistake that a person can correct."""

Processes = list[subprocess.Popen[bytes]]


def run_ranks(size: int, arguments: Sequence[str], output: Path) -> None:
    """Run a Python program as ranks 0 to size - 1 and wait until all have ended.

    The ranks meet as under torchrun, at a store that this process serves. Each computes on one
    thread unless OMP_NUM_THREADS says otherwise. When one fails the others are ended, and on Ctrl-C
    all are.

    Args:
        arguments: the interpreter's, such as ["-m", "rlt_dist", "train", "run.yaml"].
        output: a file for what all of them print.

    Raises:
        UserError: a rank failed; the first error, with its rank.
    """
    # Port 0 is a free one, taken from the moment it is known.
    store = dist.TCPStore(_HERE, 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    with output.open("wb") as file, _ended_at_last() as ranks:
        for rank in range(size):
            environment = _environment(rank, size, store.port)
            command = [sys.executable, *arguments]
            ranks.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
        failed = _first_to_fail(ranks)
    if failed is not None:
        told = first_failure(store) or f"rank {failed}: {_status(ranks[failed].returncode)}"
        if size == 1 and ranks[failed].returncode == _MISTAKE:
            raise UserError(_last_line(output))
        raise UserError(f"{told} (what all {size} ranks printed is in {output})")


@contextmanager
def shown_on_one_rank() -> Iterator[None]:
    """Let a single rank, which no other watches, end with its mistake in one line."""
    try:
        yield
    except UserError as error:
        print(error)
        sys.exit(_MISTAKE)


def _last_line(file: Path) -> str:
    return file.read_text(errors="replace").strip().rpartition("\n")[2]


def _environment(rank: int, size: int, port: int) -> dict[str, str]:
    own = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
    meeting = {"MASTER_ADDR": _HERE, "MASTER_PORT": port, SERVED: True}
    return {"OMP_NUM_THREADS": "1"} | os.environ | {k: str(v) for k, v in (own | meeting).items()}


def _first_to_fail(ranks: Processes) -> int | None:
    """Wait until a rank fails or all have ended well."""
    while True:
        statuses = [process.poll() for process in ranks]
        for rank, status in enumerate(statuses):
            if status:
                return rank
        if all(status == 0 for status in statuses):
            return None
        time.sleep(0.05)


def _status(status: int) -> str:
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


@contextmanager
def _ended_at_last() -> Iterator[Processes]:
    """Processes to be added to a list; whatever happens, none outlives the block."""
    ranks: Processes = []
    try:
        yield ranks
    finally:
        for process in ranks:
            process.terminate()
        until = time.monotonic() + _PATIENCE
        for process in ranks:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
