"""A person's mistake on one rank is known to all at once: nobody waits for ever."""

import re
from typing import Any


def is_shared_error_of(rank: int, told: dict[str, Any]) -> bool:
    said = re.fullmatch(rf"rank {rank} \(\S+ cpu\): no such file on {rank}", told["message"])
    return bool(said) and told["shared"]


def test_an_error_on_one_rank_is_raised_on_all_with_its_rank(result: Any) -> None:
    for seen in result(2, "errors")["seen"]:
        assert is_shared_error_of(1, seen["together_last"])
        assert is_shared_error_of(0, seen["together_first"])


def test_without_an_error_each_rank_keeps_its_own_result(result: Any) -> None:
    assert [seen["together_none"] for seen in result(2, "errors")["seen"]] == [0, 1]


def test_the_leaders_error_and_the_leaders_result_reach_all(result: Any) -> None:
    for seen in result(2, "errors")["seen"]:
        assert is_shared_error_of(0, seen["leader"])
        assert seen["leader_none"] == 0


def test_errors_are_known_within_seconds(result: Any) -> None:
    assert all(seen["seconds"] < 5 for seen in result(2, "errors")["seen"])
