"""Worker processes: the same batches, whatever their number, and whatever becomes of them."""

import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.data.corpus.index import CorpusIndex, load_corpus
from rlt_dist.data.stream.loader import Batch, LaneLoader
from rlt_dist.data.stream.reading import Reading
from rlt_dist.data.stream.workers import Worker
from rlt_dist.util.errors import UserError

Same = Callable[[list[Batch], list[Batch]], None]


@pytest.fixture(scope="module")
def reading(corpus: CorpusIndex, reading_of: Callable[..., Reading]) -> Reading:
    return reading_of([corpus], [1], lanes=6, segment=50)


def workers_of(loader: LaneLoader) -> list[Worker]:
    return [source for source in loader._sources if isinstance(source, Worker)]


@pytest.mark.parametrize("workers", [1, 4, 9])
def test_batches_are_the_same_with_any_number_of_workers(
    reading: Reading, workers: int, assert_same: Same
) -> None:
    alone = LaneLoader(reading, range(1, 6))
    with LaneLoader(reading, range(1, 6), workers=workers, ahead=2) as helped:
        assert len(workers_of(helped)) == min(workers, 5)
        for _ in range(30):
            assert_same([alone.next()], [helped.next()])


def test_a_killed_worker_is_replaced_and_no_token_is_lost(
    reading: Reading, assert_same: Same
) -> None:
    alone = LaneLoader(reading, range(6))
    with LaneLoader(reading, range(6), workers=2, ahead=3) as helped:
        for step in range(40):
            process = workers_of(helped)[step % 2]._process
            if step % 7 == 1 and process.is_alive():
                os.kill(process.pid, signal.SIGKILL)
                process.join()
            assert_same([alone.next()], [helped.next()])
        skipped, notices = helped.take_notices()
    assert skipped == 0
    assert notices
    assert all("was ended by SIGKILL; another has taken its place" in line for line in notices)


class Deadly:
    """Ends the process that is sent it."""

    def __reduce__(self) -> tuple[Callable[[int], None], tuple[int]]:
        return os._exit, (9,)


def test_workers_that_die_one_after_the_other_end_it(reading: Reading) -> None:
    with LaneLoader(reading, range(6), workers=1) as helped:
        (worker,) = workers_of(helped)
        worker._reading = Deadly()
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(UserError, match="ended with code 9, as did 3 before it"):
            for _ in range(50):
                helped.next()


def test_an_error_of_a_worker_is_the_same_one_line(
    corpus: CorpusIndex, reading_of: Callable[..., Reading], tmp_path: Path
) -> None:
    shutil.copytree(corpus.location, tmp_path / "copy")
    damaged = load_corpus(tmp_path / "copy")
    for shard in damaged.split("train").shards:
        path = Path(shard.address)
        path.write_bytes(path.read_bytes().replace(b"!", b"?"))
    reading = reading_of([damaged], [1], lanes=2, segment=50)
    with (
        LaneLoader(reading, range(2), workers=1) as helped,
        pytest.raises(UserError, match=r"train-\d+.tar: is damaged, document \d+ has another"),
    ):
        for _ in range(50):
            helped.next()


def test_closing_leaves_no_process(reading: Reading) -> None:
    loader = LaneLoader(reading, range(6), workers=3)
    loader.next()
    processes = [worker._process for worker in workers_of(loader)]
    loader.close()
    assert not any(process.is_alive() for process in processes)


def test_the_server_of_processes_may_be_killed(reading: Reading, assert_same: Same) -> None:
    """It forks the workers; they live on, and another one forks those that come after."""
    alone = LaneLoader(reading, range(6))
    with LaneLoader(reading, range(6), workers=2, ahead=1) as helped:
        for step in range(12):
            if step in (2, 3, 8):
                os.kill(forkserver._forkserver._forkserver_pid, signal.SIGKILL)
            if step in (3, 4, 8):  # so one dies together with the server, another without
                # It may be dead already, and not yet missed: what it had sent is read first.
                with suppress(ProcessLookupError):
                    os.kill(workers_of(helped)[step % 2]._process.pid, signal.SIGKILL)
            assert_same([alone.next()], [helped.next()])


@pytest.mark.parametrize("error", [EOFError, BrokenPipeError])
def test_a_start_that_fails_is_tried_again_and_then_one_error(
    reading: Reading, assert_same: Same, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    """As when the server, or the worker before it has read its task, is killed in between."""
    process, failures = type(workers_of(LaneLoader(reading, range(1), workers=1))[0]._process), 1
    real = process.start

    def start(self: Any) -> None:
        nonlocal failures
        failures -= 1
        if failures >= 0:
            raise error
        real(self)

    monkeypatch.setattr(process, "start", start)
    with LaneLoader(reading, range(6), workers=1) as helped:
        assert_same([LaneLoader(reading, range(6)).next()], [helped.next()])
    failures = 9
    with pytest.raises(UserError, match="no process can be started to read ahead"):
        LaneLoader(reading, range(6), workers=1)


def test_workers_and_their_server_never_see_a_ctrl_c(reading: Reading) -> None:
    forkserver._forkserver._stop()  # the one that another test started
    with LaneLoader(reading, range(6), workers=2) as loader:
        loader.next()
        pids = [worker._process.pid for worker in workers_of(loader)]
        for pid in [*pids, forkserver._forkserver._forkserver_pid]:
            masks = dict(line.split(":\t", 1) for line in status_of(pid).splitlines())
            assert int(masks["SigBlk"], 16) & 1 << signal.SIGINT - 1
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


TRAINER = """
import pickle, sys, time
from pathlib import Path
from rlt_dist.data.corpus.storage import LocalFolder
from rlt_dist.data.stream.loader import LaneLoader

if stalls := sys.argv[2] == "stalls":
    LocalFolder.fetch = lambda *_: time.sleep(600)

if __name__ == "__main__":
    reading = pickle.loads(Path(sys.argv[1]).read_bytes())
    loader = LaneLoader(reading, range(6), workers=2)
    if not stalls:
        loader.next()
    print(*(source._process.pid for source in loader._sources), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("how", ["reads", "stalls"])
def test_workers_end_with_a_trainer_that_is_killed(
    reading: Reading, tmp_path: Path, how: str
) -> None:
    """Even those that wait for a file which does not come."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    (tmp_path / "reading").write_bytes(pickle.dumps(reading))
    command = [sys.executable, tmp_path / "trainer.py", tmp_path / "reading", how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout
        pids = [int(pid) for pid in trainer.stdout.readline().split()]
        trainer.kill()
    assert len(pids) == 2
    deadline = time.monotonic() + 60
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, "workers outlive their trainer"
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in status_of(pid)
    except FileNotFoundError:
        return False


def status_of(pid: int | None) -> str:
    return Path(f"/proc/{pid}/status").read_text()
