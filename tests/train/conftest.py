"""A second corpus with the same tokenizer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from rlt_dist.data.prepare.prepare import prepare_corpus


@pytest.fixture(scope="session")
def other_corpus(once: Callable[..., Path]) -> Path:
    """80 other documents, one id a byte."""

    def make(folder: Path) -> None:
        (folder / "texts").mkdir()
        for number in range(80):
            (folder / "texts" / f"{number:02}").write_text(f"another text, number {number}\n")
        (folder / "recipe.yaml").write_text("kind: bytes\n")
        shares = {"train": 0.8, "validation": 0.1, "test": 0.1}
        texts, recipe = folder / "texts", folder / "recipe.yaml"
        prepare_corpus([texts], folder / "corpus", recipe, shares=shares)

    return once("other", make) / "corpus"
