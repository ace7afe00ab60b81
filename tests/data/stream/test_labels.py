"""Targets: the next token, unless a document says otherwise, whoever reads it and from where on."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.data.corpus.index import CorpusIndex
from rlt_dist.data.prepare.labelled import UNSCORED, write_labelled
from rlt_dist.data.stream.loader import Batch, LaneLoader
from rlt_dist.data.tokenizers.raw_bytes import BytesTokenizer

LANES, END = 2, 256


def says(token: int, place: int) -> int:
    """The label of a token at a place of its document."""
    return UNSCORED if (token + place) % 3 == 0 else (token * 7 + place) % 256


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> CorpusIndex:
    """Documents of tokens from 200 on; the other corpora's are below."""
    chance = np.random.default_rng(0)
    documents = []
    for _ in range(90):
        tokens = chance.integers(200, 256, chance.integers(1, 25))
        targets = [says(token, place) for place, token in enumerate(tokens.tolist())]
        documents.append((tokens, np.array(targets)))
    folder: Path = tmp_path_factory.mktemp("labelled") / "out"
    return write_labelled(folder, BytesTokenizer(), {"train": documents})


def read(loader: LaneLoader, segments: int) -> list[Batch]:
    with loader:
        return [loader.next() for _ in range(segments)]


def expected(tokens: list[int]) -> list[int]:
    """The targets of a lane's tokens from a document's start on, without the last."""
    found, place, is_labelled = [], 0, False
    for token, following in pairwise(tokens):
        if place == 0:
            is_labelled = token >= 200
        found.append(says(token, place) if is_labelled else following)
        place += 1
        if token == END:
            found[-1], place = UNSCORED, 0
    return found


@settings(max_examples=15)
@given(
    segment=st.integers(1, 40),
    weights=st.sampled_from([(0, 1), (1, 1), (3, 1)]),
    max_document=st.sampled_from([None, 5]),
)
def test_targets_are_the_labels_where_there_are_some(
    corpus: CorpusIndex,
    labelled: CorpusIndex,
    reading_of: Callable,
    segment: int,
    weights: tuple[int, int],
    max_document: int | None,
) -> None:
    pairs = [(c, w) for c, w in zip((corpus, labelled), weights, strict=True) if w]
    reading = reading_of(*zip(*pairs, strict=True), LANES, segment, max_document=max_document)
    batches = read(LaneLoader(reading, range(LANES)), -(-300 // segment))
    assert {batch.targets.dtype for batch in batches} == {torch.int64}
    assert {batch.targets.shape for batch in batches} == {(LANES, segment)}
    tokens = torch.cat(
        [batch.tokens[:, :-1] for batch in batches] + [batches[-1].tokens[:, -1:]], 1
    )
    targets = torch.cat([batch.targets for batch in batches], 1)
    mask = torch.cat([batch.loss_mask for batch in batches], 1)
    for lane in range(LANES):
        wanted = torch.tensor(expected(tokens[lane].tolist()))
        assert torch.equal(mask[lane], wanted != UNSCORED)
        assert torch.equal(targets[lane][mask[lane]], wanted[mask[lane]])
        assert targets.min() >= 0
        assert targets.max() < 257


def test_plain_text_predicts_the_next_token(corpus: CorpusIndex, reading_of: Callable) -> None:
    for batch in read(LaneLoader(reading_of([corpus], [1], LANES, 20), range(LANES)), 10):
        assert torch.equal(batch.targets, batch.tokens[:, 1:])


def test_workers_and_cursors_give_the_same(
    corpus: CorpusIndex, labelled: CorpusIndex, reading_of: Callable, assert_same: Callable
) -> None:
    reading = reading_of([corpus, labelled], [1, 2], LANES, 16)
    here = read(LaneLoader(reading, range(LANES)), 12)
    assert_same(here, read(LaneLoader(reading, range(LANES), workers=2), 12))
    further = LaneLoader(reading, range(LANES), cursors=here[4].cursors)
    assert_same(here[5:], read(further, 7))
