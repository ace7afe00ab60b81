"""Batches: the same lanes whoever reads them, and cursors that any number of ranks can resume."""

import pytest
import torch

from rlt_dist.data.corpus.index import CorpusIndex, SplitIndex
from rlt_dist.data.stream.lanes import Cursor
from rlt_dist.data.stream.loader import Batch, LaneLoader, lanes_of_rank
from rlt_dist.data.stream.mixture import Share
from rlt_dist.data.stream.reading import Reading
from rlt_dist.util.errors import UserError

LANES, SEGMENT = 8, 33


@pytest.fixture(scope="module")
def split(corpus: CorpusIndex) -> SplitIndex:
    return corpus.split("train")


def reading(split: SplitIndex, lanes: int = LANES) -> Reading:
    return Reading((Share(split, 1),), lanes, SEGMENT, seed=9)


def loader(split: SplitIndex, local: range = range(LANES), **options: object) -> LaneLoader:
    return LaneLoader(reading(split), local, **options)


def joined(batches: list[Batch]) -> dict[str, torch.Tensor]:
    """Batches of several ranks as one batch of all lanes."""
    return {name: torch.cat([getattr(b, name) for b in batches]) for name in vars(batches[0])}


def assert_same(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> None:
    for name in one:
        assert torch.equal(one[name], two[name]), name


def test_shapes_and_dtypes(split: SplitIndex) -> None:
    batch = loader(split, range(2, 5)).next()
    assert (batch.tokens.shape, batch.tokens.dtype) == ((3, SEGMENT + 1), torch.int64)
    assert (batch.document_start.shape, batch.document_start.dtype) == ((3, SEGMENT), torch.bool)
    assert (batch.loss_mask.shape, batch.loss_mask.dtype) == ((3, SEGMENT), torch.bool)
    assert batch.lanes.tolist() == [2, 3, 4]
    assert (batch.cursors.shape, batch.cursors.dtype) == ((3, 1, 4), torch.int64)
    assert batch.cursors[:, 0, Cursor.FIELDS.index("tokens")].tolist() == [SEGMENT] * 3


@pytest.mark.parametrize("world", [1, 2, 4, 8])
def test_lanes_are_the_same_however_they_are_sliced(split: SplitIndex, world: int) -> None:
    alone = loader(split)
    ranks = [loader(split, lanes_of_rank(LANES, rank, world)) for rank in range(world)]
    for _ in range(12):
        assert_same(joined([alone.next()]), joined([rank.next() for rank in ranks]))


@pytest.mark.parametrize(("before", "after"), [(1, 4), (4, 1), (4, 2), (2, 8)])
def test_resume_on_another_number_of_ranks(split: SplitIndex, before: int, after: int) -> None:
    ranks = [loader(split, lanes_of_rank(LANES, rank, before)) for rank in range(before)]
    for _ in range(20):
        cursors = joined([rank.next() for rank in ranks])["cursors"]
    assert cursors[:, 0, 0].max() > 0, "the test should pass an epoch's border"
    slices = [lanes_of_rank(LANES, rank, after) for rank in range(after)]
    resumed = [loader(split, lanes, cursors=cursors[list(lanes)]) for lanes in slices]
    for _ in range(5):
        old, new = joined([r.next() for r in ranks]), joined([r.next() for r in resumed])
        assert_same(old, new)


def test_lanes_of_rank_are_contiguous() -> None:
    assert [lanes_of_rank(8, rank, 2) for rank in range(2)] == [range(4), range(4, 8)]
    with pytest.raises(UserError, match="8 lanes cannot be shared equally by 3"):
        lanes_of_rank(8, 0, 3)


def test_what_does_not_fit_is_refused(split: SplitIndex) -> None:
    with pytest.raises(ValueError, match="not among the 8"):
        loader(split, range(6, 10))
    with pytest.raises(ValueError, match=r"cursors .* do not fit 8 lanes"):
        loader(split, cursors=torch.zeros(2, 1, 4, dtype=torch.int64))
    with pytest.raises(UserError, match=r"500 lanes cannot share \d+ documents"):
        LaneLoader(reading(split, 500), range(1))
