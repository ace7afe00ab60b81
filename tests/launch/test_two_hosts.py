"""Two network namespaces as two hosts: addresses of their own, and a slow link between them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PORT = 29517
ADDRESSES = ("10.231.7.1", "10.231.7.2")
LINK = ("rate", "40mbit", "burst", "32kbit", "latency", "400ms")


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], capture_output=True, timeout=20, check=True)


@pytest.fixture
def hosts() -> Iterator[tuple[str, str]]:
    """The names of two network namespaces."""
    names = tuple(f"rlt{os.getpid()}{side}" for side in "ab")
    try:
        for name in names:
            ip("netns", "add", name)
        left, right = (["type", "veth"], ["peer", "name", names[1], "netns", names[1]])
        ip("link", "add", names[0], "netns", names[0], *left, *right)
        for name, address in zip(names, ADDRESSES, strict=True):
            ip("-n", name, "address", "add", f"{address}/24", "dev", name)
            for interface in (name, "lo"):
                ip("-n", name, "link", "set", interface, "up")
            slow = ["tc", "-n", name, "qdisc", "add", "dev", name, "root", "tbf", *LINK]
            subprocess.run(slow, capture_output=True, timeout=20, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        _remove(names)
        pytest.skip(f"network namespaces cannot be made here: {error}")
    yield names
    _remove(names)


def _remove(names: tuple[str, ...]) -> None:
    """With them go their interfaces."""
    for name in names:
        subprocess.run(
            ["ip", "netns", "delete", name], capture_output=True, timeout=20, check=False
        )


def test_two_hosts_train_as_one_does(
    hosts: tuple[str, str], configure: Any, metrics: Any, tmp_path: Path
) -> None:
    """This machine's name is loopback's in both; they find the way to each other all the same."""
    here = configure(tmp_path / "here", "rlt1", "mesh.data=2")
    launch = [sys.executable, "-m", "rlt_dist", "launch", "torchrun", "--processes"]
    subprocess.run([*launch, "2", str(tmp_path / "here" / "run.yaml")], timeout=280, check=True)
    there = configure(tmp_path / "there", "rlt1", "mesh.data=2")
    options = ["1", "--nodes=2", f"--meeting={ADDRESSES[0]}:{PORT}"]
    command = [*launch, *options, str(tmp_path / "there" / "run.yaml")]
    agents = [
        subprocess.Popen(
            ["ip", "netns", "exec", host, *command],
            env={key: value for key, value in os.environ.items() if not key.startswith("GLOO")},
            stderr=subprocess.PIPE,
            text=True,
        )
        for host in hosts
    ]
    try:
        said = [agent.communicate(timeout=280)[1] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert [agent.returncode for agent in agents] == [0, 0], said
    assert metrics(there.run_folder) == metrics(here.run_folder)
