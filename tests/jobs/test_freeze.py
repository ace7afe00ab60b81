"""A job's copy of the code, and what is said of where it comes from."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlt_dist.jobs.freeze import PACKAGE, freeze, revision


def git(folder: Path, *arguments: str) -> str:
    own = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(
        ["git", *own, *arguments], cwd=folder, capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """In a repository, committed."""
    folder = tmp_path / "a clone" / "made_up"
    (folder / "inner").mkdir(parents=True)
    (folder / "__init__.py").write_text("x = 1\n")
    (folder / "inner" / "loop.cpp").write_text("int x;\n")
    (folder.parent / ".gitignore").write_text("*.so\n")
    git(folder.parent, "init", "--quiet")
    git(folder.parent, "add", ".")
    git(folder.parent, "commit", "--quiet", "--message", "one")
    return folder


def test_the_copy_is_what_was_there(package: Path, tmp_path: Path) -> None:
    (package / "__pycache__").mkdir()
    (package / "new.py").write_text("y = 1\n")
    freeze(package, tmp_path / "code")
    copied = {path.name for path in (tmp_path / "code" / "made_up").rglob("*")}
    assert copied == {"__init__.py", "inner", "loop.cpp", "new.py"}


def test_a_clean_clone_is_its_commit(package: Path) -> None:
    assert revision(package) == f"commit {git(package, 'rev-parse', 'HEAD')}\n"


def test_what_is_changed_new_staged_or_gone_is_in_the_difference(package: Path) -> None:
    (package / "__init__.py").write_text("x = 2\n")
    (package / "new.py").write_text("y = 1\n")
    (package / "staged.py").write_text("z = 1\n")
    git(package, "add", "staged.py")
    (package / "inner" / "loop.cpp").unlink()
    (package / "built.so").write_bytes(b"\0\1")
    (package.parent / "elsewhere.txt").write_text("not code\n")
    before = git(package, "status", "--porcelain")
    said = revision(package)
    assert said.startswith(f"commit {git(package, 'rev-parse', 'HEAD')}\n")
    for line in ("-x = 1", "+x = 2", "+y = 1", "+z = 1", "-int x;"):
        assert line in said.splitlines()
    assert "elsewhere" not in said
    assert "built.so" not in said
    assert git(package, "status", "--porcelain") == before


def test_the_difference_makes_the_code_again(package: Path, tmp_path: Path) -> None:
    (package / "__init__.py").write_text("x = 2\n")
    (package / "new.py").write_text("y = 1\n")
    commit, _, difference = revision(package).partition("\n")
    again = tmp_path / "again"
    git(tmp_path, "clone", "--quiet", str(package.parent), str(again))
    git(again, "checkout", "--quiet", commit.split()[1])
    (tmp_path / "diff").write_text(difference)
    git(again, "apply", str(tmp_path / "diff"))
    assert (again / "made_up" / "__init__.py").read_text() == "x = 2\n"
    assert (again / "made_up" / "new.py").read_text() == "y = 1\n"


def test_outside_a_repository_it_is_the_version(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = package.parent / "environment.so" / "made_up"  # ignored, inside of something else
    freeze(package, installed.parent)
    freeze(package, tmp_path / "alone")
    for where in (installed, tmp_path / "alone" / "made_up"):
        assert revision(where).startswith("rlt_dist ")
        assert "not in a git repository" in revision(where)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "not in a git repository" in revision(package)


def test_the_loop_is_compiled_from_the_copy(tmp_path: Path) -> None:
    freeze(PACKAGE, tmp_path / "code")
    program = (
        "from rlt_dist.ops.recurrence.native import build; print(build._LOOP); build.library()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "code")},
        capture_output=True,
        text=True,
        timeout=100,
        check=True,
    )
    assert Path(done.stdout.strip()).is_relative_to(tmp_path / "code")
