"""Every command that the README shows, run as it stands there, in a copy of the repository."""

import os
import re
import shlex
import shutil
import socket
import subprocess
import sysconfig
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = ("README.md", "slurm/README.md")
PROGRAMS = ("rlt-dist", "launch/torchrun.sh", "launch/prepare_mpi.sh")


def shown_commands() -> list[str]:
    """The lines of all bash blocks, comments cut off."""
    text = "\n".join((REPOSITORY / page).read_text() for page in PAGES)
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
    environment = os.environ | {"PATH": f"{folder / '.venv/bin'}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def as_a_job(command: str) -> str:
    """An sbatch line as the same job run here, on one node, without a cluster."""
    script, *arguments = shlex.split(command[command.index("slurm/") :])
    several = "mpirun -n 3" if script == "slurm/prepare.sbatch" else ""
    steps = "train.steps=20" if script == "slurm/train.sbatch" else ""
    return (
        f'srun() {{ while [[ $1 == -* ]]; do shift; done; {several} "$@"; }}; '
        'exec() { "$@"; }; export -f srun exec; '
        'SLURM_SUBMIT_DIR="$PWD" SLURM_JOB_ID=1 SLURM_JOB_NUM_NODES=1 MASTER_ADDR=127.0.0.1 '
        f"MASTER_PORT={free_port()} bash {script} {shlex.join(arguments)} {steps}"
    )


def test_the_pages_show_commands() -> None:
    assert len(shown_commands()) > 12


def test_every_command_works_as_shown_one_after_the_other(clone: Path) -> None:
    for command in shown_commands():
        program = command.split()[0]
        if program == "make":
            assert run(clone, command.replace("make", "make --dry-run", 1))
        elif program == "sbatch":
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
