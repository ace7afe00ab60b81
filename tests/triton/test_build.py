"""Kernels are compiled without a GPU, and what is unfit about one is said."""

from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest

pytest.importorskip("triton")

from rlt_dist.config.load import load_typed
from rlt_dist.config.run import RunConfig
from rlt_dist.ops.choice import size_trouble
from rlt_dist.ops.triton import kernel_files
from rlt_dist.ops.triton.build import CHIPS, build_all
from rlt_dist.ops.triton.shapes import Shapes, shapes_of
from rlt_dist.util.errors import UserError

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = Shapes(
    model="transformer_xl",
    d=256,
    heads=4,
    kv_heads=4,
    width=64,
    inner=512,
    lanes=2,
    tokens=32,
    memory=32,
    softmaxes=((100, 256),),
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a file of kernels."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    return "small_kernels"


def shapes(name: str, vocabulary: int, *overrides: str) -> Shapes:
    """Of a published model on one GPU."""
    overrides = ("train.precision=bfloat16", "mesh.tensor=1", *overrides)
    return shapes_of(load_typed(CONFIGS / f"{name}.yaml", RunConfig, overrides), vocabulary)


LARGE = {
    "48+48": shapes("rlt_48x48", 32000),
    "48+48 with 2 key/value heads": shapes("rlt_48x48", 32000, "model.kv_heads=2"),
    "enwik8": shapes("txl_enwik8_large", 257),
    "WikiText-103": shapes("txl_wt103_large", 267735),
}


def test_a_product_is_formed_by_each_chips_matrix_instructions(small: str) -> None:
    built = list(build_all([small], SMALL, list(CHIPS), workers=2))
    found = {one.target: one.instruction for one in built}
    assert found == {
        "sm_80": "mma.sync",
        "sm_90": "wgmma",
        "sm_100": "tcgen05.mma",
        "gfx942": "v_mfma",
    }
    assert all(one.trouble == () and one.registers > 0 for one in built)


def test_what_is_unfit_is_named(small: str) -> None:
    built = build_all([small], replace(SMALL, lanes=1), ["sm_90"], workers=2)
    found = {one.name: "; ".join(one.trouble) for one in built}
    assert found.pop("product") == ""
    assert found.pop("exact") == "a product without matrix instructions"
    assert "bytes a thread do not fit into registers" in found["large"]
    assert "bytes of shared memory, of 232448" in found.pop("large")
    assert "does not compile: " in found.pop("impossible")
    assert found == {}


@pytest.mark.parametrize("width", [128, 64])
def test_the_longest_window_is_fit(width: int) -> None:
    """The longest that `ops.choice` lets through."""
    longest = next(window for window in count(1) if size_trouble(width, window + 1))
    large = replace(LARGE["48+48"], width=width, window=longest)
    built = list(build_all(["rlt_dist.ops.triton.window"], large, ["sm_90", "gfx942"]))
    assert {f"{one.name} for {one.target}": one.trouble for one in built if one.trouble} == {}


@pytest.mark.parametrize("name", LARGE)
def test_every_kernel_is_fit_for_the_published_models(name: str) -> None:
    """No spills, shared memory that a chip has, matrix instructions: see `Built.trouble`."""
    files = [module.__name__ for module in kernel_files()]
    built = list(build_all(files, LARGE[name], ["sm_90", "gfx942"]))
    assert built
    assert {f"{one.name} for {one.target}": one.trouble for one in built if one.trouble} == {}


def test_a_configuration_gives_shapes_of_one_process() -> None:
    whole = shapes("txl_wt103_large", 267735)
    cut = shapes("txl_wt103_large", 267735, "mesh.tensor=2")
    assert (whole.heads, whole.inner, whole.lanes) == (16, 4096, 8)
    assert whole.softmaxes == ((20003, 1024), (20000, 256), (160000, 64), (67735, 16))
    assert (cut.heads, cut.inner) == (8, 2048)
    assert cut.softmaxes == ((10003, 1024), (10000, 256), (80000, 64), (33868, 16))
    shared = shapes("rlt_48x48", 32000, "model.kv_heads=2", "mesh.tensor=4")
    assert (shared.heads, shared.kv_heads, shared.inner) == (4, 1, 1366)
    assert (shared.window, shared.chunk, shared.part, shared.memory) == (8, 1, 64, 512)
    whole_segment = shapes("rlt_48x48", 32000, "model.feedback=0", "recompute.decoder_chunk=auto")
    assert (whole_segment.chunk, whole_segment.part) == (512, 512)
    of_tokens = shapes("rlt_48x48", 32000, "model.feedback_from=token", "mesh.pipeline=1")
    assert of_tokens.chunk == 512


@pytest.mark.parametrize("of", ["d_head=160", "window=65"])
def test_sizes_that_no_kernel_has_are_not_built(of: str) -> None:
    with pytest.raises(UserError, match=rf"kernels have .* at most .*, not {of.split('=')[1]}"):
        shapes("rlt_48x48", 32000, f"model.{of}")


def test_kernels_have_no_float64() -> None:
    with pytest.raises(UserError, match="no kernel computes in float64"):
        shapes("rlt_48x48", 32000, "train.precision=float64")
