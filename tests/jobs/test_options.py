"""Options of sbatch, time limits and arrays, as a person writes them."""

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.jobs.options import (
    awaited,
    grouped,
    has,
    merged,
    misplaced,
    split,
    value_of,
    without,
)
from rlt_dist.jobs.plan import seconds_of, tasks_of
from rlt_dist.util.errors import UserError

OPTIONS = st.lists(
    st.sampled_from(
        ["--qos=high", "--qos low", "-q high", "-c4", "--exclusive", "--mem=0", "--begin=now", "-H"]
    ),
    max_size=6,
)


@given(OPTIONS)
@settings(max_examples=50)
def test_no_word_is_lost_or_moved_from_its_option(options: list[str]) -> None:
    words = shlex.split(" ".join(options))
    assert [shlex.join(group) for group in grouped(words)] == options
    lasting, once = split(words)
    assert sorted((*lasting, *once)) == sorted(words)
    assert not has(lasting, "--begin", "-H")
    assert not has(once, "--qos", "-q", "-c", "--mem", "--exclusive")


@pytest.mark.parametrize("words", [["--qos=a"], ["--qos", "a"], ["-qa"], ["-q", "a"]])
def test_a_value_is_found_however_it_is_written(words: list[str]) -> None:
    assert value_of(["--qos=before", *words, "--exclusive"], "--qos", "-q") == "a"
    assert value_of(["--exclusive"], "--qos", "-q") is None


def test_what_is_given_anew_replaces_what_was() -> None:
    before = ["--time", "1:00", "--qos=high", "-c", "4"]
    assert merged(before, ["--time=2:00"]) == ("--qos=high", "-c", "4", "--time=2:00")
    assert without(before, "--time", "-c") == ("--qos=high",)


OURS = {
    "-N4": "--nodes",
    "--nodes=4": "--nodes",
    "-a0-3": "--array",
    "--arr=0-3": "--array",  # sbatch takes a beginning, too
    "--gres=gpu:8": "--gpus-per-node",
    "-G8": "--gpus-per-node",
    "--gpus=8": "--gpus-per-node",
    "--gpus-per-task=1": "--gpus-per-node",
    "--gpus-per-node=8": "--gpus-per-node",
    "--ntasks-per-node=8": "--processes-per-node",
    "--signal=USR1@30": "--lead",
    "--no-requeue": "--attempts",
    "--output=x": "rlt-dist logs",
    "-e": "rlt-dist logs",
    "--open-mode=truncate": "rlt-dist logs",
    "--wait": "rlt-dist logs",
    "--test-only": "--dry-run",
    "--wrap=true": "--template",
    "-Mfar": "from a machine of that cluster",
}


@pytest.mark.parametrize("word", OURS)
def test_what_the_job_decides_itself_is_refused_with_what_does_it(word: str) -> None:
    found = misplaced(["--qos=high", *word.split()]) or ""
    assert found.startswith(f"{word[:2] if word[1] != '-' else word.partition('=')[0]}: ")
    assert OURS[word] in found


def test_what_only_looks_like_ours_is_passed_on() -> None:
    others = ["--nodelist=n1", "-n", "4", "--ntasks=4", "--gres=disk:1", "--gpu-bind=closest"]
    assert misplaced([*others, "--cpus-per-task=8", "--wait-all-nodes=1", "--gres-flags=x"]) is None


AWAITED = {
    "afterany:1": {"1"},
    "afterok:1:2_7,afternotok:3": {"1", "2_7", "3"},
    "aftercorr:9": {"9_4"},
    "after:1+5,singleton": set(),
    "afterany:1?afterok:2": set(),  # one of them is enough
    "afterburstbuffer:1": set(),
    "": set(),
}


@pytest.mark.parametrize("dependency", AWAITED)
def test_a_job_is_awaited_only_if_its_end_is(dependency: str) -> None:
    assert awaited(dependency, 4) == AWAITED[dependency]


LIMITS = {"30": 1800, "1:30": 90, "2:00:00": 7200, "1-0": 86400, "1-2:30": 95400, "0-0:0:5": 5}


@pytest.mark.parametrize(("limit", "seconds"), LIMITS.items())
def test_a_time_limit_is_read_as_slurm_reads_it(limit: str, seconds: int) -> None:
    assert seconds_of(limit) == seconds


@pytest.mark.parametrize("limit", ["foo", "UNLIMITED", "", "1:2:3:4"])
def test_what_is_no_limit_is_left_to_slurm(limit: str) -> None:
    assert seconds_of(limit) is None


ARRAYS = {"3": [3], "0-3": [0, 1, 2, 3], "1,5,7-8%2": [1, 5, 7, 8], "0-9:4": [0, 4, 8]}


@pytest.mark.parametrize(("array", "tasks"), ARRAYS.items())
def test_an_arrays_tasks_are_those_of_slurm(array: str, tasks: list[int]) -> None:
    assert tasks_of(array) == tasks


@pytest.mark.parametrize("array", ["", "a", "3-1", "1,1", "0-3,2", "0-3:0", "-1"])
def test_an_array_that_is_none_is_a_mistake(array: str) -> None:
    with pytest.raises(UserError, match="--array"):
        tasks_of(array)
