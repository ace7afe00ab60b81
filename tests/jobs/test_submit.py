"""`rlt-dist submit`, where there is no Slurm: checks, the job's folder, the same script here."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.jobs.job import Job
from rlt_dist.jobs.submit import configurations
from rlt_dist.jobs.template import render
from rlt_dist.util.errors import UserError


@pytest.fixture
def run(configure: Any, tmp_path: Path) -> Path:
    """The folder of a run of 8 lanes that can be submitted: its file is run.yaml beside it."""
    return configure(tmp_path, "rlt1", "model.encoder_layers=2").run_folder


@pytest.fixture
def without_slurm(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nothing is installed but git."""
    programs = tmp_path / "programs"
    programs.mkdir()
    if shutil.which("git"):
        (programs / "git").symlink_to(shutil.which("git") or "")
    monkeypatch.setenv("PATH", str(programs))


def script_lines(script: str) -> list[str]:
    return [
        line.removeprefix("#SBATCH ") for line in script.splitlines() if line.startswith("#SBATCH")
    ]


@pytest.mark.usefixtures("without_slurm", "checkout")
def test_a_dry_run_shows_the_script_and_writes_nothing(command: Any, run: Path) -> None:
    wish = ["--nodes", 4, "--nodes-min", 2, "--gpus-per-node", "h200:2", "--time", "1:00:00"]
    more = ["--partition=a", "--qos", "high", "--exclusive", "train.steps=9", "--comment=a b"]
    code, out, err = command("submit", run.parent / "run.yaml", *wish, *more, "--dry-run")
    assert code == 0
    lines = script_lines(out)
    for line in (
        *("--nodes=2-4", "--cpus-per-task=2", "--requeue", "--time=1:00:00"),
        *("--signal=B:USR1@120", "--open-mode=append", "--gpus-per-node=h200:2", "--qos high"),
        *("--exclusive", "'--comment=a b'", f"--output={run}/jobs/0001/output.log"),
    ):
        assert line in lines
    assert "mesh 8x1x1 (data x pipeline x tensor), 4 nodes, at least 2, 2 ranks each" in err
    assert " a rank before activations" in err
    assert not run.exists()


MISTAKES = {
    "mesh": (["--nodes", 3, "mesh.data=2"], "needs 2 processes, and there are 3"),
    "tensor": (["--nodes", 3, "mesh.tensor=2"], "3 processes cannot be shared out"),
    "lanes": (["--nodes", 3], "8 lanes cannot be shared equally by 3"),
    "fewest": (
        ["--nodes", 2, "--nodes-min", 1, "mesh.pipeline=2"],
        "have room for 1",
    ),
    "memory": (["--gpus-per-node", 1, "--gpu-memory", 1e-5], "--gpu-memory gives a rank"),
    "corpus": (["data.path=nowhere"], "nowhere/index.json: no such file"),
    "disk": (["checkpoint.keep=100000000000"], "make room, or lower checkpoint.keep"),
    "folder": (["run_folder=rlt_dist"], "which no run made"),
    "file": (["trian.steps=3"], "did you mean 'train'?"),
    "least": (["--nodes-min", 2], "--nodes-min 2: is more than --nodes 1"),
    "gpus": (["--gpus-per-node", "h200"], "--gpus-per-node h200: give a number"),
    "nodes": (["-N", 2], "--nodes: give it to rlt-dist"),
    "after": (["--", "--array=0-3"], "--array: give it to rlt-dist"),
    "warning": (["--time", "0:30", "--lead", 60], "--time 0:30: the run needs 60 s of it"),
    "array": (["--array", "0-3"], "is the run folder of several tasks"),
    "here": (["--array", "0", "--local"], "--local: this machine is one node"),
    "template": (["--template", "nowhere"], "nowhere: cannot be read as a template"),
    "broken": (["--template", "slurm/broken"], "slurm/broken: is no template"),
    "slurm": ([], "sbatch is not installed here"),
}


@pytest.mark.usefixtures("without_slurm")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing_behind(
    command: Any, is_one_error: Any, checkout: Path, run: Path, mistake: str
) -> None:
    wish, said = MISTAKES[mistake]
    (checkout / "slurm" / "broken").write_text("{% if %}")
    dry = [] if mistake in ("slurm", "here") else ["--dry-run"]
    code, out, err = command("submit", run.parent / "run.yaml", *dry, *wish)
    assert code == 2
    is_one_error((code, out, err.splitlines()[-1]), said)
    assert not run.exists()


@pytest.mark.usefixtures("without_slurm", "checkout")
def test_options_of_sbatch_follow_the_file(command: Any, is_one_error: Any, run: Path) -> None:
    is_one_error(command("submit", "--qos", "high", run.parent / "run.yaml"), "--qos", "follow")


@pytest.mark.usefixtures("without_slurm", "checkout")
def test_the_tasks_of_an_array_have_folders_of_their_own(command: Any, run: Path) -> None:
    wish = ["--array", "0-3%2", f"run_folder={run.parent}/seed-{{task}}", "train.seed={task}"]
    code, out, err = command("submit", run.parent / "run.yaml", *wish, "--dry-run")
    assert code == 0
    lines = script_lines(out)
    assert "--array=0-3%2" in lines
    assert f"--output={run.parent}/seed-0/jobs/0001/tasks/%a/output.log" in lines
    assert "and 3 more tasks" in err
    configs = configurations(run.parent / "run.yaml", wish[2:], "0-3")
    assert [config.train.seed for config in configs.values()] == [0, 1, 2, 3]


def here(checkout: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """`rlt-dist ...` of a checkout, as a process."""
    return subprocess.run(
        [sys.executable, "-m", "rlt_dist", *map(str, arguments)],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_the_same_script_runs_here_and_what_is_changed_later_changes_nothing(
    checkout: Path, run: Path
) -> None:
    (run / "jobs").mkdir(parents=True)
    (run / "jobs" / "status").write_text("75")
    done = here(checkout, "submit", run.parent / "run.yaml", "train.seed=3", "--local")
    assert done.returncode == 75, done.stderr  # the job's own
    folder = run / "jobs" / "0001"
    code = folder / "code" / "rlt_dist" / "__init__.py"
    said = f"as submitted, {folder}, code in {code}, from {checkout}, task none"
    assert done.stdout.splitlines() == [said, "the end"]
    assert json.loads((folder / "submitted.json").read_text())["job_id"] == "local"
    job = Job(**json.loads((folder / "job.json").read_text()))
    assert (job.run_folder, job.directory, job.nodes, job.processes) == (run, checkout, 1, 1)
    assert "seed: 3" in (folder / "config.yaml").read_text()
    frozen = (folder / "config.yaml").read_bytes()
    stand_in = checkout / "rlt_dist" / "jobs" / "supervise.py"
    stand_in.write_text(stand_in.read_text().replace("as submitted", "changed since"))
    (checkout / "slurm" / "train.sbatch").write_text("exit 1\n")
    (run.parent / "run.yaml").write_text("train: {steps: 1}\n")
    again = subprocess.run(
        ["bash", folder / "job.sbatch"], capture_output=True, text=True, check=False
    )
    assert again.stdout.splitlines() == [said, "the end"]
    assert (folder / "config.yaml").read_bytes() == frozen


def test_a_folder_of_any_name_is_one_word_of_the_script(tmp_path: Path, repository: Path) -> None:
    run = tmp_path / 'it\'s 100% $HOME; "x" #1'
    job = Job(run_folder=run, directory=tmp_path / "a b", nodes=1, nodes_min=1, processes=1)
    job.directory.mkdir()
    folder = run / "jobs" / "0001"
    (folder / "code" / "rlt_dist" / "jobs").mkdir(parents=True)
    for name in ("__init__.py", "jobs/__init__.py"):
        (folder / "code" / "rlt_dist" / name).write_text("")
    (folder / "code" / "rlt_dist" / "jobs" / "supervise.py").write_text(
        "import os, sys; print(sys.argv[1], os.getcwd(), sep='\\n')"
    )
    script = render(repository / "slurm" / "train.sbatch", folder, job)
    done = subprocess.run(["bash"], input=script, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [str(folder), str(job.directory)]


def test_a_template_names_only_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{{ nodes }}")
    job = Job(run_folder=tmp_path, directory=tmp_path, nodes=1, nodes_min=1, processes=1)
    with pytest.raises(UserError, match="'nodes' is undefined"):
        render(tmp_path / "template", tmp_path, job)
