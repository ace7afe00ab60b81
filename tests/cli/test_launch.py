"""`rlt-dist launch`: mistakes are told before any rank is started."""

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["torchrun", "--processes", "2", "none.yaml"], "none.yaml: no such file"),
        (["torchrun", "--processes=2", "run.yaml", "train.stepz=3"], "train.stepz"),
        (["torchrun", "--processes=2", "--nodes=2", "run.yaml"], "--nodes and --meeting belong"),
        (
            ["torchrun", "--processes=2", "--nodes=2", "--meeting=here", "run.yaml"],
            "--meeting here: give HOST:PORT",
        ),
        (["deepspeed", "--hosts", "none", "run.yaml"], "none: no such file"),
        (["mpirun", "--processes=2", "run.yaml", "run_folder=full"], "full: holds a file, which"),
    ],
)
def test_a_mistake_is_one_error(
    configure: Any,
    command: Any,
    is_one_error: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    part: str,
) -> None:
    configure(tmp_path, "rlt1")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a file").touch()
    monkeypatch.chdir(tmp_path)
    is_one_error(command("launch", *arguments), part)
    assert not (tmp_path / "run").exists()
