"""Tokenizers return every byte, never end a document by accident, and are the same every time."""

import json
import random
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.config.load import load_typed
from rlt_dist.data.tokenizers.raw_bytes import BytesTokenizer
from rlt_dist.data.tokenizers.recipe import Recipe
from rlt_dist.data.tokenizers.round_trip import HARD_TEXTS, check_round_trip
from rlt_dist.data.tokenizers.sample import PASSAGE_BYTES, draw, read_passages
from rlt_dist.data.tokenizers.tokenizer import Tokenizer, load_tokenizer, train_tokenizer
from rlt_dist.util.errors import UserError

ROOT = Path(__file__).parents[3]
RECIPES = {
    "bpe": Recipe(kind="bpe", vocabulary=500),
    "unigram": Recipe(kind="unigram", vocabulary=500),
    "bytes": Recipe(kind="bytes"),
    "words": Recipe(kind="words", vocabulary=200, lossless=False),
}
LOSSLESS = ["bpe", "unigram", "bytes"]
LEARNED = ["bpe", "unigram", "words"]


@cache
def corpus() -> list[bytes]:
    """This project's own source, with bytes that sentencepiece would refuse to train on."""
    sources = [path.read_bytes() for path in sorted((ROOT / "rlt_dist" / "data").rglob("*.py"))]
    return [*sources, *HARD_TEXTS]


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    return {kind: train_tokenizer(recipe, corpus()) for kind, recipe in RECIPES.items()}


def assert_round_trip(tokenizer: Tokenizer, text: bytes) -> None:
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.end_of_text not in ids
    assert tokenizer.byte_lengths()[ids].sum() == len(text)


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_hard_text_round_trips(tokenizers: dict[str, Tokenizer], kind: str, text: bytes) -> None:
    assert_round_trip(tokenizers[kind], text)


@pytest.mark.parametrize("kind", LOSSLESS)
@settings(max_examples=150, deadline=None)
@given(text=st.binary() | st.text().map(str.encode))
def test_any_bytes_round_trip(tokenizers: dict[str, Tokenizer], kind: str, text: bytes) -> None:
    assert_round_trip(tokenizers[kind], text)


@pytest.mark.parametrize("kind", RECIPES)
@settings(max_examples=40, deadline=None)
@given(
    texts=st.lists(
        st.sampled_from(HARD_TEXTS)
        | st.binary()
        | st.text().map(str.encode)
        | st.sampled_from([b"many words " * 999, "文".encode() * 30_000, b"\xe2\x96" * 3000]),
        max_size=8,
    )
)
def test_many_texts_are_encoded_as_one_by_one(
    tokenizers: dict[str, Tokenizer], kind: str, texts: list[bytes]
) -> None:
    tokenizer = tokenizers[kind]
    ids, lengths = tokenizer.encode_many(texts)
    assert (ids.dtype, lengths.dtype) == (np.int32, np.int64)
    parts = np.split(ids, np.cumsum(lengths))
    assert [part.tolist() for part in parts] == [
        *(tokenizer.encode(text).tolist() for text in texts),
        [],
    ]


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_every_character_round_trips(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    every = (chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    assert_round_trip(tokenizers[kind], "a".join(every).encode())


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("text", [b"<|endoftext|>", b"</s>", b"<unk> <0x0A>", b""])
def test_special_strings_are_ordinary_text(
    tokenizers: dict[str, Tokenizer], kind: str, text: bytes
) -> None:
    assert tokenizers[kind].end_of_text not in tokenizers[kind].encode(text)


@pytest.mark.parametrize("kind", RECIPES)
def test_end_of_text_stands_for_no_bytes(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    tokenizer = tokenizers[kind]
    lengths = tokenizer.byte_lengths()
    assert lengths.shape == (tokenizer.vocabulary,) and lengths.dtype == np.int64
    assert lengths[tokenizer.end_of_text] == 0
    assert tokenizer.decode([tokenizer.end_of_text]) == b""
    assert tokenizer.vocabulary == RECIPES[kind].size


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("wrong", [-1, 500])
def test_an_id_outside_the_vocabulary_is_refused(
    tokenizers: dict[str, Tokenizer], kind: str, wrong: int
) -> None:
    with pytest.raises(ValueError, match="ids must lie in"):
        tokenizers[kind].decode(np.array([0, wrong]))


def test_code_indents_and_newlines_are_learned() -> None:
    lines = b"def f(x):\n        if x:\n                return (x)\n\n\n" * 50
    tokenizer = train_tokenizer(Recipe(kind="bpe", vocabulary=300), [lines])
    assert len(tokenizer.encode(b"        ")) == 1
    assert len(tokenizer.encode(b"):\n")) == 1


@pytest.mark.parametrize("kind", LOSSLESS)
def test_a_large_document_is_encoded_in_linear_time(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    prose = b"".join(corpus())
    noise = random.Random(0).randbytes(100_000)
    wordless = b"ab" * 200_000 + b" " * 200_000
    text = prose * 5 + noise + wordless
    tokenizer = tokenizers[kind]
    tokenizer.encode(text[:1000])
    start = time.perf_counter()
    ids = tokenizer.encode(text)
    assert time.perf_counter() - start < 10  # seconds; quadratic code takes minutes
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_cutting_a_long_text_does_not_change_its_ids(
    tokenizers: dict[str, Tokenizer], kind: str
) -> None:
    text = b"for every   place  in text:\n    print(place)\n" * 2000
    whole = tokenizers[kind]._processor.encode(text.decode())  # type: ignore[attr-defined]
    assert tokenizers[kind].encode(text).tolist() == whole


@pytest.mark.parametrize("kind", RECIPES)
def test_training_twice_gives_the_same_hash(tokenizers: dict[str, Tokenizer], kind: str) -> None:
    again = train_tokenizer(RECIPES[kind], iter(corpus()))
    assert again.hash == tokenizers[kind].hash
    assert len({tokenizer.hash for tokenizer in tokenizers.values()}) == len(RECIPES)


@pytest.mark.parametrize("kind", RECIPES)
def test_a_saved_tokenizer_comes_back(
    tokenizers: dict[str, Tokenizer], kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizers[kind].save(path)
    loaded = load_tokenizer(path)
    text = b"def f(x):\n    return x  # \xff\n"
    assert loaded.hash == tokenizers[kind].hash
    assert loaded.encode(text).tolist() == tokenizers[kind].encode(text).tolist()
    assert (loaded.lossless, loaded.ranked) == (kind != "words", kind == "words")
    assert loaded.end_of_text == tokenizers[kind].end_of_text
    assert loaded.byte_lengths().tolist() == tokenizers[kind].byte_lengths().tolist()


def test_training_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    train_tokenizer(RECIPES["bpe"], corpus())
    with pytest.raises(UserError):
        train_tokenizer(RECIPES["bpe"], [b"x"])
    assert capfd.readouterr() == ("", "")


# Refusals


@pytest.mark.parametrize("kind", LEARNED)
@pytest.mark.parametrize("texts", [[], [b"", b""]])
def test_an_empty_corpus_is_refused(kind: str, texts: list[bytes]) -> None:
    with pytest.raises(UserError, match="corpus is empty"):
        train_tokenizer(RECIPES[kind], texts)


@pytest.mark.parametrize("kind", LEARNED)
def test_too_little_text_names_the_largest_vocabulary(kind: str) -> None:
    texts = [b"the cat sat on the mat, the other cat did not\n" * 3]
    recipe = RECIPES[kind].model_copy(update={"vocabulary": 4096})
    with pytest.raises(UserError, match="largest possible is") as refusal:
        train_tokenizer(recipe, texts)
    largest = int(str(refusal.value).split("possible is ")[1].split(";")[0])
    fitting = recipe.model_copy(update={"vocabulary": largest})
    assert train_tokenizer(fitting, texts).vocabulary == largest


def test_too_small_a_vocabulary_names_the_smallest() -> None:
    with pytest.raises(UserError, match="need at least 284"):
        train_tokenizer(Recipe(kind="bpe", vocabulary=260), [b"abcdefghijklmnopqrstuvwxyz"])


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
@pytest.mark.parametrize("text", [b"\xff\xfe\xfd", b"\n", b"\0"])
def test_a_corpus_with_nothing_to_learn_is_refused(kind: str, text: bytes) -> None:
    with pytest.raises(UserError, match="no text to learn subwords from"):
        train_tokenizer(RECIPES[kind], [text])


def test_a_corpus_of_spaces_is_refused_by_unigram() -> None:
    with pytest.raises(UserError, match="no text to learn subwords from"):
        train_tokenizer(Recipe(kind="unigram", vocabulary=262), [b" " * 50])


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_spaces_survive_a_corpus_without_any(kind: str) -> None:
    recipe = RECIPES[kind].model_copy(update={"vocabulary": 262})
    tokenizer = train_tokenizer(recipe, [b"ababcabab" * 9])
    assert_round_trip(tokenizer, b" a  b ")


class Collapsing(BytesTokenizer):
    """The known fault: runs of spaces come back as one."""

    def encode(self, text: bytes) -> np.ndarray:
        return super().encode(text.replace(b"  ", b" "))


class Truncating(BytesTokenizer):
    """The last byte of a text is lost."""

    def decode(self, ids: Sequence[int] | np.ndarray) -> bytes:
        return super().decode(ids)[:-1]


@pytest.mark.parametrize(
    ("lossy", "shown"),
    [
        (Collapsing(), "at byte 5: b'keep  this' became b'keep this'"),
        (Truncating(), "at byte 9: b'keep  this' became b'keep  thi'"),
    ],
)
def test_a_lossy_tokenizer_is_refused(lossy: Tokenizer, shown: str) -> None:
    with pytest.raises(UserError, match="declared lossless") as refusal:
        check_round_trip(lossy, [b"", b"keep  this"])
    assert shown in str(refusal.value)


def test_a_tokenizer_that_writes_end_of_text_is_refused() -> None:
    tokenizer = BytesTokenizer()
    tokenizer.end_of_text = ord("<")
    with pytest.raises(UserError, match="end-of-text"):
        check_round_trip(tokenizer, [b"a", b"<"])


def test_files_that_are_no_tokenizer_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    with pytest.raises(UserError, match="no such file"):
        load_tokenizer(path)
    for foreign in (b"", b"\xff\0", b"[1]", b'{"kind": "bpe"}', b"[" * 100_000):
        path.write_bytes(foreign)
        with pytest.raises(UserError, match="not a tokenizer file"):
            load_tokenizer(path)


@pytest.mark.parametrize("kind", LEARNED)
def test_a_damaged_file_is_refused(
    tokenizers: dict[str, Tokenizer], kind: str, tmp_path: Path
) -> None:
    path = tmp_path / "tokenizer.json"
    tokenizers[kind].save(path)
    content = json.loads(path.read_bytes())
    key = "words" if kind == "words" else "model"
    path.write_text(json.dumps({**content, key: content[key][1:]}))
    with pytest.raises(UserError, match="is damaged"):
        load_tokenizer(path)
    path.write_text(json.dumps({**content, "version": 99}))
    with pytest.raises(UserError, match="train it again"):
        load_tokenizer(path)


# Words


def test_words_are_ranked_and_newlines_kept() -> None:
    recipe = Recipe(kind="words", vocabulary=6, lossless=False)
    tokenizer = train_tokenizer(recipe, [b"b a\na  c\n", b"a b c d \xff <unk>"])
    assert tokenizer.ranked and not tokenizer.lossless
    ids = tokenizer.encode(b" a  b c\nzebra\t<unk>\n\na")
    assert ids.tolist() == [3, 4, 5, 2, 1, 1, 2, 2, 3]
    assert tokenizer.decode([*ids, 0]) == b"a b c\n<unk> <unk>\n\na"
    assert tokenizer.byte_lengths().tolist() == [0, 0, 1, 1, 1, 1]


# Recipes


@pytest.mark.parametrize("kind", RECIPES)
def test_the_shipped_recipes_load(kind: str) -> None:
    assert load_typed(ROOT / "tokenizer" / f"{kind}.yaml", Recipe).kind == kind


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("kind: bpe", "needs the key 'vocabulary'"),
        ("kind: bpe\nvocabulary: 258", "needs at least 259"),
        ("kind: bpe\nvocabulary: 999\nlossless: false", "is lossless; take"),
        ("kind: bpe\nvocabulary: 99999999999999", "vocabulary: Input should be less than or equal"),
        ("kind: words\nvocabulary: 999", "write 'lossless: false'"),
        ("kind: bytes\nvocabulary: 256", "has 257 ids"),
        ("kind: bytes\ntraining_bytes: 99999", "learns nothing"),
        ("kind: bpe\nvocabluary: 999", "did you mean 'vocabulary'"),
    ],
)
def test_recipes_that_contradict_themselves(tmp_path: Path, lines: str, message: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(lines)
    with pytest.raises(UserError, match=r"recipe\.yaml") as refusal:
        load_typed(path, Recipe)
    assert message in str(refusal.value)


# The training sample


def sample(texts: Sequence[bytes], limit: int, parts: int = 1) -> list[bytes]:
    """The sample of `texts`, whose sizes come in so many parts."""
    sizes = np.array([len(text) for text in texts])
    places = np.array_split(np.arange(len(texts)), parts)
    drawn = draw(((place, sizes[place]) for place in places), limit)
    assert drawn["bytes"].sum() <= limit
    chosen = [texts[document] for document in np.unique(drawn["document"])]
    return list(read_passages(drawn, chosen))


def test_the_sample_is_bounded_spread_and_repeatable() -> None:
    texts = [bytes([value]) * 1000 for value in range(200)]
    chosen = sample(texts, 50_000)
    assert sum(map(len, chosen)) == 50_000
    assert chosen == sample(texts, 50_000, parts=7) == sorted(chosen)
    assert 10 < sum(text < texts[100] for text in chosen) < 40
    assert sample(texts, 1 << 20) == texts


def test_long_texts_are_sampled_in_passages_of_their_own() -> None:
    long = random.Random(0).randbytes(20 * PASSAGE_BYTES + 7)
    texts = [b"first", long, b"last"]
    assert sample(texts, 1 << 30) == texts
    chosen = sample(texts, 5 * PASSAGE_BYTES)
    assert 4 * PASSAGE_BYTES <= sum(map(len, chosen)) <= 5 * PASSAGE_BYTES
    places = [long.index(passage) for passage in chosen if passage not in (b"first", b"last")]
    assert len(places) > 1
    assert {place % PASSAGE_BYTES for place in places} == {0}
