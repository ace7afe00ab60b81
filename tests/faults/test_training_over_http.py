"""Runs on a corpus at an address: the same losses, whatever the network does meanwhile."""

from pathlib import Path
from typing import Any

import pytest

from rlt_dist.util.errors import UserError

LONG = ("data.segment=40", "train.steps=8", "data.remote.timeout=5")


def far(server: Any, folder: Path, *more: str) -> tuple[str, ...]:
    """Overrides that read the corpus from the server, with a cache in `folder`."""
    place = (f"data.path={server.address}", f"data.remote.cache={folder / 'cache'}")
    return (*LONG, *place, *more)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_over_http_is_the_run_on_the_folder(
    server: Any, driver: Any, configure: Any, tmp_path: Path, metrics: Any, workers: int
) -> None:
    driver.train(configure(tmp_path / "near", "rlt1", *LONG, "validation.every=4"))
    server.fail("train-000001.tar", ("cut", 1000))
    choices = far(server, tmp_path, f"data.workers={workers}", "validation.every=4")
    driver.train(configure(tmp_path / "far", "rlt1", *choices))
    assert metrics(tmp_path / "far" / "run") == metrics(tmp_path / "near" / "run")


def test_an_address_and_a_folder_make_a_mixture(
    server: Any,
    driver: Any,
    configure: Any,
    tmp_path: Path,
    metrics: Any,
    mixed: str,
    small_corpus: Path,
) -> None:
    driver.train(configure(tmp_path / "near", "rlt1", *LONG, "data.path=null", mixed))
    partly = mixed.replace(str(small_corpus), server.address)
    cache = f"data.remote.cache={tmp_path / 'cache'}"
    driver.train(configure(tmp_path / "far", "rlt1", *LONG, "data.path=null", partly, cache))
    assert metrics(tmp_path / "far" / "run") == metrics(tmp_path / "near" / "run")


def test_an_outage_is_not_skipped_as_if_it_were_damage(
    server: Any, driver: Any, configure: Any, tmp_path: Path
) -> None:
    """The run ends, and goes on later; else it would race through the corpus reading nothing."""
    server.fail("train-000002.tar", *[500] * 9)
    choices = far(server, tmp_path, "data.skip_bad_shards=true", "data.remote.attempts=1")
    with pytest.raises(UserError, match=r"train-000002.tar: cannot be read \(HTTP 500"):
        driver.train(configure(tmp_path, "rlt1", *choices))


def test_what_is_missing_at_the_source_may_be_skipped(
    server: Any, driver: Any, configure: Any, tmp_path: Path, metrics: Any
) -> None:
    server.fail("train-000002.tar", *[404] * 99)
    driver.train(configure(tmp_path, "rlt1", *far(server, tmp_path, "data.skip_bad_shards=true")))
    assert sum(record["skipped_documents"] for record in metrics(tmp_path / "run")) > 0


def test_a_trained_run_is_evaluated_with_its_own_cache(
    server: Any,
    driver: Any,
    configure: Any,
    tmp_path: Path,
    command: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    driver.train(configure(tmp_path, "rlt1", *far(server, tmp_path)))
    code, out, err = command("eval", tmp_path / "run", "--json")
    assert code == 0, err
    assert server.address in out
    assert not (tmp_path / "home").exists()
