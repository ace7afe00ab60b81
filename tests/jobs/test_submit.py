"""`rlt-dist submit`, where there is no Slurm: checks, the job's folder, the same script here."""

import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlt_dist.jobs.job import Job
from rlt_dist.jobs.submit import configurations
from rlt_dist.jobs.template import render
from rlt_dist.util.errors import UserError
from rlt_dist.util.lock import locked


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
    assert " GiB at the fullest moment of a rank of stage 0: " in err
    assert not run.exists()


MISTAKES = {
    "mesh": (["--nodes", 3, "mesh.data=2"], "needs 2 processes, and there are 3"),
    "tensor": (["--nodes", 3, "mesh.tensor=2"], "3 processes cannot be shared out"),
    "lanes": (["--nodes", 3], "8 lanes cannot be shared equally by 3"),
    "fewest": (
        ["--nodes", 2, "--nodes-min", 1, "mesh.pipeline=2"],
        "have room for 1",
    ),
    "memory": (["--gpus-per-node", 1, "--gpu-memory", 1e-5], "--gpu-memory gives 0.0; "),
    "corpus": (["data.path=nowhere"], "nowhere/index.json: no such file"),
    "disk": (["checkpoint.keep=100000000000"], "make room, or lower checkpoint.keep"),
    "folder": (["run_folder=rlt_dist"], "which no run made"),
    "file": (["trian.steps=3"], "did you mean 'train'?"),
    "least": (["--nodes-min", 2], "--nodes-min 2: is more than --nodes 1"),
    "gpus": (["--gpus-per-node", "h200"], "--gpus-per-node h200: give a number"),
    "nodes": (["-N", 2], "-N: rlt-dist decides on it; give rlt-dist's own --nodes"),
    "after": (["--", "--array=0-3"], "--array: rlt-dist decides on it"),
    "ranks": (
        ["--gpus-per-node", 2, "--processes-per-node", 2],
        "--processes-per-node: each GPU has one rank",
    ),
    "colon": (["run_folder=a:b"], "a:b': a job's folder cannot have a ':' in its name"),
    "backslash": (["run_folder='a\\b'"], "a job's folder cannot have a '\\\\' in its name"),
    "line": (['run_folder="a\\nb"'], "a job's folder cannot have a '\\n' in its name"),
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


def played(template: Path, job: Job, program: str, **environment: str) -> list[str]:
    """What a job's script prints, if a Python program takes the place of `supervise`."""
    job.directory.mkdir(exist_ok=True)
    folder = job.run_folder / "jobs" / "0001"
    (folder / "code" / "rlt_dist" / "jobs").mkdir(parents=True)
    for name in ("__init__.py", "jobs/__init__.py"):
        (folder / "code" / "rlt_dist" / name).write_text("")
    (folder / "code" / "rlt_dist" / "jobs" / "supervise.py").write_text(program)
    script = folder / "job.sbatch"
    script.write_text(render(template, folder, job))
    done = subprocess.run(
        ["bash", script],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_a_folder_of_any_name_is_one_word_of_the_script(tmp_path: Path, repository: Path) -> None:
    run = tmp_path / 'it\'s 100% $HOME; "x" #1'
    job = Job(run_folder=run, directory=tmp_path / "a b", nodes=1, nodes_min=1, processes=1)
    program = "import os, sys; print(sys.argv[1], os.getcwd(), sep='\\n')"
    said = played(repository / "slurm" / "train.sbatch", job, program)
    assert said == [str(run / "jobs" / "0001"), str(job.directory)]


def test_a_job_does_without_what_launchers_left_where_it_was_submitted(
    tmp_path: Path, repository: Path
) -> None:
    template = tmp_path / "template"
    ours = (repository / "slurm" / "train.sbatch").read_text()
    template.write_text(ours.replace("\nfolder=", "\nexport MASTER_ADDR=ours\nfolder=", 1))
    left = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "PET_NNODES")
    left += ("RLT_DIST_START", "RLT_DIST_LAUNCHER")
    names = (*left, "MASTER_ADDR", "SLURM_EXPORT_ENV", "THEIRS")
    program = f"import os; print([os.environ.get(name) for name in {names}])"
    job = Job(run_folder=tmp_path, directory=tmp_path, nodes=1, nodes_min=1, processes=1)
    # `sbatch --export=NONE` would have srun export nothing, either.
    there = dict.fromkeys(left, "1") | {"MASTER_ADDR": "theirs", "THEIRS": "2"}
    (said,) = played(template, job, program, **there, SLURM_EXPORT_ENV="NONE")
    assert said == str([*[None] * len(left), "ours", "ALL", "2"])


def test_a_template_names_only_what_there_is(tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{{ nodes }}")
    job = Job(run_folder=tmp_path, directory=tmp_path, nodes=1, nodes_min=1, processes=1)
    with pytest.raises(UserError, match="'nodes' is undefined"):
        render(tmp_path / "template", tmp_path, job)


@pytest.mark.usefixtures("without_slurm")
def test_a_package_that_is_installed_brings_the_template(
    command: Any, checkout: Path, run: Path, repository: Path
) -> None:
    (checkout / "slurm").rename(checkout / "rlt_dist" / "slurm")
    assert command("submit", run.parent / "run.yaml", "--dry-run")[0] == 0
    project = tomllib.loads((repository / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel["force-include"]["slurm"] == "rlt_dist/slurm"


SBATCH = 'case "$*" in *--test-only*) exit 0;; esac\n'


@pytest.fixture
def sbatch(stand_in: Any, checkout: Path) -> Callable[[str], Path]:  # noqa: ARG001
    """`sbatch(does)`: one that has nothing against a job and then does as told; its calls."""
    stand_in("squeue")
    return lambda does: stand_in("sbatch", f"{SBATCH}for script; do :; done\n{does}")


def test_a_run_is_submitted_once_at_a_time(command: Any, sbatch: Any, run: Path) -> None:
    lock = run / "jobs" / ".lock"
    sbatch(f"flock --nonblock {lock} true && exit 1; echo 7")
    submission = ("submit", run.parent / "run.yaml")
    with locked(lock.parent, "submits a job"):
        code, out, err = command(*submission)
    assert (code, out) == (1, "")
    assert f"process {os.getpid()} on {os.uname().nodename} submits a job here" in err
    assert command(*submission)[:2] == (0, "7\n")  # sbatch saw it held


def test_what_sbatch_refuses_at_last_leaves_nothing(command: Any, sbatch: Any, run: Path) -> None:
    sbatch("echo 'sbatch: error: Job dependency problem' >&2; exit 1")
    code, _, err = command("submit", run.parent / "run.yaml")
    assert code == 2
    assert "sbatch refuses: Job dependency problem" in err
    assert not run.exists()


def test_a_job_that_slurm_may_have_taken_is_kept_and_keeps_others_away(
    command: Any, sbatch: Any, strict_json: Any, run: Path
) -> None:
    sbatch("kill -KILL $$")
    submission = ("submit", run.parent / "run.yaml")
    unknown = f"Slurm's answer is not in {run}/jobs/0001"
    code, _, err = command(*submission)
    assert code == 2
    assert unknown in err
    assert (run / "jobs" / "0001" / "code" / "rlt_dist").is_dir()
    shown = strict_json(command("status", run, "--json")[1])
    assert (shown["state"], shown["why"].startswith(unknown)) == ("unknown", True)
    assert f"nothing to cancel, it is unknown: {unknown}" in command("cancel", run)[2]
    sbatch("echo 8")
    code, _, err = command(*submission)
    assert code == 2
    assert unknown in err
    shutil.rmtree(run / "jobs" / "0001")
    assert command(*submission)[:2] == (0, "8\n")


def test_who_interrupts_sbatch_is_told_the_jobs_id_all_the_same(
    command: Any, sbatch: Any, run: Path
) -> None:
    sbatch("kill -INT $PPID $$; echo 7")
    assert command("submit", run.parent / "run.yaml")[:2] == (0, "7\n")
    assert json.loads((run / "jobs" / "0001" / "submitted.json").read_text())["job_id"] == "7"


def test_an_id_that_cannot_be_written_down_is_said(command: Any, sbatch: Any, run: Path) -> None:
    sbatch('mkdir "$(dirname "$script")/.submitted.json.partial"; echo 7')
    code, out, err = command("submit", run.parent / "run.yaml")
    assert (code, out) == (2, "")
    assert "job 7 is submitted, but that cannot be written into" in err
    assert (run / "jobs" / "0001" / "job.sbatch").is_file()


def test_the_script_is_of_the_folder_that_is_made(command: Any, sbatch: Any, run: Path) -> None:
    called = sbatch("echo 7")
    (run / "jobs" / "0003").mkdir(parents=True)  # somebody was killed over it
    assert command("submit", run.parent / "run.yaml")[0] == 0
    script = run / "jobs" / "0004" / "job.sbatch"
    assert f"folder={script.parent}\n" in script.read_text()
    assert called.read_text().splitlines()[-1].endswith(str(script))


@pytest.mark.parametrize(
    ("dependency", "passes"), [("afterok:7", True), ("afterany:7", True), ("afterany:6", False)]
)
def test_a_run_is_submitted_again_only_behind_its_own_job(
    command: Any, sbatch: Any, stand_in: Any, run: Path, dependency: str, passes: bool
) -> None:
    sbatch("echo 7")
    submission = ("submit", run.parent / "run.yaml")
    assert command(*submission)[0] == 0
    stand_in("squeue", "echo '7|RUNNING|0||'")
    code, _, err = command(*submission, "--dependency", dependency, "--dry-run")
    assert (code == 0) is passes
    said = "job 7 is running; `rlt-dist cancel"
    assert (said in err) is not passes


def test_a_resume_is_of_one_run_with_the_configuration_it_had(
    command: Any, is_one_error: Any, sbatch: Any, run: Path
) -> None:
    sbatch("echo 7")
    assert command("submit", run.parent / "run.yaml")[0] == 0
    is_one_error(command("resume", run, "--array", "0-3"), "--array: a resume is of one run")
    said = command("resume", run, "train.steps=9")
    file = run / "jobs" / "0001" / "config.yaml"
    is_one_error(said, f"`rlt-dist submit {file} train.steps=9` changes it")
    assert file.is_file()


def test_ranks_take_the_place_of_gpus_and_gpus_of_ranks(
    command: Any, sbatch: Any, run: Path
) -> None:
    sbatch("echo 7")
    wish = ("--gpus-per-node", "h200:4", "--qos=high")
    assert command("submit", run.parent / "run.yaml", *wish)[0] == 0

    def resumed(*anew: object) -> list[str]:
        code, out, err = command("resume", run, *anew, "--dry-run")
        assert code == 0, err
        return [line for line in script_lines(out) if "gpus" in line or "cpus" in line]

    assert resumed() == ["--cpus-per-task=4", "--gpus-per-node=h200:4"]
    assert resumed("--processes-per-node", 2) == ["--cpus-per-task=2"]
    assert resumed("--gpus-per-node", 8) == ["--cpus-per-task=8", "--gpus-per-node=8"]
