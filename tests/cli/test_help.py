"""Every command explains itself with an example that names it."""

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command

from rlt_dist import __version__
from rlt_dist.cli.main import app


def commands(group: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every command and sub-command, by its words."""
    yield path, group
    for name, inner in getattr(group, "commands", {}).items():
        yield from commands(inner, (*path, name))


ALL = dict(commands(get_command(app)))
LEAVES = {path: made for path, made in ALL.items() if not hasattr(made, "commands")}


def test_the_commands_that_were_asked_for_are_there() -> None:
    wished = {("train",), ("eval",), ("generate",), ("doctor",), ("report",), ("data", "prepare")}
    wished |= {("checkpoint", verb) for verb in ("ls", "show", "verify")} | {("verify", "golden")}
    assert wished <= LEAVES.keys()


def test_the_version_is_the_packages(command: Any) -> None:
    assert command("--version")[:2] == (0, f"rlt-dist {__version__}\n")


@pytest.mark.parametrize("path", ALL, ids=" ".join)
def test_help_is_given(command: Any, path: tuple[str, ...]) -> None:
    code, out, err = command(*path, "--help")
    assert (code, err) == (0, "")
    assert "Usage:" in out


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_help_has_an_example_of_the_command_itself(command: Any, path: tuple[str, ...]) -> None:
    _, out, _ = command(*path, "--help")
    words = " ".join(out.split())
    assert "Example" in words
    assert f"rlt-dist {' '.join(path)}" in words.split("Example", 1)[1]


@pytest.mark.parametrize("path", [path for path in LEAVES if path[0] == "experiment"])
def test_an_experiment_says_that_the_same_command_goes_on(command: Any, path: Any) -> None:
    words = " ".join(command(*path, "--help")[1].split())
    assert "130 interrupted" in words
    assert "the same command goes on" in words


@pytest.mark.parametrize("path", LEAVES, ids=" ".join)
def test_every_option_and_argument_says_what_it_is(path: tuple[str, ...]) -> None:
    for parameter in LEAVES[path].params:
        assert parameter.name == "help" or getattr(parameter, "help", None), parameter.name


def test_without_a_command_the_commands_are_listed(command: Any) -> None:
    _, out, err = command()
    for name in ("train", "eval", "generate", "checkpoint"):
        assert name in out + err


def test_an_unknown_command_is_no_traceback(command: Any) -> None:
    code, _, err = command("trian")
    assert code != 0
    assert "trian" in err
    assert "Traceback" not in err
