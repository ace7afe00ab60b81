"""What a run reads: mixtures, worker processes, damaged shards."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.config.run import RunConfig
from rlt_dist.data.corpus.index import load_corpus
from rlt_dist.util.errors import UserError

LONG = ("data.segment=40", "train.steps=8")


@pytest.mark.parametrize("workers", [1, 4])
def test_workers_change_nothing(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any, workers: int
) -> None:
    driver.train(configure(tmp_path / "alone", "rlt1", *LONG))
    driver.train(configure(tmp_path / "helped", "rlt1", *LONG, f"data.workers={workers}"))
    assert metrics(tmp_path / "helped" / "run") == metrics(tmp_path / "alone" / "run")


def test_a_mixture_trains_validates_and_resumes(
    driver: Any, configure: Any, tmp_path: Path, metrics: Any, mixed: str
) -> None:
    choices = (*LONG, "data.path=null", mixed, "validation.every=4")
    whole = driver.train(configure(tmp_path / "whole", "rlt1", *choices)).session
    driver.train(
        configure(tmp_path / "parts", "rlt1", *choices, "train.steps=3", "schedule.warmup=2")
    )
    driver.train(configure(tmp_path / "parts", "rlt1", *choices, "data.workers=2"))
    last, again = (metrics(tmp_path / name / "run")[-1] for name in ("whole", "parts"))
    assert again["tokens"] == last["tokens"]
    assert "validation" in last
    tokens = whole.cursors[..., 3].sum(0)
    assert int(tokens.sum()) == 8 * 8 * 40
    assert float(tokens[0] / tokens.sum()) == pytest.approx(0.75, abs=0.05)


def test_other_weights_are_another_run(
    driver: Any, configure: Any, tmp_path: Path, mixed: str
) -> None:
    choices = ("data.path=null", "train.steps=2")
    driver.train(configure(tmp_path, "rlt1", *choices, mixed))
    other = mixed.replace("weight: 3", "weight: 2")
    with pytest.raises(UserError, match="was trained on another corpus"):
        driver.train(configure(tmp_path, "rlt1", *choices, other))


def test_corpora_of_two_tokenizers_are_refused(
    driver: Any, configure: Any, tmp_path: Path, small_corpus: Path, words_corpus: Path
) -> None:
    mixture = f"data.mixture=[{{path: {small_corpus}}}, {{path: {words_corpus}}}]"
    config = configure(tmp_path, "rlt1", "data.path=null", mixture)
    with pytest.raises(UserError, match=r"was made by another tokenizer than .*; prepare it again"):
        driver.train(config)


def test_one_corpus_by_two_names_is_refused(
    driver: Any, configure: Any, tmp_path: Path, small_corpus: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(small_corpus)
    for other in (small_corpus / ".." / small_corpus.name, link, f"file://{small_corpus}"):
        mixture = f"data.mixture=[{{path: {small_corpus}}}, {{path: {other}, weight: 2}}]"
        config = configure(tmp_path, "rlt1", "data.path=null", mixture)
        with pytest.raises(UserError, match=r"is the same corpus as .*; give it once, with"):
            driver.train(config)


def test_a_corpus_of_a_mixture_with_too_few_documents_is_named(
    driver: Any, configure: Any, tmp_path: Path, mixed: str, other_corpus: Path
) -> None:
    config = configure(tmp_path, "rlt1", "data.path=null", mixed, "data.lanes=96")
    with pytest.raises(
        UserError, match=rf"^{other_corpus}: split 'train': 96 lanes cannot share \d+ documents"
    ):
        driver.train(config)


@pytest.fixture
def damaged(configure: Any, small_corpus: Path, tmp_path: Path) -> RunConfig:
    """A run whose corpus has one bad document."""
    copy = Path(shutil.copytree(small_corpus, tmp_path / "corpus"))
    shard = load_corpus(copy).split("train").shards[2]
    content = bytearray(Path(shard.address).read_bytes())
    content[int(shard.sidecar()["offset"][1]) + 640] ^= 1
    Path(shard.address).write_bytes(content)
    return configure(tmp_path, "rlt1", *LONG, f"data.path={copy}")


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_shard_ends_the_run_by_name(damaged: RunConfig, driver: Any, workers: int) -> None:
    data = damaged.data.model_copy(update={"workers": workers})
    config = damaged.model_copy(update={"data": data})
    with pytest.raises(UserError, match=r"train-000002.tar: is damaged, document 1 has another"):
        driver.train(config)


def test_a_bad_shard_may_be_skipped_told_and_counted(
    damaged: RunConfig, command: Any, metrics: Any
) -> None:
    file = damaged.run_folder.parent / "run.yaml"
    code, _, told = command("train", file, "--skip-bad-shards")
    assert code == 0
    assert "train-000002.tar: is damaged, document 1 has another checksum" in told
    records = metrics(damaged.run_folder)
    assert sum(record["skipped_documents"] for record in records) > 0
