"""Where the loop cannot be compiled or loaded, native is an error and auto goes on in torch."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rlt_dist.config.model import RltConfig
from rlt_dist.models.build import initial_model
from rlt_dist.ops.recurrence import dispatch
from rlt_dist.ops.recurrence.dispatch import Backend, Kind, Recurrence
from rlt_dist.ops.recurrence.native import build
from rlt_dist.util.errors import UserError

pytestmark = pytest.mark.usefixtures("nothing_compiled")
SMALL = """
extern "C" int answer() { return 42; }
"""


@pytest.fixture
def nothing_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """An empty cache, and no library in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    forget()
    yield
    forget()


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A source that is compiled in no time."""
    source = tmp_path / "small.cpp"
    source.write_text(SMALL)
    return source


def forget() -> None:
    build.library.cache_clear()
    dispatch._native.cache_clear()


def script(path: Path, body: str) -> Path:
    """A program in place of a compiler."""
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o700)
    return path


def answer(source: Path) -> int:
    """What a newly started process would get."""
    forget()
    return int(build.library(source).answer())


def kept(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "rlt_dist").iterdir())


def is_an_error_and_auto_goes_on(said: str) -> None:
    with pytest.raises(UserError, match=said) as raised:
        Recurrence("native").prepare(Kind("cpu"))
    assert len(str(raised.value).splitlines()) == 1
    with pytest.warns(UserWarning, match="more slowly") as told:
        for _ in range(3):
            Recurrence().prepare(Kind("cpu"))
    assert len(told) == 1


@pytest.mark.parametrize(
    ("compiler", "said"),
    [
        ("no-such-compiler -O1", "no-such-compiler is not found"),
        ("false", "false cannot compile .*: exit status 1 without a message"),
        ("'g++", "CXX: "),
    ],
)
def test_asking_for_what_cannot_be_compiled_is_an_error_and_auto_goes_on(
    monkeypatch: pytest.MonkeyPatch, compiler: str, said: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    is_an_error_and_auto_goes_on(said)


def test_a_library_that_cannot_be_loaded_is_an_error_and_auto_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As where the cache's files may not be executed."""
    body = 'for last; do :; done; [ "$last" = --version ] || echo junk > "$last"'
    writes_junk = script(tmp_path / "junk", body)
    monkeypatch.setenv("CXX", str(writes_junk))
    is_an_error_and_auto_goes_on("cannot be loaded: .*; let XDG_CACHE_HOME")


def test_a_cache_that_cannot_be_written_is_an_error_and_auto_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    is_an_error_and_auto_goes_on("cannot be compiled: ")


def test_the_loop_is_compiled_once_and_leaves_nothing_else(tmp_path: Path) -> None:
    build.library()
    (made,) = kept(tmp_path)
    written = made.stat().st_mtime_ns
    forget()
    build.library()
    assert made.suffix == ".so"
    assert kept(tmp_path) == [made]
    assert made.stat().st_mtime_ns == written


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 0.999])
def test_a_truncated_library_is_compiled_anew(tmp_path: Path, small: Path, share: float) -> None:
    assert answer(small) == 42
    (made,) = kept(tmp_path)
    whole = made.read_bytes()
    made.unlink()  # its pages are in this process
    made.write_bytes(whole[: int(share * len(whole))])
    assert answer(small) == 42
    assert [path.stat().st_size for path in kept(tmp_path)] == [len(whole)]


@pytest.fixture
def unknown_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """No home, and a temporary folder; the folder of the cache in it."""

    def nowhere(_: type[Path]) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", classmethod(nowhere))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path / f"rlt_dist-{os.getuid()}"


def test_a_user_without_a_home_has_a_cache_that_nobody_else_can_write(
    unknown_user: Path, small: Path
) -> None:
    assert answer(small) == 42
    assert answer(small) == 42
    assert unknown_user.stat().st_mode & 0o777 == 0o700
    assert [path.suffix for path in unknown_user.iterdir()] == [".so"]


def test_a_temporary_folder_that_others_may_have_written_to_is_not_used(
    unknown_user: Path, tmp_path: Path
) -> None:
    unknown_user.mkdir()
    unknown_user.chmod(0o770)
    is_an_error_and_auto_goes_on("set HOME or XDG_CACHE_HOME")
    unknown_user.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    unknown_user.symlink_to(tmp_path / "elsewhere")
    forget()
    is_an_error_and_auto_goes_on("set HOME or XDG_CACHE_HOME")


def test_cxx_may_be_words_and_empty_is_unset(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: Path
) -> None:
    assert answer(small) == 42
    monkeypatch.setenv("CXX", "")
    assert answer(small) == 42
    assert len(kept(tmp_path)) == 1
    wrapper = script(tmp_path / "wrapper", 'exec "$@"')
    for count, words in enumerate([f"{wrapper} g++", "g++ -g0"], 2):
        monkeypatch.setenv("CXX", words)
        assert answer(small) == 42
        assert len(kept(tmp_path)) == count


def test_another_version_of_the_compiler_compiles_anew(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, small: Path
) -> None:
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    for count, version in enumerate(["1", "2", "2"]):
        script(tmp_path / "c++", f'g++ "$@" && echo {version}')
        assert answer(small) == 42
        assert len(kept(tmp_path)) == min(count + 1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_type_that_is_not_compiled_runs_in_torch_unless_native_is_asked_for(
    dtype: torch.dtype,
) -> None:
    config = RltConfig(d_model=16, heads=2, ffn=24, encoder_layers=1, decoder_layers=1)
    tokens = torch.arange(5)[None]
    start = torch.zeros_like(tokens, dtype=torch.bool)

    def output(backend: Backend) -> torch.Tensor:
        model = initial_model(config, 7, 0, dtype, Recurrence(backend))
        return model(tokens, start, model.empty_state(1))[0]

    assert torch.equal(output("auto"), output("python"))
    with pytest.raises(UserError, match=str(dtype).removeprefix("torch.")):
        output("native")
