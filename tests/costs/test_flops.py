"""FLOPs of every variant of the models against torch's own counter."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rlt_dist.config.model import GruConfig, ModelConfig, RltConfig, TransformerXLConfig
from rlt_dist.costs.effort import Purpose
from rlt_dist.costs.flops import model_flops
from rlt_dist.costs.sizes import Pass
from rlt_dist.models.build import initial_model
from rlt_dist.models.state import detach
from rlt_dist.models.transformer_xl.adaptive import Clusters
from rlt_dist.ops.recurrence.dispatch import Recurrence

RLT = {"d_model": 16, "heads": 4, "ffn": 20, "encoder_layers": 2, "decoder_layers": 3}
RLT |= {"window": 3, "memory_len": 9}
XL = {"d_model": 16, "heads": 4, "d_inner": 20, "layers": 2, "memory_len": 9}
VOCABULARY = 37

VARIANTS: dict[str, ModelConfig] = {
    "rlt0": RltConfig(**RLT, feedback=0),
    "rlt1": RltConfig(**RLT, feedback=1),
    "rlt2, chunks of 3": RltConfig(**RLT, feedback=3),
    "rlt2, chunks of 5": RltConfig(**RLT, feedback=5),
    "rlt2, chunks longer than a segment": RltConfig(**RLT, feedback=11),
    "tied": RltConfig(**RLT | {"decoder_layers": 2}, tied=True),
    "tied output": RltConfig(**RLT, tie_output=True),
    "grouped heads": RltConfig(**RLT, kv_heads=2),
    "one head of keys": RltConfig(**RLT, kv_heads=1, feedback=3),
    "wide heads": RltConfig(**RLT, d_head=6),
    "three groups of memory": RltConfig(**RLT, memory_groups=3),
    "no memory": RltConfig(**RLT | {"memory_len": 0}),
    "short memory": RltConfig(**RLT | {"memory_len": 2, "window": 1}),
    "dropout": RltConfig(**RLT, dropout=0.1),
    "fed with tokens": RltConfig(**RLT, feedback_from="token"),
    "transformer": RltConfig(**RLT | {"decoder_layers": 0}, feedback=0),
    "gru": GruConfig(d_model=16, layers=2),
    "xl": TransformerXLConfig(**XL),
    "xl, norms before": TransformerXLConfig(**XL, pre_norm=True),
    "xl without memory": TransformerXLConfig(**XL | {"memory_len": 0}),
    "xl, clamped": TransformerXLConfig(**XL, clamp_len=5, same_length=True),
    "xl, wide heads": TransformerXLConfig(**XL, d_head=6),
    "xl, adaptive": TransformerXLConfig(**XL, cutoffs=(10, 20), div_val=2),
    "xl, adaptive, untied": TransformerXLConfig(
        **XL, cutoffs=(10, 20), div_val=2, tie_projections=False
    ),
    "xl, adaptive, one width": TransformerXLConfig(**XL, cutoffs=(10, 20)),
}
CARRIED = {"nothing": 0, "a memory that still fills": 1, "a full memory": 3}
"""Segments read before the one that is counted."""


def batch(lanes: int, tokens: int, segments: int) -> tuple[Tensor, Tensor]:
    """Tokens of some segments and one more, and that no document starts behind the first."""
    drawn = torch.randint(
        VOCABULARY,
        (lanes, tokens * (segments + 1) + 1),
        generator=torch.Generator().manual_seed(0),
    )
    return drawn, torch.zeros(lanes, tokens, dtype=torch.bool)


def pass_of(config: ModelConfig, targets: Tensor, lanes: int, tokens: int, before: int) -> Pass:
    tails: tuple[int, ...] = ()
    if isinstance(config, TransformerXLConfig):
        clusters = Clusters(config.cutoffs, VOCABULARY)
        cluster = clusters.of(targets)
        tails = tuple(int((cluster == i).sum()) for i in range(1, clusters.tails + 1))
    return Pass(lanes, tokens, before * tokens, len(targets), tails)


def compare(counted: Any, config: ModelConfig, lanes: int, tokens: int, before: int) -> None:
    """Forward, and forward with backward, of a segment behind some others."""
    model = initial_model(config, VOCABULARY, 0, recurrence=Recurrence("reference"))
    drawn, start = batch(lanes, tokens, before)
    state = model.empty_state(lanes)
    for i in range(before):
        with torch.no_grad():
            _, state = model(drawn[:, i * tokens : (i + 1) * tokens], start, state)
    here, targets = drawn[:, before * tokens :], drawn[:, before * tokens + 1 :].flatten()
    own = pass_of(config, targets, lanes, tokens, before)
    flops = model_flops(config, VOCABULARY, own)
    with counted() as all_of_it:
        with counted() as forward:
            output, _ = model(here[:, :-1], start, detach(state))
        model.loss(output.flatten(0, 1), targets).backward()
    layers = [of for piece, of in flops.items() if piece != "head"]
    assert forward.get_total_flops() == sum(of[Purpose.FORWARD] for of in layers)
    assert all_of_it.get_total_flops() == sum(sum(of.values()) for of in flops.values())


@pytest.mark.parametrize("before", CARRIED.values(), ids=CARRIED)
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_as_many_flops_as_torch_counts(counted: Any, config: ModelConfig, before: int) -> None:
    compare(counted, config, lanes=3, tokens=7, before=before)


@st.composite
def small(draw: st.DrawFn) -> ModelConfig:
    """Any small configuration of either model."""
    heads, width = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([2, 4]))
    layers, memory_len = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    if draw(st.booleans()):
        cutoffs = draw(st.sampled_from([(), (10, 20)]))
        return TransformerXLConfig(
            d_model=8,
            heads=heads,
            d_head=width,
            d_inner=draw(st.integers(1, 9)),
            layers=layers,
            memory_len=memory_len,
            same_length=draw(st.booleans()),
            clamp_len=draw(st.sampled_from([None, 3])),
            cutoffs=cutoffs,
            div_val=draw(st.sampled_from([1, 2])) if cutoffs else 1,
            pre_norm=draw(st.booleans()),
            tie_projections=draw(st.booleans()),
        )
    tied = draw(st.booleans())
    decoder = layers if tied else draw(st.integers(1, 3))
    return RltConfig(
        d_model=8,
        heads=heads,
        d_head=width,
        kv_heads=draw(st.sampled_from([n for n in (1, 2, 4) if heads % n == 0])),
        ffn=draw(st.integers(1, 9)),
        encoder_layers=layers,
        decoder_layers=decoder,
        window=draw(st.integers(1, 4)),
        memory_groups=draw(st.integers(1, decoder)),
        memory_len=memory_len,
        feedback=draw(st.integers(0, 6)),
        tied=tied,
        tie_output=draw(st.booleans()),
    )


@given(small(), st.integers(1, 3), st.integers(1, 7), st.integers(0, 2))
@settings(max_examples=25)
def test_any_configuration_has_the_flops_that_torch_counts(
    counted: Any, config: ModelConfig, lanes: int, tokens: int, before: int
) -> None:
    compare(counted, config, lanes, tokens, before)
