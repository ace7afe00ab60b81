"""Every command that the README shows, run as it stands there, in a copy of the repository."""

import os
import re
import shlex
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = ("README.md", "launch/README.md", "slurm/README.md")
PROGRAMS = ("rlt-dist", "launch/torchrun.sh", "launch/mpirun.sh", "launch/prepare_mpi.sh")


# A queue in which every job waits until it is cancelled.
QUEUE = {
    "sbatch": '[[ " $* " == *" --test-only "* ]] || { touch queue/1; echo 1; }',
    "squeue": 'for job in queue/*; do echo "${job#queue/}|PENDING|0|Priority|"; done',
    "scancel": 'rm "queue/$1"',
    "sinfo": "echo 64000",
}


def shown_commands(page: str) -> list[str]:
    """The lines of a page's bash blocks, comments cut off."""
    text = (REPOSITORY / page).read_text()
    blocks = re.findall(r"```bash\n(.*?)```", text, flags=re.DOTALL)
    lines = [line.split("  #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """The tracked files and the environment, with a corpus and a short run as `make run` leaves."""
    folder = tmp_path / "a clone"
    tracked = subprocess.run(
        ["git", "ls-files"], cwd=REPOSITORY, capture_output=True, text=True, check=True
    )
    for name in tracked.stdout.split("\n"):
        if name and (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(REPOSITORY / name, folder / name)
    (folder / ".venv").symlink_to(REPOSITORY / ".venv")
    (folder / "queue").mkdir()
    (folder / "programs").mkdir()
    for name, does in QUEUE.items():
        (folder / "programs" / name).write_text(f"#!/usr/bin/env bash\n{does}\n")
        (folder / "programs" / name).chmod(0o755)
    run(
        folder,
        f"rlt-dist data prepare --input {sysconfig.get_paths()['stdlib']} --pattern '*.py'"
        " --exclude site-packages --exclude 'test*' --exclude 'lib*'"
        " --output runs/corpus --tokenizer tokenizer/bytes.yaml"
        " --train 0.6 --validation 0.2 --test 0.2",
    )
    run(folder, "rlt-dist train configs/rlt_stdlib.yaml train.steps=20")
    return folder


def run(folder: Path, command: str) -> str:
    """Run one line in bash; its output, after a clean exit."""
    path = [folder / "programs", folder / ".venv/bin", os.environ["PATH"]]
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=os.environ | {"PATH": ":".join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def as_a_job(command: str) -> str:
    """An sbatch line as the same job run here, on one node or as task 0, without a cluster."""
    script, *arguments = shlex.split(command[command.index("slurm/") :])
    several = "mpirun -n 3" if script == "slurm/prepare.sbatch" else ""
    task = "SLURM_ARRAY_TASK_ID=0" if "--array" in command else ""
    return (
        f'srun() {{ while [[ $1 == -* ]]; do shift; done; {several} "$@"; }}; '
        'exec() { "$@"; }; export -f srun exec; '
        f'SLURM_SUBMIT_DIR="$PWD" SLURM_JOB_ID=1 {task} bash {script} {shlex.join(arguments)}'
    )


def test_the_pages_show_commands() -> None:
    assert sum(len(shown_commands(page)) for page in PAGES) > 12


@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", PAGES)
def test_every_command_works_as_shown_one_after_the_other(clone: Path, page: str) -> None:
    for command in shown_commands(page):
        program = command.split()[0]
        if program == "make":
            assert run(clone, command.replace("make", "make --dry-run", 1))
        elif program == "sbatch":
            if "seed-{task}" in command:  # as if the study's first task had been trained
                shutil.copytree(clone / "runs/rlt", clone / "runs/seed-0", dirs_exist_ok=True)
            run(clone, as_a_job(command))
        else:
            assert program in PROGRAMS, f"no test runs {command}"
            run(clone, command)


def test_every_command_is_in_the_table() -> None:
    from rlt_dist.cli.main import app

    table = (REPOSITORY / "README.md").read_text()
    names = [command.name or command.callback.__name__ for command in app.registered_commands]
    for name in names + [group.name for group in app.registered_groups]:
        assert f"`rlt-dist {name}" in table
