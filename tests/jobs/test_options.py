"""Options of sbatch, time limits and arrays, as a person writes them."""

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.jobs.options import grouped, has, merged, misplaced, split, value_of
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


@pytest.mark.parametrize("word", ["-N4", "--nodes=4", "-a0-3", "--array"])
def test_what_the_job_folders_follow_from_is_not_passed_by(word: str) -> None:
    assert misplaced(["--qos=high", word]) in ("--nodes", "--array")
    assert misplaced(["--nodelist=n1", "-n", "4"]) is None


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
