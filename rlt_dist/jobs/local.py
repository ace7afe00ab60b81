"""All ranks of a run on this machine, without another launcher."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from rlt_dist.mesh.watch import first_failure
from rlt_dist.mesh.world import TIMEOUT
from rlt_dist.util.errors import UserError

_PATIENCE = 5.0
"""Seconds between the signal that asks a rank to end and the one that ends it."""


def run_ranks(size: int, arguments: Sequence[str], output: Path) -> None:
    """Run a Python program as ranks 0 .. size - 1 and wait for their end.

    The ranks find each other as under torchrun, through a store which this process serves. Each
    computes on one thread, unless OMP_NUM_THREADS says how many. When one fails, and on Ctrl-C, all
    are ended.

    Args:
        arguments: of the interpreter, such as ["-m", "rlt_dist", "train", "run.yaml"].
        output: file for what all of them print.

    Raises:
        UserError: a rank failed; the first error, with its rank.
    """
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    with output.open("wb") as file, _all_ended_at_last() as processes:
        for rank in range(size):
            processes.append(
                subprocess.Popen(
                    [sys.executable, *arguments],
                    env=_environment(rank, size, store.port),
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )
            )
        while any(process.poll() is None for process in processes):
            ...
