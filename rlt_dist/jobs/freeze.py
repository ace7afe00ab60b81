"""The code of a job, kept as it was when the job was submitted.

A job may wait for days and be requeued for weeks while work on the code goes on: it imports the
package from its own folder.
"""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import rlt_dist

PACKAGE = Path(rlt_dist.__file__).parent
"""The code that runs now."""


def freeze(package: Path, code: Path) -> None:
    """Copy a package into the new folder `code`, from which it can be imported."""
    passed_over = shutil.ignore_patterns("__pycache__")
    shutil.copytree(package, code / package.name, ignore=passed_over)


def revision(package: Path) -> str:
    """The commit that a package's files are of, and the difference from it, new files included.

    What git ignores is left out, as is all that lies outside the package. Where the package is in
    no repository, or there is no git, its version.
    """
    commit = _git(package, "rev-parse", "HEAD") if _is_tracked(package) else None
    if commit is None:
        return f"rlt_dist {rlt_dist.__version__}, not in a git repository\n"
    return f"commit {commit.strip()}\n{_difference(package)}"


def _is_tracked(package: Path) -> bool:
    """A package that is installed may lie inside a repository of something else."""
    return _git(package, "ls-files", "--error-unmatch", "__init__.py") is not None


def _difference(package: Path) -> str:
    """As git shows it; an index of our own makes new files part of it."""
    index = _git(package, "rev-parse", "--path-format=absolute", "--git-path", "index") or ""
    with tempfile.TemporaryDirectory() as folder:
        own = Path(folder) / "index"
        shutil.copy(index.strip(), own)
        environment = os.environ | {"GIT_INDEX_FILE": str(own)}
        _git(package, "add", "--intent-to-add", ".", environment=environment)
        shown = _git(package, "diff", "--no-ext-diff", "HEAD", "--", ".", environment=environment)
    return shown or ""


def _git(package: Path, *arguments: str, environment: dict[str, str] | None = None) -> str | None:
    """What git answers; None: it refuses, or is not installed."""
    try:
        done = subprocess.run(
            ["git", *arguments],
            cwd=package,
            env=environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=60,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout
