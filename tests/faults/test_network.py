"""A corpus on another machine: whatever the network does, right tokens or one clear error."""

import errno
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlt_dist.data.corpus.index import CorpusIndex, load_corpus
from rlt_dist.data.corpus.shard import Shard
from rlt_dist.data.corpus.storage import RemoteOptions
from rlt_dist.data.corpus.verify import verify_corpus
from rlt_dist.data.stream.loader import LaneLoader
from rlt_dist.data.stream.mixture import Share
from rlt_dist.data.stream.reading import Reading
from rlt_dist.util.errors import UserError

Server = Any
"""tests/faults/server.py."""

Fault = Any
"""What it does instead of answering, as that file says."""

ONE = "train-000001.tar"


def tokens_of(shard: Shard) -> list[int]:
    return np.concatenate(list(shard.read(0, shard.entry.documents))).tolist()


def shards_of(corpus: CorpusIndex) -> list[Shard]:
    return [shard for split in corpus.splits.values() for shard in split.shards]


def cached(options: RemoteOptions) -> set[str]:
    return {path.name for path in options.cache.iterdir()} if options.cache.exists() else set()


def test_a_corpus_over_http_is_the_same_and_is_brought_once(
    server: Server, options: RemoteOptions, local: CorpusIndex
) -> None:
    corpus = load_corpus(f"{server.address}/", options)
    assert corpus.fingerprint == local.fingerprint
    for far, near in zip(shards_of(corpus), shards_of(local), strict=True):
        assert tokens_of(far) == tokens_of(near)
    again = load_corpus(server.address, options)
    elsewhere = pickle.loads(pickle.dumps(again))
    for far, near in zip(shards_of(elsewhere), shards_of(local), strict=True):
        assert tokens_of(far) == tokens_of(near)
    names = [name for shard in shards_of(local) for name, _, _ in shard.entry.files]
    assert [len(server.gets(name)) for name in names] == [1] * len(names)
    heads = [name for method, name, _ in server.requests if method == "HEAD"]
    assert sorted(heads) == sorted(names)
    assert list(verify_corpus(again.storage)) == []


RECOVERIES: list[tuple[list[Fault], list[int]]] = [
    ([500, 503], [0, 0, 0]),
    ([429], [0, 0]),
    ([("cut", 0)], [0, 0]),
    ([("cut", 1000), ("cut", 500)], [0, 1000, 1500]),
    ([("cut", 1000), "range"], [0, 1000, 0]),
    ([("chunked", 3000)], [0, 3000]),
    ([("flip", 700)], [0, 0]),
    ([("cut", 1000), ("flip", 700)], [0, 1000]),
    ([("flip", 700), ("cut", 1000)], [0, 0, 1000]),
]


@pytest.mark.parametrize(("faults", "begins"), RECOVERIES)
def test_what_passes_is_tried_again_from_where_it_was_cut(
    server: Server,
    options: RemoteOptions,
    local: CorpusIndex,
    capfd: pytest.CaptureFixture[str],
    faults: list[Fault],
    begins: list[int],
) -> None:
    shard = load_corpus(server.address, options).split("train").shards[1]
    server.fail(ONE, *faults)
    assert tokens_of(shard) == tokens_of(local.split("train").shards[1])
    assert server.gets(ONE) == begins
    told = capfd.readouterr().err.splitlines()
    assert len(told) == len(begins) - 1
    for number, line in enumerate(told, 2):
        pattern = rf"rlt-dist: {server.address}/{ONE}: .+; attempt {number} of 3 in 0\.\d s"
        assert re.fullmatch(pattern, line)


def test_a_server_without_ranges_sends_it_all_again(
    server: Server, options: RemoteOptions, local: CorpusIndex
) -> None:
    server.ranges = False
    server.fail(ONE, ("cut", 1000), ("cut", 2000))
    shard = load_corpus(server.address, options).split("train").shards[1]
    assert tokens_of(shard) == tokens_of(local.split("train").shards[1])
    assert server.gets(ONE) == [0, 1000, 2000]


def test_a_stall_is_cut_short_and_a_slow_server_is_waited_for(
    server: Server, options: RemoteOptions, local: CorpusIndex
) -> None:
    """Slow: longer than the time-out in all, but bytes keep coming."""
    shards = load_corpus(server.address, replace(options, timeout=1)).split("train").shards
    server.fail(ONE, ("stall", 1000))
    server.fail("train-000002.tar", ("slow", 0.15))
    near = local.split("train").shards
    assert tokens_of(shards[1]) == tokens_of(near[1])
    assert tokens_of(shards[2]) == tokens_of(near[2])
    assert server.gets(ONE) == [0, 1000]
    assert server.gets("train-000002.tar") == [0]


ERRORS: list[tuple[Fault, int, str]] = [
    (404, 1, "this shard file is missing; restore it"),
    (403, 1, r"cannot be read \(HTTP 403 Forbidden\); see that the address"),
    (500, 3, r"cannot be read after 3 attempts \(HTTP 500 Internal Server Error\); see"),
    (("cut", 0), 3, r"cannot be read after 3 attempts \(cut after 0 of \d+ bytes\); see"),
    (("stall", 100), 3, r"cannot be read after 3 attempts \(no byte came in time\); see"),
    (("flip", 700), 2, "its SHA-256 is not the index's, twice: it was replaced or damaged at"),
    (("size", 3000), 1, r"holds 3000 bytes where the index says \d+; restore"),
    (("size", 300_000), 1, r"holds 300000 bytes where the index says \d+; restore"),
    (("chunked", 300_000), 1, r"holds more than the \d+ bytes that the index says; restore"),
]


@pytest.mark.parametrize(("fault", "requests", "words"), ERRORS)
def test_what_does_not_pass_is_one_error_that_names_the_shard(
    server: Server, options: RemoteOptions, fault: Fault, requests: int, words: str
) -> None:
    if fault == ("stall", 100):
        options = replace(options, timeout=0.3)
    shard = load_corpus(server.address, options).split("train").shards[1]
    _ = shard.sidecar()
    server.ranges = False
    server.fail(ONE, *[fault] * 9)
    before = cached(options)
    with pytest.raises(UserError, match=rf"^{server.address}/{ONE}: {words}[^\n]*$"):
        tokens_of(shard)
    assert len(server.gets(ONE)) == requests
    assert cached(options) == before


def test_missing_and_replaced_shards_are_found_before_anything_is_read(
    server: Server, options: RemoteOptions
) -> None:
    server.heads[ONE].append(404)
    with pytest.raises(UserError, match=rf"{server.address}/{ONE}: this shard file is missing"):
        load_corpus(server.address, options)
    server.heads[ONE].append(("size", 77))
    server.heads["train-000002.npy"].append(404)
    with pytest.raises(UserError, match=rf"{ONE}: holds 77 bytes .*; so it is with 1 more files"):
        load_corpus(server.address, options)
    server.heads[ONE].extend([500, "no-head"])
    load_corpus(server.address, options)
    assert cached(options) == set()


def test_the_index_is_read_afresh_and_with_patience(
    server: Server, options: RemoteOptions, local: CorpusIndex
) -> None:
    server.fail("index.json", 500, ("cut", 10))
    server.fail("tokenizer.json", ("cut", 10), 503)
    for _ in range(2):
        assert load_corpus(server.address, options).fingerprint == local.fingerprint
    server.fail("index.json", 404)
    with pytest.raises(UserError, match=r"index.json: no such file; give the address of a prepare"):
        load_corpus(server.address, options)


def test_a_server_that_is_not_there_is_one_error(server: Server, options: RemoteOptions) -> None:
    server.stop()
    where = rf"{server.address}/index.json: cannot be read after 3 attempts \(Connection refused\)"
    with pytest.raises(UserError, match=where):
        load_corpus(server.address, options)


def test_a_copy_that_rots_in_the_cache_is_dropped(server: Server, options: RemoteOptions) -> None:
    shard = load_corpus(server.address, options).split("train").shards[1]
    expected = tokens_of(shard)
    copy = options.cache / shard.entry.tar_sha256
    copy.write_bytes(copy.read_bytes()[:-20_000].ljust(shard.entry.tar_size, b"\1"))
    with pytest.raises(UserError, match=rf"{ONE}: is damaged, .*; its copy in the cache is remov"):
        tokens_of(shard)
    assert tokens_of(shard) == expected


# Prefetch


def test_what_is_prefetched_is_there_and_fetch_waits_for_it(
    server: Server, options: RemoteOptions, local: CorpusIndex
) -> None:
    shard = load_corpus(server.address, options).split("train").shards[1]
    server.fail(ONE, ("slow", 0.03))
    shard.prefetch()
    shard.prefetch()
    assert tokens_of(shard) == tokens_of(local.split("train").shards[1])
    assert server.gets(ONE) == [0]
    server.stop()
    assert tokens_of(shard) == tokens_of(local.split("train").shards[1])


def test_a_prefetch_that_fails_is_silent_until_the_file_is_wanted(
    server: Server, options: RemoteOptions, local: CorpusIndex
) -> None:
    shard = load_corpus(server.address, options).split("train").shards[1]
    server.fail(ONE, 403, 403)
    shard.prefetch()
    with pytest.raises(UserError, match="HTTP 403"):  # One request was the prefetch's, one ours.
        tokens_of(shard)
    assert server.gets(ONE) == [0, 0]
    assert tokens_of(shard) == tokens_of(local.split("train").shards[1])


def test_all_shards_can_be_prefetched_by_a_few_threads(
    server: Server, options: RemoteOptions, local: CorpusIndex
) -> None:
    shards = shards_of(load_corpus(server.address, options))
    before = threading.active_count()
    for shard in shards:
        shard.prefetch()
    assert threading.active_count() <= before + 4 + 4  # the server has one for each request
    for far, near in zip(shards, shards_of(local), strict=True):
        assert tokens_of(far) == tokens_of(near)
        assert len(server.gets(far.entry.tar)) == 1


# Several processes

READER = """
import os, sys, time
from pathlib import Path
from typing import Any
from rlt_dist.data.corpus.index import load_corpus
from rlt_dist.data.corpus.storage import RemoteOptions

options = RemoteOptions(cache=Path(sys.argv[2]), attempts=3, timeout=60, first_wait=0.01)
shards = load_corpus(sys.argv[1], options).split("train").shards

def read(shard):
    return b"".join(tokens.tobytes() for tokens in shard.read(0, shard.entry.documents)).hex()

"""


def start(server: Server, options: RemoteOptions, code: str) -> subprocess.Popen:
    command = [sys.executable, "-c", READER + code, server.address, str(options.cache)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, text=True, **pipes)


def output(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=50)
    assert process.returncode == 0, err
    return out.strip()


def hexadecimal(shard: Shard) -> str:
    return np.array(tokens_of(shard), np.uint16).tobytes().hex()


def test_processes_that_want_the_same_shard_bring_it_once(
    server: Server, options: RemoteOptions, local: CorpusIndex
) -> None:
    server.fail(ONE, ("slow", 0.1))
    readers = [start(server, options, "print(read(shards[1]))") for _ in range(2)]
    expected = hexadecimal(local.split("train").shards[1])
    assert [output(reader) for reader in readers] == [expected] * 2
    assert server.gets(ONE) == [0]


def test_a_killed_downloader_leaves_nothing_that_is_believed(
    server: Server, options: RemoteOptions, local: CorpusIndex
) -> None:
    """One waits for it meanwhile, and takes over."""
    server.fail(ONE, ("stall", 5000))
    killed = start(server, options, "read(shards[1])")
    assert server.stalled.acquire(timeout=50)
    waits = start(server, options, "print(read(shards[1]))")
    shard = load_corpus(server.address, options).split("train").shards[1]
    assert f"{shard.entry.tar_sha256}.partial" in cached(options)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    expected = hexadecimal(local.split("train").shards[1])
    assert output(waits) == expected
    assert hexadecimal(shard) == expected
    assert server.gets(ONE) == [0, 0]
    assert cached(options) == {shard.entry.tar_sha256, shard.entry.sidecar_sha256}


def test_a_forked_child_goes_on_when_its_parent_dies_in_a_prefetch(
    server: Server, options: RemoteOptions, local: CorpusIndex
) -> None:
    server.fail(ONE, ("stall", 5000))
    code = """
parent = os.getpid()
shards[1].prefetch()
sys.stdin.readline()
if os.fork():
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
shards[2].prefetch()
print(read(shards[1]) + read(shards[2]))
"""
    process, near = start(server, options, code), local.split("train").shards
    assert server.stalled.acquire(timeout=50)  # Else the child would be the one to stall.
    assert output(process) == hexadecimal(near[1]) + hexadecimal(near[2])


def test_a_process_ends_without_waiting_for_its_prefetches(
    server: Server, options: RemoteOptions
) -> None:
    server.fail(ONE, ("stall", 5000))
    code = "shards[1].prefetch()\nsys.stdin.readline()"
    process = start(server, options, code)
    assert server.stalled.acquire(timeout=50)
    output(process)


# The cache's room


def test_lanes_are_read_right_under_a_limit_of_one_shard(
    server: Server, options: RemoteOptions, local: CorpusIndex
) -> None:
    largest = max(shard.entry.tar_size for shard in shards_of(local))
    options = replace(options, cache_limit=largest)
    lanes, read = 3, {}

    def lane_of(corpus: CorpusIndex, lane: int) -> np.ndarray:
        reading = Reading((Share(corpus.split("train"), 1),), lanes, 100, seed=1)
        loader = LaneLoader(reading, range(lane, lane + 1))
        return np.concatenate([loader.next().tokens.numpy() for _ in range(60)], axis=1)

    def run(lane: int) -> None:
        read[lane] = lane_of(load_corpus(server.address, options), lane)

    threads = [threading.Thread(target=run, args=(lane,)) for lane in range(lanes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for lane in range(lanes):
        np.testing.assert_array_equal(read[lane], lane_of(local, lane))
    assert not [name for name in cached(options) if name.endswith(".partial")]
    assert sum(path.stat().st_size for path in options.cache.iterdir()) <= largest


def test_a_cache_that_is_emptied_meanwhile_is_filled_again(
    server: Server, options: RemoteOptions, local: CorpusIndex
) -> None:
    """Folder and all, in the midst of a transfer; what is open is read on."""
    shard = load_corpus(server.address, options).split("train").shards[1]
    server.fail(ONE, ("stall", 5000))
    found: list[list[int]] = []
    reader = threading.Thread(target=lambda: found.append(tokens_of(shard)))
    reader.start()
    assert server.stalled.acquire(timeout=50)
    shutil.rmtree(options.cache)
    server.released.set()
    reader.join()
    assert found == [tokens_of(local.split("train").shards[1])]


def test_what_is_longest_unused_goes_first_and_the_dead_with_it(
    server: Server, options: RemoteOptions
) -> None:
    shards = load_corpus(server.address, options).split("train").shards[:4]
    for shard in shards[:3]:
        tokens_of(shard)
    for age, shard in enumerate(shards[:3]):
        for _, _, name in shard.entry.files:
            os.utime(options.cache / name, (10_000 - age, 10_000 - age))
    (options.cache / f"{'0' * 64}.partial").write_bytes(b"left by a killed process")
    tokens_of(shards[0])  # now the youngest
    held = sum(path.stat().st_size for path in options.cache.iterdir())
    tight = replace(options, cache_limit=held)
    tokens_of(load_corpus(server.address, tight).split("train").shards[3])
    left = cached(options)
    assert shards[2].entry.tar_sha256 not in left
    assert {shards[0].entry.tar_sha256, shards[3].entry.tar_sha256} <= left
    assert not [name for name in left if name.endswith(".partial")]


def test_a_full_disk_gives_up_old_copies_and_else_is_one_error(
    server: Server,
    options: RemoteOptions,
    local: CorpusIndex,
    mount_small: Callable[[Path, str], None],
) -> None:
    options = replace(options, cache_limit=None)
    mount_small(options.cache, "64k")
    shards = load_corpus(server.address, options).split("train").shards
    for far, near in zip(shards, local.split("train").shards, strict=True):
        assert tokens_of(far) == tokens_of(near)
    assert len(cached(options)) < len(shards)
    for path in options.cache.iterdir():
        path.unlink()
    subprocess.run(["mount", "-o", "remount,size=8k", str(options.cache)], check=True, timeout=20)
    with pytest.raises(UserError, match=rf"{options.cache}: the disk is full; make room, choose a"):
        tokens_of(load_corpus(server.address, options).split("train").shards[1])
    assert not [name for name in cached(options) if name.endswith(".partial")]


def test_a_disk_that_fills_up_in_the_middle_is_one_error_at_once(
    server: Server, options: RemoteOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = load_corpus(server.address, options).split("train").shards[1]
    _ = shard.sidecar()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    before = cached(options)
    with pytest.raises(UserError, match=rf"^{options.cache}: the disk is full; make room, choose"):
        tokens_of(shard)
    assert server.gets(ONE) == [0]
    assert cached(options) == before


def test_a_cache_that_cannot_be_written_is_named(server: Server, options: RemoteOptions) -> None:
    options = replace(options, cache=Path("/proc/none/cache"))
    with pytest.raises(UserError, match=r"^/proc/none/cache: cannot be written .*; choose another"):
        tokens_of(load_corpus(server.address, options).split("train").shards[1])
