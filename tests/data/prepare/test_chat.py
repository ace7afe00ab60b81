"""Conversations: the template, what of it is to be predicted, and lines that are none."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rlt_dist.cli.data import data_app
from rlt_dist.data.corpus.index import CorpusIndex, load_corpus
from rlt_dist.data.corpus.shard import tokens_and_labels, unscored
from rlt_dist.data.prepare.chat import encode_conversations, render
from rlt_dist.data.prepare.inputs import InputOptions
from rlt_dist.data.prepare.prepare import prepare_corpus
from rlt_dist.data.tokenizers.raw_bytes import BytesTokenizer
from rlt_dist.data.tokenizers.subwords import BPETokenizer, train_subwords
from rlt_dist.data.tokenizers.tokenizer import Tokenizer
from rlt_dist.data.tokenizers.words import WordsTokenizer
from rlt_dist.util.errors import UserError

ASKED = [("system", "Be brief."), ("user", "What is\ncarried?"), ("assistant", "The state.")]
MORE = [*ASKED, ("user", ""), ("assistant", "It is naïve <|user|>\n文字"), ("user", "Why?")]

BPE = train_subwords(BPETokenizer, [b"What is carried? The state is carried.\n" * 40], 280)


def record(messages: list[tuple[str, str]]) -> dict[str, Any]:
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def write(path: Path, *conversations: list[tuple[str, str]]) -> Path:
    path.write_text("".join(json.dumps(record(each)) + "\n" for each in conversations))
    return path


def plainly(messages: list[tuple[str, str]], tokenizer: Tokenizer) -> list[tuple[int, bool]]:
    """Every token with whether it is to be predicted."""
    found = []
    for role, content in messages:
        found += [(id, False) for id in tokenizer.encode(f"<|{role}|>\n".encode()).tolist()]
        said = [*tokenizer.encode(content.encode()).tolist(), tokenizer.end_of_text]
        found += [(id, role == "assistant") for id in said]
    return found


messages = st.lists(
    st.tuples(st.sampled_from(["system", "user", "assistant"]), st.text(max_size=8)), max_size=4
)


@settings(max_examples=30)
@given(
    before=st.lists(messages, max_size=2),
    tokenizer=st.sampled_from([BytesTokenizer(), BPE]),
)
def test_an_assistants_words_and_their_end_are_to_be_predicted_and_nothing_else(
    before: list[list[tuple[str, str]]], tokenizer: Tokenizer
) -> None:
    conversations = [*([*each, ("assistant", "a")] for each in before), MORE, ASKED]
    encoded = encode_conversations([render(record(each)) for each in conversations], tokenizer)
    assert encoded.labels is not None
    first = 0
    for talk, length, size in zip(conversations, encoded.lengths, encoded.bytes, strict=True):
        expected = plainly(talk, tokenizer)
        part = slice(first, first + length)
        ids, scored = zip(*expected, strict=True)
        assert encoded.ids[part].tolist() == list(ids[:-1])
        wanted = [id if is_said else -1 for id, is_said in expected[1:]]
        assert encoded.labels[part].tolist() == wanted
        assert any(scored)
        assert size == tokenizer.byte_lengths()[list(ids)].sum()
        first += length


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    BytesTokenizer().save(tmp_path / "tokenizer.json")
    return tmp_path / "tokenizer.json"


def prepare(folder: Path, source: Path, tokenizer: Path, **more: Any) -> CorpusIndex:
    options = InputOptions(format="chat", **more)
    return prepare_corpus([source], folder, tokenizer, options=options, shares={"train": 1}).corpus


def test_a_file_of_conversations_becomes_a_labelled_corpus(tmp_path: Path, tokenizer: Path) -> None:
    source = write(tmp_path / "talks.jsonl", ASKED, MORE)
    source.write_text(source.read_text() + "\n")
    arguments = ["--input", source, "--output", tmp_path / "out", "--tokenizer", tokenizer]
    shares = ["--train", "1", "--validation", "0", "--test", "0", "--workers", "1"]
    result = CliRunner().invoke(
        data_app, ["prepare", "--format", "chat", *map(str, arguments), *shares]
    )
    assert result.exit_code == 0, result.output
    assert "1 empty documents" in result.output
    train = load_corpus(tmp_path / "out").split("train")
    assert (train.labelled, train.documents) == (True, 2)
    for document, talk in zip(train.shards[0].read(0, 2), (ASKED, MORE), strict=True):
        tokens, labels = tokens_and_labels(document)
        assert labels is not None
        expected = plainly(talk, BytesTokenizer())
        nothing = unscored(labels.dtype)
        assert tokens.tolist() == [id for id, _ in expected]
        assert labels.tolist() == [
            *(i if is_said else nothing for i, is_said in expected[1:]),
            nothing,
        ]
    assert CliRunner().invoke(data_app, ["verify", str(tmp_path / "out")]).exit_code == 0
    again = CliRunner().invoke(
        data_app, ["prepare", "--format", "chat", *map(str, arguments), *shares]
    )
    assert "was finished before" in again.output


def test_texts_and_conversations_are_not_mistaken_for_each_other(
    tmp_path: Path, tokenizer: Path
) -> None:
    source = write(tmp_path / "talks.jsonl", ASKED)
    prepare(tmp_path / "out", source, tokenizer)
    with pytest.raises(UserError, match="format was 'chat', now 'text'"):
        prepare_corpus([source], tmp_path / "out", tokenizer, shares={"train": 1})


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ({"text": "a"}, 'has no list "messages"'),
        ({"messages": []}, "has no message of the assistant"),
        (record([("user", "a")]), "has no message of the assistant"),
        (record([("user", "a"), ("tool", "b")]), "message 2 has role 'tool'"),
        ({"messages": ["a"]}, "message 1 has role None"),
        ({"messages": [{"role": "user", "content": None}]}, 'message 1 has no string "content"'),
        (record([("assistant", "\ud800")]), "holds half a character"),
        (record([("assistant", "a" * 90)]), "is a conversation of 105 bytes, and is not cut"),
    ],
)
def test_a_line_that_is_no_conversation_is_named(
    tmp_path: Path, tokenizer: Path, line: dict[str, Any], what: str
) -> None:
    source = write(tmp_path / "talks.jsonl", ASKED)
    source.write_text(source.read_text() + json.dumps(line) + "\n")
    with pytest.raises(UserError, match=r"talks\.jsonl:2: ") as raised:
        prepare(tmp_path / "out", source, tokenizer, longest=100)
    assert what in str(raised.value)


@pytest.mark.parametrize("encoding", ["latin-1", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
def test_a_file_that_is_not_utf8_is_to_be_converted(
    tmp_path: Path, tokenizer: Path, encoding: str
) -> None:
    said = "naïve" if encoding == "latin-1" else "naive"
    line = json.dumps(record([("assistant", said)]), ensure_ascii=False) + "\n"
    (tmp_path / "talks.jsonl").write_bytes(line.encode(encoding))
    with pytest.raises(UserError, match=r"talks\.jsonl.*; convert (it|the file) to UTF-8"):
        prepare(tmp_path / "out", tmp_path / "talks.jsonl", tokenizer)
    with pytest.raises(UserError, match=r"talks\.jsonl:1: .* convert the file to UTF-8"):
        prepare(tmp_path / "out", tmp_path / "talks.jsonl", tokenizer, allow_binary=True)


def test_what_cannot_hold_or_keep_a_conversation_is_refused(
    tmp_path: Path, tokenizer: Path
) -> None:
    talks, text = write(tmp_path / "talks.jsonl", ASKED), tmp_path / "text.txt"
    text.write_text("a text\n")
    recipe, words = tmp_path / "bytes.yaml", tmp_path / "words.json"
    recipe.write_text("kind: bytes\n")
    WordsTokenizer([b"a"]).save(words)
    for source, made_by, what in (
        (text, tokenizer, "is no file of JSON lines"),
        (talks, recipe, "is a recipe"),
        (talks, words, "does not keep every text"),
    ):
        with pytest.raises(UserError, match=what):
            prepare(tmp_path / "out", source, made_by)
    assert not (tmp_path / "out").exists()
