"""Many starts of the command, killed or not; disks that are small; a server that fails as told."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.data.corpus.index import CorpusIndex, load_corpus
from rlt_dist.data.corpus.storage import RemoteOptions

HERE = Path(__file__).parent
_spec = importlib.util.spec_from_file_location("server", HERE / "server.py")
_module = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_module)

Starts = Callable[[Path, list[tuple[Path, dict[str, Any] | None]]], list[dict[str, Any]]]
MountSmall = Callable[[Path, str], None]


@pytest.fixture(scope="session")
def starts() -> Starts:
    """`starts(folder, [(run's folder, kill), ...])`: what became of each (see killer.py)."""

    def run(folder: Path, wished: list[tuple[Path, dict[str, Any] | None]]) -> list[dict[str, Any]]:
        plan, results = folder / "plan.json", folder / "results.json"
        plan.write_text(
            json.dumps([{"config": str(run / "run.yaml"), "kill": kill} for run, kill in wished])
        )
        done = subprocess.run(
            [sys.executable, str(HERE / "killer.py"), str(plan), str(results)],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=280,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(results.read_text())

    return run


def _fails(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode != 0


@pytest.fixture
def mount_small() -> Iterator[MountSmall]:
    """`mount_small(folder, "200k")`: make a folder that is a file system of this size."""
    mounted: list[Path] = []

    def mount(folder: Path, size: str) -> None:
        folder.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if os.geteuid() != 0 or _fails(command):
            pytest.skip("mounting a file system is not allowed here")
        mounted.append(folder)

    yield mount
    for folder in mounted:
        subprocess.run(["umount", str(folder)], check=True, timeout=20)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@pytest.fixture
def server(small_corpus: Path) -> Iterator[Any]:
    server = _module.Server(small_corpus)
    yield server
    server.stop()


@pytest.fixture
def options(tmp_path: Path) -> RemoteOptions:
    return RemoteOptions(cache=tmp_path / "cache", attempts=3, timeout=20, first_wait=0.01)


@pytest.fixture
def local(small_corpus: Path) -> CorpusIndex:
    return load_corpus(small_corpus)
