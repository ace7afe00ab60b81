"""Transformer-XL with an adaptive softmax over ranked words."""

from pathlib import Path
from typing import Any

import pytest

from rlt_dist.util.errors import UserError

ADAPTIVE = ("model.cutoffs=[6, 12]", "model.div_val=2", "train.precision=float32")


def test_cutoffs_are_refused_where_ids_are_not_ranked(
    driver: Any, configure: Any, tmp_path: Path
) -> None:
    config = configure(tmp_path, "xl", *ADAPTIVE)
    with pytest.raises(UserError, match="ranked by frequency") as raised:
        driver.train(config)
    assert "words.yaml" in str(raised.value)
    assert not config.run_folder.exists()


def test_on_ranked_words_it_trains_validates_and_resumes(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any, words_corpus: Path
) -> None:
    more = ("train.steps=30", "validation.every=30", "checkpoint.every=15")
    config = configure(tmp_path, "xl", *ADAPTIVE, *more, f"data.path={words_corpus}")
    driver.train(config)
    records = metrics(config.run_folder)
    assert sum(record["loss"] for record in records[-5:]) / 5 < records[0]["loss"] - 0.2
    assert "bits_per_byte" not in records[-1]["validation"]
    assert records[-1]["validation"]["loss"] > 0


def test_cutoffs_beyond_the_vocabulary_are_refused(
    driver: Any, configure: Any, tmp_path: Path, words_corpus: Path
) -> None:
    far = ("model.cutoffs=[6, 99]", f"data.path={words_corpus}")
    with pytest.raises(UserError, match="99"):
        driver.train(configure(tmp_path, "xl", *far))
