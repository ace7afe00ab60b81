"""One rule of reach, against its definition token by token."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from rlt_dist.ops.reach import newest, reach_mask, segment_positions

rows_of_starts = st.integers(1, 12).flatmap(
    lambda length: st.lists(
        st.lists(st.booleans(), min_size=length, max_size=length), min_size=1, max_size=3
    )
)


@given(starts=rows_of_starts, data=st.data())
def test_positions_count_from_the_last_document_start(starts, data):
    carried = data.draw(st.lists(st.integers(0, 10**9), min_size=len(starts), max_size=len(starts)))
    position, after = segment_positions(torch.tensor(starts), torch.tensor(carried))
    for row, begins in enumerate(starts):
        at, wanted = carried[row], []
        for begin in begins:
            at = 0 if begin else at
            wanted.append(at)
            at += 1
        assert position[row].tolist() == wanted
        assert after[row] == at


@given(starts=rows_of_starts, limit=st.none() | st.integers(0, 8), past=st.integers(0, 6))
def test_a_query_sees_its_own_document_as_far_as_the_limit(starts, limit, past):
    """The cached keys are tokens too: here they belong to the documents before the queries."""
    stream = torch.tensor([[True, *[False] * past, *row] for row in starts])[:, 1:]
    rows, length = stream.shape
    position, _ = segment_positions(stream, torch.zeros(rows, dtype=torch.int64))
    allowed = reach_mask(position[:, past:], past, limit)
    document = stream.cumsum(dim=1)
    assert allowed.shape == (rows, length - past, length)
    for row in range(rows):
        for query in range(past, length):
            for key in range(length):
                sees = key <= query and document[row, key] == document[row, query]
                sees = sees and (limit is None or query - key <= limit)
                assert bool(allowed[row, query - past, key]) == sees


@given(position=st.integers(0, 50), past=st.integers(0, 12), limit=st.none() | st.integers(0, 9))
def test_every_query_sees_itself(position, past, limit):
    allowed = reach_mask(torch.tensor([[position, position + 1]]), past, limit)
    assert allowed[0, 0, past]
    assert allowed[0, 1, past + 1]
    assert not allowed[0, 0, past + 1]


def test_unfilled_cache_entries_are_never_seen():
    allowed = reach_mask(torch.tensor([[2], [0]]), 4, None)
    assert allowed[:, 0].tolist() == [
        [False, False, True, True, True],
        [False, False, False, False, True],
    ]


def test_newest_keeps_the_last_entries():
    keys = torch.arange(5)[None, :, None]
    kept = {limit: newest(keys, limit).flatten().tolist() for limit in (None, 0, 2, 5, 9)}
    assert kept == {
        None: [0, 1, 2, 3, 4],
        0: [],
        2: [3, 4],
        5: [0, 1, 2, 3, 4],
        9: [0, 1, 2, 3, 4],
    }
