"""Grouped attention under a mask, against its definition."""

import pytest
import torch

from rlt_dist.ops.attention import attend
from rlt_dist.ops.reach import additive


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_is_a_masked_softmax_over_the_shared_heads(kv_heads):
    b, queries, keys, heads, width = 2, 3, 5, 4, 6
    query = torch.randn(b, queries, heads, width, dtype=torch.float64)
    key, value = torch.randn(2, b, keys, kv_heads, width, dtype=torch.float64)
    allowed = torch.rand(b, queries, keys) < 0.6
    allowed[..., 0] = True
    attended = attend(query, key, value, additive(allowed, query.dtype)).unflatten(
        -1, (heads, width)
    )
    for row, q, h in ((r, q, h) for r in range(b) for q in range(queries) for h in range(heads)):
        group = h * kv_heads // heads
        seen = allowed[row, q]
        weight = (key[row, seen, group] @ query[row, q, h] / width**0.5).softmax(0)
        torch.testing.assert_close(attended[row, q, h], weight @ value[row, seen, group])


def test_a_key_that_is_not_allowed_changes_no_bit():
    query, key, value = torch.randn(3, 1, 4, 2, 4)
    mask = additive(torch.ones(1, 4, 4, dtype=torch.bool).tril(), query.dtype)
    before = attend(query, key, value, mask)
    key, value = key.clone(), value.clone()
    key[:, 2], value[:, 2] = 1e3, -1e3
    after = attend(query, key, value, mask)
    assert torch.equal(before[:, :2], after[:, :2])
    assert not torch.equal(before[:, 2:], after[:, 2:])


def test_cached_entries_take_the_precision_of_the_query():
    query = torch.randn(1, 2, 2, 4, dtype=torch.bfloat16)
    key, value = torch.randn(2, 1, 3, 2, 4)
    assert attend(query, key, value, query.new_zeros(1, 2, 3)).dtype == query.dtype
