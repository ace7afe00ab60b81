"""Which implementation computes: by what is here, unless RLT_DIST_OPS says otherwise."""

import subprocess
import sys
import textwrap
from collections.abc import Iterator

import pytest
import torch
from recurrence_problem import Case, problem

from rlt_dist.inference.forward import kind, recurrence
from rlt_dist.ops import choice
from rlt_dist.ops.choice import VARIABLE, takes_triton
from rlt_dist.ops.recurrence import dispatch
from rlt_dist.ops.recurrence.dispatch import Backend, Recurrence
from rlt_dist.ops.recurrence.loop import PythonLoop
from rlt_dist.ops.seam import WHOLE
from rlt_dist.util.errors import UserError


@pytest.fixture(autouse=True)
def nothing_asked_for(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    choice._installed.cache_clear()
    yield
    choice._installed.cache_clear()


@pytest.fixture
def no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)


class Loop:
    """Stands for a loop that cannot be imported here."""


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_triton", lambda: "triton")
    monkeypatch.setattr(dispatch, "_native", lambda _: "native")


def taken(
    backend: Backend,
    device: str,
    products: torch.dtype = torch.float32,
    width: int = 128,
    window: int = 8,
) -> str | type[PythonLoop] | None:
    dtype = torch.float64 if products == torch.float64 else torch.float32
    return dispatch._loop(backend, dispatch.Kind(device, dtype, products, width, window), WHOLE)


@pytest.mark.usefixtures("loops")
def test_auto_takes_triton_on_a_gpu_and_the_compiled_loop_on_a_cpu() -> None:
    pytest.importorskip("triton")
    assert taken("auto", "cuda", torch.bfloat16) == "triton"
    assert taken("auto", "cuda", torch.float64) is PythonLoop
    assert taken("auto", "cpu") == "native"
    assert taken("auto", "cpu", torch.bfloat16) == "native"  # products alone: operands are float32


@pytest.mark.usefixtures("loops")
def test_kernels_of_float32_run_only_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert taken("auto", "cuda") is PythonLoop
    assert taken("triton", "cuda") == "triton"
    assert not takes_triton("cuda", torch.float32)
    assert takes_triton("cuda", torch.bfloat16)
    monkeypatch.setenv(VARIABLE, "triton")
    assert takes_triton("cuda", torch.float32)


@pytest.mark.usefixtures("loops")
def test_heads_that_no_block_holds_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    assert taken("auto", "cuda", torch.bfloat16, 129) is PythonLoop
    assert not takes_triton("cuda", torch.bfloat16, 129)
    with pytest.raises(UserError, match=r"ops\.recurrence: .* heads of at most 128, not 129"):
        taken("triton", "cuda", torch.bfloat16, 129)
    monkeypatch.setenv(VARIABLE, "triton")
    with pytest.raises(UserError, match=r"RLT_DIST_OPS=triton: .* heads of at most 128, not 256"):
        takes_triton("cuda", torch.bfloat16, 256)


@pytest.mark.usefixtures("loops")
@pytest.mark.parametrize(("width", "most"), [(128, 64), (65, 64), (64, 128), (20, 128)])
def test_windows_that_no_block_holds_are_torchs(width: int, most: int) -> None:
    pytest.importorskip("triton")
    assert taken("auto", "cuda", torch.bfloat16, width, most) == "triton"
    assert taken("auto", "cuda", torch.bfloat16, width, most + 1) is PythonLoop
    said = rf"ops\.recurrence: .* at most {most} entries for heads of {width}, not {most + 1}"
    with pytest.raises(UserError, match=said):
        taken("triton", "cuda", torch.bfloat16, width, most + 1)


def test_a_window_is_refused_before_training_starts_and_in_a_step(configure, tmp_path) -> None:
    pytest.importorskip("triton")
    choices = "ops.recurrence=triton", "train.precision=bfloat16", "model.window=4096"
    config = configure(tmp_path, "rlt1", *choices)
    with pytest.raises(UserError, match="at most 128 entries for heads of 8, not 4096"):
        recurrence(config).prepare(kind(config, "cuda"))
    plan, operands = problem(Case(window=129))
    operands = operands.like([tensor.float() for tensor in operands.flat()])
    with pytest.raises(UserError, match="at most 128 entries for heads of 4, not 129"):
        Recurrence("triton").loop(plan, operands)


@pytest.mark.parametrize("name", ["rlt1", "xl"])
def test_heads_are_refused_before_training_starts(configure, tmp_path, name: str) -> None:
    pytest.importorskip("triton")
    choices = "ops.recurrence=triton", "train.precision=bfloat16", "model.d_head=256"
    config = configure(tmp_path, name, *choices)
    with pytest.raises(UserError, match="heads of at most 128, not 256"):
        recurrence(config).prepare(kind(config, "cuda"))


@pytest.mark.usefixtures("loops", "no_triton")
def test_auto_without_triton_goes_on_in_torch_on_a_gpu() -> None:
    assert taken("auto", "cuda", torch.bfloat16) is PythonLoop
    with pytest.raises(UserError, match=r"ops\.recurrence: triton is not installed; pip install"):
        taken("triton", "cuda")


@pytest.mark.usefixtures("loops")
def test_triton_off_a_gpu_needs_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    with pytest.raises(UserError, match=r"ops\.recurrence: .*need a GPU.*TRITON_INTERPRET=1"):
        taken("triton", "cpu")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert taken("triton", "cpu") == "triton"
    assert taken("auto", "cpu") == "native"
    with pytest.raises(UserError, match="not in float64"):
        taken("triton", "cpu", torch.float64)


@pytest.mark.parametrize("wish", ["reference", "triton", "native"])
def test_the_environment_overrides_the_configuration(
    configure, tmp_path, monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    config = configure(tmp_path, "rlt1", "ops.recurrence=python", "train.precision=float32")
    assert recurrence(config).backend == "python"
    monkeypatch.setenv(VARIABLE, wish)
    assert recurrence(config).backend == wish


def test_an_implementation_that_is_none_is_named_with_those_that_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(VARIABLE, "tritn")
    with pytest.raises(UserError, match="'tritn' is none of reference, triton, native"):
        takes_triton("cpu", torch.float32)


def test_operations_on_a_cpu_take_kernels_only_where_asked_and_interpreted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    here = "cpu", torch.float32
    assert not takes_triton(*here)
    monkeypatch.setenv(VARIABLE, "reference")
    assert not takes_triton(*here)
    monkeypatch.setenv(VARIABLE, "triton")
    with pytest.raises(UserError, match=f"{VARIABLE}=triton: triton's kernels need a GPU"):
        takes_triton(*here)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert takes_triton(*here)


def test_float64_is_no_kernels_type_and_the_configuration_says_so(configure, tmp_path) -> None:
    with pytest.raises(UserError, match="triton computes in bfloat16 and float32"):
        configure(tmp_path, "rlt1", "ops.recurrence=triton", "train.precision=float64")


@pytest.mark.parametrize(
    ("wish", "override", "said"),
    [
        ("triton", "train.precision=float64", "computes in bfloat16 and float32, and"),
        ("reference", "recompute.decoder_chunk=2", "keeps everything for backward"),
    ],
)
def test_the_environment_gets_nothing_that_the_configuration_could_not(
    configure, tmp_path, monkeypatch: pytest.MonkeyPatch, wish: str, override: str, said: str
) -> None:
    config = configure(tmp_path, "rlt1", override)
    monkeypatch.setenv(VARIABLE, wish)
    with pytest.raises(UserError, match=f"{VARIABLE}={wish}: {wish} {said}"):
        recurrence(config)


@pytest.mark.usefixtures("no_triton")
def test_doctor_says_how_triton_is_installed(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "triton")
    monkeypatch.setenv("COLUMNS", "200")
    _, out, _ = command("doctor")
    assert "pip install 'rlt_dist[triton]'" in out


def test_the_package_and_its_commands_need_no_triton() -> None:
    """Every module is imported where triton cannot be, but for the kernels' own files."""
    script = """
        import importlib, pkgutil, sys

        class Without:
            def find_spec(self, name, *_):
                if name.split(".")[0] == "triton":
                    raise ModuleNotFoundError(f"No module named {name!r}", name="triton")

        sys.meta_path.insert(0, Without())
        import rlt_dist
        from rlt_dist.cli.main import main
        for found in pkgutil.walk_packages(rlt_dist.__path__, "rlt_dist."):
            if found.name == "rlt_dist.__main__":
                continue
            try:
                importlib.import_module(found.name)
            except ModuleNotFoundError as error:
                assert error.name == "triton", error
                print(found.name)
        for words in (["doctor"], ["kernels", "list"]):
            sys.argv = ["rlt-dist", *words]
            try:
                main()
            except SystemExit as end:
                print(words[0], end.code)
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    names = [line for line in done.stdout.splitlines() if line.startswith("rlt_dist.")]
    kernels = ("rlt_dist.ops.triton.", "rlt_dist.ops.recurrence.triton_", "rlt_dist.bench.kernels")
    assert all(name.startswith(kernels) for name in names)
    assert "doctor 0" in done.stdout
    assert "kernels 2" in done.stdout
    assert "kernels need triton, which is not installed" in done.stderr
