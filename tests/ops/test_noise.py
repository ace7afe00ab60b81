"""Masks are a pure function of names and numbers, and look random in each of them."""

import pytest
import torch

from rlt_dist.models.dropout import Dropout
from rlt_dist.ops.noise import Noise, masked, seed_from, uniform_bits

LANES = torch.arange(4)
SHAPE = (50, 40)
WORD = (1 << 64) - 1


def mixed(x: int) -> int:
    """The finaliser of splitmix64 on Python's integers."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & WORD
    return x ^ (x >> 31)


@pytest.mark.parametrize("stream", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_bits_are_those_of_splitmix64(stream):
    bits = uniform_bits(torch.tensor([stream]), (2, 3)).flatten().tolist()
    start = mixed(stream & WORD)
    wanted = [mixed((start + i * 0x9E3779B97F4A7C15) & WORD) >> 40 for i in range(1, 7)]
    assert bits == wanted


def test_masks_never_change_from_one_version_to_the_next():
    """A run that is restarted under new code must drop what the old code would have dropped."""
    assert seed_from(7, "embed.weight") == 385582226335460673
    mask = Noise(1, 2, torch.tensor([3])).lane_mask(0.5, "encoder.ffn", 1, (12,))
    assert (mask[0] / 2).int().tolist() == [1, 0, 0, 0, 1, 1, 0, 0, 0, 1, 1, 0]


def test_bits_are_uniform():
    bits = uniform_bits(torch.arange(8), (10000,)).double() / 2**24
    assert bits.min() >= 0
    assert bits.max() < 1
    assert bits.mean().item() == pytest.approx(0.5, abs=0.005)
    assert bits.var().item() == pytest.approx(1 / 12, rel=0.02)
    counts = torch.histc(bits, 16, 0, 1) / bits.numel()
    assert (counts - 1 / 16).abs().max() < 0.002


def test_seeds_of_different_parts_differ():
    parts = [(1, "23"), (12, "3"), (123,), ("1", "2", "3"), (1, "2", "3", ""), (1, "32")]
    assert len({seed_from(*part) for part in parts}) == len(parts)
    assert 0 <= seed_from(7, "embed.weight") < 2**64


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_a_mask_drops_its_share_and_preserves_the_expectation(p):
    mask = Noise(0, 0, LANES).lane_mask(p, "site", 0, (200, 50))
    assert mask.shape == (4, 200, 50)
    assert (mask == 0).double().mean().item() == pytest.approx(p, abs=0.015)
    assert mask[mask != 0].unique().tolist() == pytest.approx([1 / (1 - p)])
    assert mask.mean().item() == pytest.approx(1.0, abs=0.06)


VARIANTS = {
    "seed": (Noise(1, 0, LANES), "site", 0),
    "step": (Noise(0, 1, LANES), "site", 0),
    "lane": (Noise(0, 0, LANES + 1), "site", 0),
    "far lane": (Noise(0, 0, LANES + 10**6), "site", 0),
    "site": (Noise(0, 0, LANES), "other", 0),
    "layer": (Noise(0, 0, LANES), "site", 1),
    "site and layer": (Noise(0, 0, LANES), "site1", 0),
}


@pytest.mark.parametrize("what", VARIANTS)
def test_masks_that_differ_in_one_name_are_independent(what):
    noise, site, layer = VARIANTS[what]
    mask = Noise(0, 0, LANES).lane_mask(0.5, "site", 0, SHAPE)
    other = noise.lane_mask(0.5, site, layer, SHAPE)
    assert (mask == other).double().mean().item() == pytest.approx(0.5, abs=0.03)


def test_lanes_of_a_mask_are_independent():
    mask = Noise(0, 0, torch.arange(16)).lane_mask(0.5, "site", 0, SHAPE).flatten(1) - 1
    correlation = mask @ mask.T / mask.shape[1] - torch.eye(16)
    assert correlation.abs().max() < 0.1


def test_a_lane_keeps_its_mask_in_any_micro_batch_and_a_token_in_any_length():
    whole = Noise(5, 9, torch.arange(6)).lane_mask(0.3, "site", 2, (8, 3))
    part = Noise(5, 9, torch.tensor([4, 1])).lane_mask(0.3, "site", 2, (5, 3))
    assert torch.equal(part, whole[[4, 1], :5])


def test_torchs_own_generator_is_neither_read_nor_moved():
    noise = Noise(5, 9, LANES)
    before = torch.get_rng_state()
    mask = noise.lane_mask(0.3, "site", 0, SHAPE)
    assert torch.equal(before, torch.get_rng_state())
    torch.manual_seed(99)
    assert torch.equal(mask, noise.lane_mask(0.3, "site", 0, SHAPE))


def test_a_shared_mask_is_the_same_for_all_lanes():
    masks = [Noise(5, 9, lanes).shared_mask(0.5, "site", SHAPE) for lanes in (LANES, LANES + 7)]
    assert masks[0].shape == SHAPE
    assert torch.equal(*masks)
    other = Noise(5, 9, LANES).shared_mask(0.5, "other", SHAPE)
    assert (other == masks[0]).double().mean().item() == pytest.approx(0.5, abs=0.06)


@pytest.mark.parametrize("dropout", [Dropout(0.5, None), Dropout(0.0, Noise(0, 0, LANES))])
def test_nothing_drops_in_evaluation_or_at_probability_zero(dropout):
    x = torch.randn(4, 5, 6)
    assert dropout.mask("site", 0, (5, 6)) is None
    assert dropout.shared_mask("site", (5, 6)) is None
    assert torch.equal(dropout(x, "site"), x)


def test_dropping_applies_the_mask_to_each_lane():
    x = torch.randn(4, 5, 6)
    dropout = Dropout(0.5, Noise(0, 0, LANES))
    assert torch.equal(dropout(x, "site", 3), x * dropout.mask("site", 3, (5, 6)))


@pytest.mark.parametrize("p", [0.1, 0.2, 0.3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_masking_keeps_the_precision_and_the_expectation(dtype, p):
    """In bfloat16 the factor 1 / 0.9, rounded by itself, would shrink every sum by 0.16%."""
    x = torch.linspace(1, 2, 4096).to(dtype)
    kept = masked(x, torch.full((4096,), 1 / (1 - p)))
    assert kept.dtype == dtype
    assert kept.double().mean().item() == pytest.approx(x.double().mean().item() / (1 - p), 2e-4)
