"""Which layers sit on which stage."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlt_dist.parallel.schedule.balance import balance
from rlt_dist.util.errors import UserError


@given(st.integers(1, 100), st.integers(1, 16))
def test_every_layer_sits_on_one_stage_in_order_and_stages_are_alike(layers, stages):
    if stages > layers:
        return
    cut = balance(layers, stages)
    assert [layer for stage in cut for layer in stage] == list(range(layers))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


@pytest.mark.parametrize(
    ("layers", "stages", "counts"),
    [(48, 4, [12] * 4), (10, 4, [2, 3, 3, 2]), (5, 4, [1, 2, 1, 1]), (3, 2, [2, 1])],
)
def test_the_ends_which_hold_embedding_and_head_are_not_the_larger(layers, stages, counts):
    assert list(map(len, balance(layers, stages))) == counts


def test_more_stages_than_layers_are_refused():
    with pytest.raises(UserError, match="3 decoder layers cannot be cut over 4 pipeline stages"):
        balance(3, 4, "decoder layers")
