"""One line of a file of JSON lines: the object it holds, and the text in that."""

import json
from typing import Any

_JSON = json.JSONDecoder()


class BadLine(Exception):
    """What is wrong with a line, in words."""


def record_of(line: bytes) -> dict[str, Any]:
    """The object that a line holds.

    Raises:
        BadLine: it holds none.
    """
    try:
        record = _parse(line)
    except UnicodeDecodeError as error:
        raise BadLine(f"is not UTF-8 (at byte {error.start}); convert the file to UTF-8") from None
    except json.JSONDecodeError as error:  # its own words would count lines within this one
        if b"\0" in line:
            raise BadLine("holds NUL bytes, as UTF-16 does; convert the file to UTF-8") from None
        at = f"{error.msg} at column {error.pos + 1}"
        raise BadLine(f"is not valid JSON ({at}); correct this line") from None
    except (ValueError, RecursionError) as error:
        raise BadLine(f"is not valid JSON ({error}); correct this line") from None
    if not isinstance(record, dict):
        raise BadLine("is not a JSON object; write one object with a text a line")
    return record


def text_of(record: dict[str, Any], field: str) -> bytes:
    """The text in a field, as UTF-8.

    Raises:
        BadLine: there is none.
    """
    if field not in record:
        known = ", ".join(map(repr, record)) or "none"
        raise BadLine(f"has no field {field!r}; name one with --text-field ({known})")
    if not isinstance(record[field], str):
        raise BadLine(f"field {field!r} is not a string; correct this line")
    return utf8_of(record[field], field)


def utf8_of(text: str, field: str) -> bytes:
    """A string as UTF-8; BadLine if it has none."""
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise BadLine(f"field {field!r} holds half a character; correct it") from None


def _parse(line: bytes) -> Any:
    """`json.loads`, which takes three times as long over a line that is one value and no more."""
    text = line.rstrip(b" \t\r").decode()
    try:
        record, end = _JSON.raw_decode(text)
        if end == len(text):
            return record
    except ValueError:
        pass
    return json.loads(text.removeprefix("\ufeff"))
