"""A folder's lock; tests/jobs/test_status.py has who only looks at it."""

from pathlib import Path
from typing import Any

import pytest

from rlt_dist.util import lock


def test_who_waited_for_a_lock_that_was_removed_does_not_hold_that_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two would: the next one makes a file of the same name."""
    takes, removed = lock._takes, []

    def take_late(file: Any) -> bool:
        if not removed:  # whoever held it takes it away with him
            removed.append((tmp_path / lock.LOCK).unlink())
        return takes(file)

    monkeypatch.setattr(lock, "_takes", take_late)
    with lock.locked(tmp_path, "trains"):
        assert (lock.holder(tmp_path) or "").endswith("trains here")
    assert removed
