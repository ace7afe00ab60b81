"""Tokenizers: train one from a recipe, save it as one file, load it again.

recipe = load_typed(Path("tokenizer/bpe.yaml"), Recipe)
tokenizer = train_tokenizer(recipe, texts)
tokenizer.save(path)
tokenizer = load_tokenizer(path)
"""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlt_dist.data.tokenizers.base import FORMAT, VERSION, Tokenizer, content_hash
from rlt_dist.data.tokenizers.raw_bytes import BytesTokenizer
from rlt_dist.data.tokenizers.recipe import Recipe
from rlt_dist.data.tokenizers.round_trip import HARD_TEXTS, check_round_trip
from rlt_dist.data.tokenizers.sample import thin
from rlt_dist.data.tokenizers.subwords import BPETokenizer, UnigramTokenizer, train_subwords
from rlt_dist.data.tokenizers.words import WordsTokenizer, train_words
from rlt_dist.util.errors import UserError

__all__ = ["Tokenizer", "load_tokenizer", "train_tokenizer"]

_KINDS: dict[str, type[Tokenizer]] = {
    kind.kind: kind for kind in (BPETokenizer, UnigramTokenizer, BytesTokenizer, WordsTokenizer)
}
_CHECKED_BYTES = 4 << 20


def train_tokenizer(recipe: Recipe, texts: Iterable[bytes]) -> Tokenizer:
    """Train a tokenizer on texts; equal texts and recipe give an equal hash.

    A lossless kind is checked on a part of what it was trained on and on texts known to be hard.

    Args:
        texts: held in memory together; `bytes`, which learns nothing, asks for none of them.

    Raises:
        UserError: there is no text, the vocabulary does not suit it, or the check fails.
    """
    if recipe.kind == "bytes":
        return BytesTokenizer()
    passages = list(filter(None, texts))
    if not passages:
        raise UserError("the corpus is empty: a tokenizer needs text to be trained on")
    tokenizer = _train(recipe, passages)
    if tokenizer.lossless:
        check_round_trip(tokenizer, [*HARD_TEXTS, *thin(passages, _CHECKED_BYTES)])
    return tokenizer


def _train(recipe: Recipe, passages: Sequence[bytes]) -> Tokenizer:
    if recipe.kind == "words":
        return train_words(passages, recipe.size)
    subwords = BPETokenizer if recipe.kind == "bpe" else UnigramTokenizer
    return train_subwords(subwords, passages, recipe.size)


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer that `save` wrote.

    Raises:
        UserError: the file is missing, damaged, or something else than a tokenizer.
    """
    if not path.is_file():
        raise UserError(f"{path}: no such file; give the path of a saved tokenizer")
    return parse_tokenizer(path.read_bytes(), str(path))


def parse_tokenizer(text: bytes, path: str) -> Tokenizer:
    """The tokenizer that `save` wrote as `text`.

    Args:
        path: where it lies, for messages.

    Raises:
        UserError: it is damaged, or something else than a tokenizer.
    """
    content = _read_content(text, path)
    kind = _KINDS.get(str(content.get("kind")))
    if kind is None or content.get("version") != VERSION:
        raise UserError(
            f"{path}: holds a tokenizer of kind {content.get('kind')!r}, version "
            f"{content.get('version')!r}, which this release cannot read; train it again"
        )
    if content_hash(content) != content.get("hash"):
        raise UserError(f"{path}: is damaged, its hash does not match; copy or train it again")
    return kind.restore(content)


def _read_content(text: bytes, path: str) -> dict[str, Any]:
    foreign = UserError(f"{path}: is not a tokenizer file; give the path of a saved tokenizer")
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):  # not JSON, or not even text
        raise foreign from None
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise foreign
    return content
