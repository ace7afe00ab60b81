"""Records as standard JSON, one object a line."""

import json
import math
from pathlib import Path
from typing import Any

from rlt_dist.util.errors import UserError
from rlt_dist.util.files import named


def to_json(record: dict[str, Any]) -> str:
    """One line; numbers that are not finite, which JSON cannot write, are null."""
    return json.dumps(_standard(record), allow_nan=False)


def _standard(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _standard(inner) for name, inner in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_records(path: Path) -> list[dict[str, Any]]:
    """The objects of a `.jsonl` file; a last line cut short by a kill is left out.

    Raises:
        UserError: a line is no JSON object.
    """
    if not path.is_file():
        return []
    *whole, _ = path.read_bytes().split(b"\n")
    return [parse_record(line, f"{path}:{number}") for number, line in enumerate(whole, 1)]


def append_record(path: Path, line: str) -> None:
    """Add one object; what a kill left of the last line is removed, as it is never read."""
    with named(path), path.open("ab+") as file:
        file.seek(0)
        _, _, torn = file.read().rpartition(b"\n")
        if torn:
            file.truncate(file.tell() - len(torn))
        file.write(f"{line}\n".encode())


def parse_record(line: bytes, where: str) -> dict[str, Any]:
    """The object of a line.

    Raises:
        UserError: it is none.
    """
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise UserError(f"{where}: is no JSON object; remove the line, or the file")
    return record
