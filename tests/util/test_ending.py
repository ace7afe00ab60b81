"""What a job may try again, and what it would only repeat."""

import errno
import os

import pytest

from rlt_dist.data.corpus.storage import bad_shard
from rlt_dist.util.ending import how_of
from rlt_dist.util.errors import Trouble, UserError


def system(number: int) -> OSError:
    return OSError(number, os.strerror(number), "a file")


@pytest.mark.parametrize(
    ("error", "how"),
    [
        (UserError("heads 3 do not divide d_model 16"), "mistake"),
        (Trouble("step 4 could not be saved"), "failed"),
        (system(errno.ENOSPC), "failed"),
        (system(errno.EROFS), "failed"),
        (system(errno.ESTALE), "failed"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "failed"),
        (RuntimeError("a defect"), "failed"),
        (bad_shard("shard 1", system(errno.ESTALE)), "failed"),
        (bad_shard("shard 1", system(errno.ENOENT)), "mistake"),
    ],
)
def test_what_may_pass_is_no_mistake(error: Exception, how: str) -> None:
    assert how_of(error) == how


def test_the_guards_word_is_its_own() -> None:
    error = UserError("three steps in a row were skipped")
    error.guard = True
    assert how_of(error) == "guard"
