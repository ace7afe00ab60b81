"""The repository's configurations, and how many parameters they have: published, derived, built."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlt_dist.config.load import load_typed
from rlt_dist.config.model import ModelConfig, RltConfig, TransformerXLConfig
from rlt_dist.config.run import RunConfig
from rlt_dist.mesh.axes import Axes
from rlt_dist.ops.seam import WHOLE
from rlt_dist.parallel.local import build_local
from rlt_dist.parallel.plan.counts import count_parameters
from rlt_dist.parallel.plan.layout import blueprint
from rlt_dist.parallel.plan.placement import place

FILES = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))
ALONE = Axes(1, 1, 1)


def load(name: str, *overrides: str) -> RunConfig:
    (file,) = [file for file in FILES if file.stem == name]
    return load_typed(file, RunConfig, overrides)


@pytest.mark.parametrize("name", [file.stem for file in FILES])
def test_every_configuration_is_read_and_each_stage_of_it_built_without_numbers(name: str) -> None:
    config = load(name)
    vocabulary = max(getattr(config.model, "cutoffs", ()), default=0) + 1009
    stages = place(config.bounded_model, config.mesh.pipeline)
    models = [blueprint(config.bounded_model, vocabulary, stage) for stage in stages]
    assert all(p.is_meta for model in models for p in model.parameters())
    held = {name for model in models for name, _ in model.named_parameters()}
    (whole,) = place(config.model, 1)
    assert held == {
        name for name, _ in blueprint(config.model, vocabulary, whole).named_parameters()
    }


ENWIK8_BASE = ["layers=12", "d_model=512", "heads=8", "d_inner=2048"]
WT103_BASE = ["layers=16", "d_model=410", "heads=10", "d_inner=2100", "div_val=1"]


@pytest.mark.parametrize(
    ("name", "overrides", "vocabulary", "parameters"),
    [
        ("txl_enwik8_large", [], 204, 277_231_820),
        ("txl_wt103_large", [], 267_735, 285_170_506),
        ("txl_enwik8_large", ENWIK8_BASE, 204, 41_055_436),
        ("txl_wt103_large", WT103_BASE, 267_735, 151_107_538),
    ],
)
def test_as_many_parameters_as_in_the_authors_code(
    name: str, overrides: list[str], vocabulary: int, parameters: int
) -> None:
    model = load(name, *(f"model.{override}" for override in overrides)).model
    assert count_parameters(model, vocabulary, ALONE).parameters == parameters


@pytest.mark.parametrize("tied", [True, False])
def test_the_reference_model_has_what_its_equations_name(tied: bool) -> None:
    d, layers, ffn, vocabulary = 2048, 48, 5461, 32_000
    attention, feed_forward = 4 * d * d, 3 * d * ffn
    expected = {
        "embedding": vocabulary * d,
        "encoder": layers * (attention + feed_forward + 2 * d),
        "memory": d + 2 * d * d,
        "merge": d + (2 * d * d + d) + d * d + d,
        "decoder": layers * (2 * d * d + 3 * d),
        "head": d + vocabulary * d,
    }
    if not tied:
        expected["decoder"] += layers * (attention + feed_forward)
    counts = count_parameters(load("rlt_48x48", f"model.tied={tied}").model, vocabulary, ALONE)
    assert counts.pieces == expected
    assert counts.parameters == sum(expected.values()) == (2_971_019_264 if tied else 5_386_840_064)


def test_the_narrow_twins_have_all_layers() -> None:
    for name in ("rlt_48x48", "txl_wt103_large", "txl_enwik8_large"):
        large, narrow = load(name), load(f"{name}_cpu")
        names = ["encoder_layers", "decoder_layers", "tied", "window", "feedback"]
        names += ["layers", "div_val", "pre_norm", "dropout", "dropatt"]
        for key in [f"model.{key}" for key in names] + ["state.reset"]:
            assert large.leaves().get(key) == narrow.leaves().get(key), key


@st.composite
def models(draw: st.DrawFn) -> tuple[ModelConfig, int, Axes]:
    """A small model of either kind, a vocabulary, and a mesh that it can be cut to."""
    axes = Axes(1, draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4])))
    layers = draw(st.integers(axes.pipeline, 4))
    vocabulary, inner = draw(st.integers(29, 40)), draw(st.integers(13, 16))
    if draw(st.booleans()):
        tied = draw(st.booleans())
        return (
            RltConfig(
                d_model=8,
                d_head=2,
                heads=4,
                kv_heads=draw(st.sampled_from([1, 2, 4])),
                ffn=inner,
                encoder_layers=layers,
                decoder_layers=layers if tied else draw(st.integers(axes.pipeline, 4)),
                memory_groups=draw(st.integers(1, axes.pipeline)),
                feedback=draw(st.integers(0, 2)),
                tied=tied,
                tie_output=draw(st.booleans()),
            ),
            vocabulary,
            axes,
        )
    adaptive = {"cutoffs": (11, 19), "div_val": draw(st.sampled_from([1, 2]))}
    chosen = adaptive if draw(st.booleans()) else {}
    model = TransformerXLConfig(
        d_model=8, heads=4, d_inner=inner, layers=layers, memory_len=4, **chosen
    )
    return model, vocabulary, axes


@settings(max_examples=25, deadline=None)
@given(models())
def test_every_rank_holds_what_is_counted_for_it(case: tuple[ModelConfig, int, Axes]) -> None:
    config, vocabulary, axes = case
    counts = count_parameters(config, vocabulary, axes)
    counted_once = 0
    for rank in range(axes.size):
        where = axes.place(rank)
        local = build_local(config, vocabulary, 0, axes, where, WHOLE)
        share = counts.shares[rank]
        assert (share.stage, share.tensor) == (where.stage, where.tensor)
        assert share.parameters == sum(p.numel() for p in local.parameters.values())
        once = (p.numel() for name, p in local.parameters.items() if local.counted(name))
        counted_once += sum(once)
    assert counts.parameters == counted_once
    held = [share.parameters for share in counts.shares]
    assert max(counts.largest(stage).parameters for stage in range(axes.pipeline)) == max(held)
