"""`rlt-dist data` from outside: prepare, go on, show, refuse."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from rlt_dist.cli.data import data_app
from rlt_dist.util.errors import UserError


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(data_app, [str(argument) for argument in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def story(tmp_path: Path) -> Path:
    path = tmp_path / "story.txt"
    path.write_text("\n---\n".join(f"Chapter {n}. It was a dark night." for n in range(30)))
    return path


def test_prepare_then_show(story: Path, tmp_path: Path, bytes_tokenizer: Path) -> None:
    command = ["prepare", "--input", story, "--output", tmp_path / "out"]
    command += ["--tokenizer", bytes_tokenizer, "--separator", "\n---\n"]
    first = run(*command)
    assert first.exit_code == 0
    assert first.stderr == "", "no bar where there is no terminal"
    rows = [line.split() for line in first.output.splitlines() if "train" in line]
    assert [row for row in rows[0] if row.isdigit()][:2] == ["1", "27"]
    assert "0 hidden files, 0 empty documents, 0 linked folders" in first.output
    assert "was finished before, nothing is left to do" in run(*command).output
    shown = run("show", tmp_path / "out").output
    assert first.output in shown
    assert "tokenizer    bytes, 257 ids" in shown


def test_a_terminal_is_shown_a_bar_a_stage(
    story: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    recipe = tmp_path / "words.yaml"
    recipe.write_text("kind: words\nvocabulary: 6\nlossless: false\n")
    command = ["prepare", "--input", story, "--output", tmp_path / "out", "--tokenizer", recipe]
    bars = run(*command, "--separator", "---", "--workers", 1).stderr
    assert "surveying" in bars
    assert "training the tokenizer" in bars
    assert "writing shards" in bars
    assert "30 documents" in bars


def test_every_option_reaches_its_place(tmp_path: Path, bytes_tokenizer: Path) -> None:
    folder = tmp_path / "in"
    (folder / "old").mkdir(parents=True)
    for name in ("a.jsonl", "old/b.jsonl", "c.txt"):
        (folder / name).write_text('{"body": "one\\u0000"}\n{"body": "two"}\n')
    command = ["prepare", "--input", folder, "--output", tmp_path / "out", "--exclude", "old"]
    command += ["--pattern", "*.jsonl", "--text-field", "body", "--tokenizer", bytes_tokenizer]
    command += ["--train", 0.5, "--validation", 0.5, "--test", 0, "--shard-mib", 0.000001]
    assert run(*command).exit_code == 0
    names = sorted(path.name for path in (tmp_path / "out").glob("*.tar"))
    assert names == ["train-000000.tar", "validation-000000.tar"]
    with pytest.raises(UserError, match="allow_binary was False, now True"):
        run(*command, "--allow-binary")
    assert run(*command, "--allow-binary", "--overwrite").exit_code == 0
    with pytest.raises(UserError, match="longest was 16777216, now 1048576"):
        run(*command, "--allow-binary", "--longest-mib", 1)
    with pytest.raises(UserError, match="require_utf8 was False, now True"):
        run(*command, "--allow-binary", "--require-utf8")
    with pytest.raises(UserError, match="--workers and --mpi: give one of them"):
        run(*command, "--workers", 2, "--mpi")


def test_help_shows_an_example() -> None:
    for command in ("prepare", "show", "verify"):
        assert f"rlt-dist data {command}" in run(command, "--help").output


@pytest.mark.parametrize(
    ("option", "value"),
    [
        (name, value)
        for name in ("--shard-mib", "--longest-mib", "--train")
        for value in ("nan", "inf", "0", "-1")
    ],
)
def test_a_number_out_of_bounds_is_one_error(
    story: Path, tmp_path: Path, bytes_tokenizer: Path, option: str, value: str
) -> None:
    command = ["prepare", "--input", story, "--output", tmp_path / "out"]
    command += ["--tokenizer", bytes_tokenizer, "--separator", "---", option, value]
    words = "shares" if option == "--train" else f"{option} .*: must be a number above 0"
    with pytest.raises(UserError, match=words):
        run(*command)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "more", "words"),
    [
        ("talks.jsonl", ["--format", "chat", "--separator", "x"], "--separator: .* leave it out"),
        ("talks.jsonl", ["--format", "chat", "--text-field", "x"], "--text-field: .*messages"),
        ("texts.jsonl.gz", ["--separator", "x"], "--separator: .* leave it out"),
        ("text.txt", ["--text-field", "x"], "--text-field: .* leave it out"),
    ],
)
def test_an_option_that_no_input_is_read_by_is_refused(
    tmp_path: Path, bytes_tokenizer: Path, name: str, more: list[str], words: str
) -> None:
    (tmp_path / name).write_text("what it holds is not read")
    command = ["prepare", "--input", tmp_path / name, "--output", tmp_path / "out"]
    with pytest.raises(UserError, match=words):
        run(*command, "--tokenizer", bytes_tokenizer, *more)
    assert not (tmp_path / "out").exists()
