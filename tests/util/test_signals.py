"""What a process makes of the signals that ask it to stop."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, signal, sys, time
from rlt_dist.util.signals import heard
with heard() as signals:
    for name in sys.argv[1:]:
        os.kill(os.getpid(), getattr(signal, name))
        time.sleep(0.7)
    print(signals.first)
"""


@pytest.mark.parametrize(
    ("sent", "first"),
    [
        (["SIGTERM"], "SIGTERM"),
        (["SIGUSR1", "SIGTERM"], "SIGUSR1"),  # a batch system's warning, and its end
        (["SIGTERM", "SIGTERM"], None),
        (["SIGTERM", "SIGUSR1"], None),
        (["SIGUSR1", "SIGUSR1"], None),
        (["SIGUSR1", "SIGTERM", "SIGTERM"], None),
    ],
)
def test_a_second_wish_ends_at_once(sent: list[str], first: str | None) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *sent], capture_output=True, text=True, check=False
    )
    if first is None:
        assert done.returncode == 1
        assert f"a second signal, {sent[-1]}: ended at once, without saving" in done.stderr
    else:
        assert done.returncode == 0
        assert done.stdout == f"{first}\n"
