"""Cases handed to ranks on this machine through a folder, many in one launch."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree
from tempfile import mkdtemp
from typing import TypeVar

from pydantic import BaseModel

from rlt_dist.mesh.local import run_ranks, shown_on_one_rank
from rlt_dist.mesh.world import World, open_world
from rlt_dist.util.errors import UserError

_CASES = "cases.json"

C = TypeVar("C", bound=BaseModel)


@contextmanager
def kept_after_errors() -> Iterator[Path]:
    """A folder that is removed unless what the ranks printed there may be needed."""
    folder = Path(mkdtemp(prefix="rlt-dist-"))
    try:
        yield folder
    except UserError:
        raise
    except BaseException:
        rmtree(folder)
        raise
    rmtree(folder)


def launch(folder: Path, size: int, program: str, cases: Sequence[BaseModel]) -> None:
    """Run cases one after the other on as many ranks.

    Args:
        program: the ranks' module, which calls `run_cases`.

    Raises:
        UserError: a rank failed.
    """
    content = [case.model_dump(mode="json") for case in cases]
    (folder / _CASES).write_text(json.dumps(content))
    run_ranks(size, ["-m", program, str(folder)], folder / "output.txt")


def run_cases(folder: Path, kind: type[C], run: Callable[[C, World, Path], None]) -> None:
    """Run all cases that a folder holds, on as many ranks as were started."""
    with shown_on_one_rank(), open_world() as world:
        for case in json.loads((folder / _CASES).read_text()):
            run(kind.model_validate(case), world, folder)
