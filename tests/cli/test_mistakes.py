"""Every mistake a person can make is one line that names the thing, and a non-zero exit."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def trained_run(once: Any, configure: Any, driver: Any) -> Path:
    """The run folder of a finished run; never write to it."""
    folder = once(
        "run-to-use-wrongly",
        lambda folder: driver.train(configure(folder, "rlt1", "train.steps=2")),
    )
    return folder / "run"


@pytest.fixture
def file(configure: Any, tmp_path: Path) -> Path:
    """A configuration that is right."""
    configure(tmp_path, "rlt1", "train.steps=2")
    return tmp_path / "run.yaml"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.step=3", "'train.step'; did you mean 'steps'"),
        ("model.windw=3", "'model.windw'; did you mean 'window'"),
        ("optimiser.learning_rate=1", "'optimiser'; did you mean 'optimizer'"),
        ("model.heads=3", "heads 3 do not divide d_model 16"),
        ("train.steps", "write key.sub=value"),
        ("=3", "write key.sub=value"),
        ("train.steps=[", "not valid YAML"),
        ("train.steps=many", "train.steps"),
        ("train.steps=0", "train.steps"),
        ("train.steps.more=1", "is a single value"),
        ("train.micro_batch=3", "does not divide data.lanes 8"),
        ("model.memory_len=null", "carried state has no bound"),
        ("model.kind=lstm", "model"),
        ("data.path=nowhere", "nowhere/index.json: no such file"),
        ("data.lanes=1000", "1000 lanes cannot share"),
        ("train.precision=float16", "train.precision"),
        ("optimizer.learning_rate=.nan", "optimizer.learning_rate"),
    ],
)
def test_a_wrong_value_is_named_before_anything_is_written(
    command: Any, is_one_error: Any, file: Path, override: str, said: str
) -> None:
    is_one_error(command("train", file, override), said)
    assert not (file.parent / "run").exists()


def test_a_misspelt_key_in_the_file_names_the_file(command: Any, file: Path) -> None:
    file.write_text(file.read_text().replace("segment:", "segmnt:"))
    code, _, err = command("train", file)
    assert code != 0
    assert f"{file}: unknown key 'data.segmnt'; did you mean 'segment'?" in err
    assert "Traceback" not in err
    assert all(line.startswith("rlt-dist: error: ") for line in err.splitlines())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (bytes(range(256)), "is not text"),
        (b"\x7fELF\x02\x01\x01\x00\x00\x00", ""),
        (b"", "holds no keys"),
        (b"- a\n- b\n", "a YAML mapping is needed"),
        (b"train: [1, 2\n", "is not valid YAML"),
        (b"train: 1\ntrain: 2\n", "is not valid YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_one_line(
    command: Any, is_one_error: Any, tmp_path: Path, content: bytes, said: str
) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    is_one_error(command("train", path), str(path), said)


def test_a_missing_file_and_a_folder_are_no_configuration(
    command: Any, is_one_error: Any, tmp_path: Path
) -> None:
    is_one_error(command("train", tmp_path / "missing.yaml"), "missing.yaml: no such file")
    is_one_error(command("train", tmp_path), f"{tmp_path}: is a folder")


@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_a_folder_that_is_no_run_is_one_line(
    command: Any, is_one_error: Any, tmp_path: Path, verb: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("x")
    for name in ("empty", "file", "missing"):
        is_one_error(command(verb, tmp_path / name), str(tmp_path / name))


@pytest.mark.parametrize("verb", ["eval", "generate"])
def test_a_run_without_checkpoints_is_one_line(
    command: Any, is_one_error: Any, trained_run: Path, tmp_path: Path, verb: str
) -> None:
    shutil.copytree(trained_run, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    is_one_error(command(verb, tmp_path / "run"), "holds no whole checkpoint")


@pytest.mark.parametrize("verb", ["eval", "generate", "train"])
@pytest.mark.parametrize("model", ["rlt2", "xl"])
def test_a_checkpoint_of_another_model_is_one_line(
    command: Any,
    is_one_error: Any,
    configure: Any,
    trained_run: Path,
    tmp_path: Path,
    verb: str,
    model: str,
) -> None:
    """Its run folder's config.yaml was exchanged."""
    other = configure(tmp_path, model, "train.steps=4")
    shutil.copytree(trained_run, other.run_folder)
    shutil.copy(tmp_path / "run.yaml", other.run_folder / "config.yaml")
    target = tmp_path / "run.yaml" if verb == "train" else other.run_folder
    wrong = "belongs to another run" if verb == "train" else "another model"
    is_one_error(command(verb, target), wrong)


@pytest.mark.parametrize("verb", ["eval", "generate"])
@pytest.mark.parametrize("name", ["config.yaml", "tokenizer.json"])
def test_a_run_folder_that_lacks_a_file_is_one_line(
    command: Any, is_one_error: Any, trained_run: Path, tmp_path: Path, verb: str, name: str
) -> None:
    shutil.copytree(trained_run, tmp_path / "run")
    (tmp_path / "run" / name).unlink()
    is_one_error(command(verb, tmp_path / "run"), name, "no such file")


def test_an_unknown_split_or_corpus_is_one_line(
    command: Any, is_one_error: Any, trained_run: Path, tmp_path: Path
) -> None:
    result = command("eval", trained_run, "--split", "tset")
    is_one_error(result, "has no split 'tset'; it has train, validation, test")
    is_one_error(command("eval", trained_run, "--data", tmp_path), "index.json: no such file")


@pytest.mark.parametrize("below", ["a file", "a file/run"])
def test_a_run_folder_that_cannot_be_one_is_one_line(
    command: Any, is_one_error: Any, file: Path, tmp_path: Path, below: str
) -> None:
    (tmp_path / "a file").write_text("x")
    is_one_error(command("train", file, f"run_folder={tmp_path / below}"), "a file")


def _fails(command: list[str]) -> bool:
    return subprocess.run(command, capture_output=True, timeout=20, check=False).returncode != 0


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Path]:
    """A file system that may not be written, not even by root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(folder)]
    if os.geteuid() != 0 or _fails(mount):
        pytest.skip("mounting a file system is not allowed here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True, timeout=20)


def test_a_disk_that_may_not_be_written_is_one_line(
    command: Any, is_one_error: Any, file: Path, read_only: Path
) -> None:
    is_one_error(command("train", file, f"run_folder={read_only / 'run'}"), "Read-only")


def test_half_a_set_of_launcher_variables_is_one_line(
    command: Any, is_one_error: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    is_one_error(command("train", file), "RANK", "start with torchrun")


def test_as_a_process_of_its_own_a_mistake_is_one_line_and_status_2(tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-m", "rlt_dist", "train", str(tmp_path / "missing.yaml")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("rlt-dist: error: ")


def test_a_defect_keeps_its_traceback(command: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only a person's mistakes are put into one line."""
    import rlt_dist.config.load

    def broken(*_: object) -> None:
        raise ZeroDivisionError("a defect")

    monkeypatch.setattr(rlt_dist.config.load, "load_typed", broken)
    with pytest.raises(ZeroDivisionError):
        command("train", "any.yaml")


def test_doctor_says_what_is_there_and_what_is_missing(command: Any) -> None:
    code, out, _ = command("doctor")
    assert code == 0
    for name in ("Python", "torch", "GPU", "megatron-core", "sbatch"):
        assert name in out
