"""A person's mistake on one rank is known to all at once: nobody waits for ever."""

from typing import Any


def test_an_error_on_one_rank_is_raised_on_all_with_its_rank(result: Any) -> None:
    for seen in result(2, "errors")["seen"]:
        told = {"message": "rank 1: no such file on 1", "shared": True}
        assert seen["together_last"] == told
        assert seen["together_first"] == {"message": "rank 0: no such file on 0", "shared": True}


def test_without_an_error_each_rank_keeps_its_own_result(result: Any) -> None:
    assert [seen["together_none"] for seen in result(2, "errors")["seen"]] == [0, 1]


def test_the_leaders_error_and_the_leaders_result_reach_all(result: Any) -> None:
    for seen in result(2, "errors")["seen"]:
        assert seen["leader"] == {"message": "rank 0: no such file on 0", "shared": True}
        assert seen["leader_none"] == 0


def test_errors_are_known_within_seconds(result: Any) -> None:
    assert all(seen["seconds"] < 5 for seen in result(2, "errors")["seen"])
