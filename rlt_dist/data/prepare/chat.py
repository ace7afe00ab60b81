"""Conversations, for fine-tuning: one JSON object a line, and the template that makes it tokens.

    {"messages": [{"role": "user", "content": "What is carried?"},
                  {"role": "assistant", "content": "The state."}]}

becomes one document,

    <|user|>
    What is carried?<end-of-text><|assistant|>
    The state.<end-of-text>

Every message is its role's mark and a newline, the content as it is, and an end-of-text token. No
text encodes to that token, so a mark counts only at the start and behind one: nothing that is
written inside a message ends it or begins another. The marks are plain text and use whatever
tokenizer the model was trained with.

What is to be predicted is an assistant's content and the end-of-text behind it. All else, marks
included, is context: it is read, changes the state, and is not scored.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlt_dist.data.prepare.encode import UNSCORED, Encoded
from rlt_dist.data.prepare.json_lines import BadLine, utf8_of
from rlt_dist.data.tokenizers.tokenizer import Tokenizer

MARKS = {role: f"<|{role}|>\n".encode() for role in ("system", "user", "assistant")}
"""What a message begins with, by role; it is encoded apart from the content."""

_ANSWER = MARKS["assistant"]
_END = b"\xff"
"""Stands for end-of-text until there are tokens: no UTF-8 has this byte."""


def render(record: dict[str, Any]) -> bytes:
    """A line's conversation by the template, 0xFF in the place of each end-of-text.

    Raises:
        BadLine: it is no conversation, or has nothing to learn from.
    """
    messages = record.get("messages")
    if not isinstance(messages, list):
        raise BadLine(
            'has no list "messages"; write {"messages": [{"role": "user", "content": "..."}, ...]}'
        )
    parts = [_render_message(message, place) for place, message in enumerate(messages, 1)]
    if not any(part.startswith(_ANSWER) for part in parts):
        raise BadLine("has no message of the assistant, so nothing to learn; leave it out")
    return b"".join(parts)


def _render_message(message: Any, place: int) -> bytes:
    role, content = (
        (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    )
    if not isinstance(role, str) or role not in MARKS:
        known = ", ".join(map(repr, MARKS))
        raise BadLine(f"message {place} has role {role!r}; it must be one of {known}")
    if not isinstance(content, str):
        raise BadLine(f'message {place} has no string "content"; correct this line')
    return MARKS[role] + utf8_of(content, "content") + _END


def encode_conversations(texts: Sequence[bytes], tokenizer: Tokenizer) -> Encoded:
    """What `render` gave, as documents: the last message's end-of-text is left out of each."""
    documents = [_encode(text, tokenizer) for text in texts]
    ids = [each for each, _ in documents]
    return Encoded(
        ids=np.concatenate(ids),
        lengths=np.array([len(each) for each in ids], np.int64),
        bytes=np.array([len(text) - text.count(_END) for text in texts], np.int64),
        labels=np.concatenate([labels for _, labels in documents]),
    )


def _encode(text: bytes, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """A conversation's ids and labels, int [n]."""
    end = np.array([tokenizer.end_of_text])
    parts: list[np.ndarray] = []
    scored: list[np.ndarray] = []
    for message in text.split(_END)[:-1]:
        mark, newline, content = message.partition(b"\n")
        # Apart from each other, or a token might be half mark and half answer.
        context, answer = tokenizer.encode(mark + newline), tokenizer.encode(content)
        parts += [context, answer, end]
        learnt = mark + newline == _ANSWER
        scored += [np.zeros(len(context), bool), np.full(len(answer) + 1, learnt)]
    ids, is_target = np.concatenate(parts), np.concatenate(scored)
    labels = np.where(is_target[1:], ids[1:], UNSCORED)
    return ids[:-1], labels
