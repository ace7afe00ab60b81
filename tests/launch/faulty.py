"""`rlt-dist train` in which one rank goes wrong in step 3: faulty.py FAULT RANK FILE ...

FAULT is one of the functions below, "once " and one of them (only in torchrun's first start of the
ranks), or "none". Silence is noticed sooner than in real runs.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from rlt_dist.cli.main import main
from rlt_dist.mesh import watch
from rlt_dist.train import step
from rlt_dist.util.errors import UserError


def raises() -> None:
    raise ZeroDivisionError("a defect")


def mistakes() -> None:
    raise UserError("no such file")


def leaves() -> None:
    os._exit(0)


def hangs() -> None:
    time.sleep(600)


def halts() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS = {fault.__name__: fault for fault in (raises, mistakes, leaves, hangs, halts, dies)}


def go_wrong(fault: str, rank: int, told: Path) -> None:
    """In the third step, on this rank; a file gets a letter each time."""
    original, happens = step._forward_backward, FAULTS[fault]

    def wrapped(*given: Any) -> Any:
        if given[5] == 3 and given[1].world.rank == rank:
            with told.open("a") as file:
                file.write("x")
            happens()
        return original(*given)

    step._forward_backward = wrapped


if __name__ == "__main__":
    watch._SILENCE = 4.0  # 20 s are long in a test.
    fault, rank, *arguments = sys.argv[1:]
    first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    if fault != "none" and (first or not fault.startswith("once ")):
        go_wrong(fault.removeprefix("once "), int(rank), Path(arguments[0]).with_name("fault"))
    sys.argv = ["rlt-dist", "train", *arguments]
    main()
