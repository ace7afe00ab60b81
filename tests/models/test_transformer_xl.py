"""What a user of Transformer-XL relies on, in float64 unless a test is about precision."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from rlt_dist.config.model import TransformerXLConfig
from rlt_dist.models.build import initial_model
from rlt_dist.models.state import State, restart_lanes, select_lanes
from rlt_dist.models.transformer_xl.model import TransformerXL
from rlt_dist.ops.noise import Noise, WeightMask
from rlt_dist.ops.relative import attend_relative, sinusoids
from rlt_dist.util.errors import UserError

VOCABULARY = 11
ADAPTIVE: dict[str, Any] = {"cutoffs": (3, 7), "div_val": 2}
VARIANTS: list[dict[str, Any]] = [
    {},
    {"pre_norm": True},
    {"clamp_len": 3},
    ADAPTIVE,
    {"cutoffs": (3, 7), "pre_norm": True},
]


def build(seed: int = 0, vocabulary: int = VOCABULARY, **options: Any) -> TransformerXL:
    """A tiny model none of whose parameters is at a special value such as 0 or 1."""
    sizes = {"d_model": 8, "heads": 2, "d_inner": 12, "layers": 2, "memory_len": 5}
    model = TransformerXL(TransformerXLConfig.model_validate({**sizes, **options}), vocabulary)
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        with torch.no_grad():
            parameter.copy_(0.5 * values + (1.0 if "norm.weight" in name else 0.0))
    return model.double()


def rebuild(model: TransformerXL, **options: Any) -> TransformerXL:
    """The same parameters under another configuration."""
    other = build(**{**model.config.model_dump(), **options})
    other.load_state_dict(model.state_dict())
    return other


def tokens(rows: int, length: int, seed: int = 1) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (rows, length), generator=generator)


def run(
    model: TransformerXL,
    ids: Tensor,
    lengths: list[int] | None = None,
    starts: Tensor | None = None,
    state: State | None = None,
    noise: Noise | None = None,
) -> tuple[Tensor, State]:
    """Outputs [b, T, d] and the last state of ids [b, T] run in segments of the given lengths."""
    lengths = [ids.shape[1]] if lengths is None else lengths
    starts = torch.zeros_like(ids, dtype=torch.bool) if starts is None else starts
    state = model.empty_state(len(ids)) if state is None else state
    outputs = []
    for part, begins in zip(ids.split(lengths, 1), starts.split(lengths, 1), strict=True):
        output, state = model(part, begins, state, noise)
        outputs.append(output)
    return torch.cat(outputs, 1), state


def assert_close(x: Tensor, y: Tensor, tolerance: float = 1e-10) -> None:
    assert x.shape == y.shape
    assert (x - y).abs().max() <= tolerance * y.abs().max().clamp(min=1e-6)


@pytest.mark.parametrize("options", VARIANTS)
@pytest.mark.parametrize("lengths", [[1] * 17, [4, 4, 4, 5], [1, 9, 2, 5], [12, 5]])
def test_same_length_results_do_not_depend_on_where_segments_are_cut(
    options: dict[str, Any], lengths: list[int]
) -> None:
    model, ids = build(same_length=True, **options), tokens(3, 17)
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[0, 6] = starts[1, 13] = True
    whole, whole_state = run(model, ids, starts=starts)
    pieces, pieces_state = run(model, ids, lengths, starts)
    assert_close(pieces, whole)
    for name, tensor in whole_state.items():
        assert_close(pieces_state[name].double(), tensor.double())


def test_same_length_shows_a_query_mem_len_keys_itself_included() -> None:
    model, ids = build(layers=1, memory_len=4, same_length=True), tokens(1, 9)
    changed = ids.clone()
    changed[0, 2] = (ids[0, 2] + 1) % VOCABULARY
    difference = (run(model, ids, [5, 4])[0] - run(model, changed, [5, 4])[0]).abs().amax(-1)[0]
    assert difference.nonzero()[:, 0].tolist() == [2, 3, 4, 5]


def test_without_same_length_a_query_reads_all_memory_and_its_segment() -> None:
    model, ids = build(layers=1, memory_len=4), tokens(1, 9)
    changed = ids.clone()
    changed[0, 0] = (ids[0, 0] + 1) % VOCABULARY
    lengths = [1, 4, 4]
    difference = (run(model, ids, lengths)[0] - run(model, changed, lengths)[0]).abs().amax(-1)[0]
    assert (difference[:5] > 0).all()
    assert (difference[5:] == 0).all()  # the memory holds tokens 1 to 4


@pytest.mark.parametrize("options", [*VARIANTS, {"same_length": True}])
def test_changing_a_token_leaves_earlier_outputs_bit_identical(options: dict[str, Any]) -> None:
    model, ids = build(**options), tokens(2, 9)
    reference, _ = run(model, ids, [4, 5])
    for j in range(9):
        changed = ids.clone()
        changed[:, j] = (ids[:, j] + 5) % VOCABULARY
        outputs, _ = run(model, changed, [4, 5])
        assert torch.equal(outputs[:, :j], reference[:, :j])
        assert not torch.equal(outputs[:, j], reference[:, j])


@pytest.mark.parametrize("options", VARIANTS)
def test_documents_inside_a_row_run_as_if_alone(options: dict[str, Any]) -> None:
    model, ids = build(same_length=True, **options), tokens(1, 16)
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[0, [2, 9]] = True
    outputs, state = run(model, ids, [5, 1, 6, 4], starts)
    alone = [run(model, document)[0] for document in ids.split([2, 7, 7], 1)]
    assert_close(outputs, torch.cat(alone, 1))
    assert state["position"].item() == 7
    assert state["tokens"].item() == 16


def test_nothing_of_the_previous_document_leaks_through_the_memory() -> None:
    model, ids = build(), tokens(2, 6)
    _, state = run(model, tokens(2, 8, seed=2), [4, 4])
    starts = torch.zeros_like(ids, dtype=torch.bool)
    starts[:, 0] = True
    outputs, _ = run(model, ids, [3, 3], starts, state)
    restarted = restart_lanes(state, torch.tensor([True, True]))
    assert_close(run(model, ids, [3, 3])[0], outputs)
    assert_close(run(model, ids, [3, 3], state=restarted)[0], outputs)


def test_memory_starts_without_entries_and_grows_to_memory_len() -> None:
    model, ids = build(memory_len=5), tokens(2, 9)
    state = model.empty_state(2)
    for expected in (3, 5, 5):
        assert state["memory.0"].shape[1] == max(0, min(5, int(state["tokens"][0])))
        _, state = run(model, ids[:, :3], state=state)
        assert {state[f"memory.{n}"].shape for n in range(2)} == {(2, expected, 8)}
    first, _ = run(model, ids[:, :3])
    assert_close(run(rebuild(model, memory_len=0), ids[:, :3])[0], first, 0.0)


def test_entries_that_are_not_filled_are_masked_not_attended_as_zeros() -> None:
    model, ids = build(), tokens(2, 4)
    padded = model.empty_state(2)
    padded |= {f"memory.{n}": torch.zeros(2, 5, 8, dtype=torch.float64) for n in range(2)}
    assert_close(run(model, ids, state=padded)[0], run(model, ids)[0])


def test_without_memory_segments_are_separate() -> None:
    model, ids = build(memory_len=0), tokens(2, 8)
    outputs, state = run(model, ids, [3, 5])
    assert_close(outputs, torch.cat([run(model, part)[0] for part in ids.split([3, 5], 1)], 1))
    assert state["memory.1"].shape == (2, 0, 8)


def test_longer_memory_at_evaluation_reads_further() -> None:
    trained, ids = build(memory_len=4), tokens(1, 24)
    longer = rebuild(trained, memory_len=64, same_length=True)
    assert_close(run(longer, ids, [1] * 24)[0], run(longer, ids)[0])
    # With everything in memory, single tokens see what one segment of the whole text sees.
    assert_close(run(longer, ids, [5, 1, 18])[0], run(trained, ids)[0])
    assert not torch.allclose(run(trained, ids, [4] * 6)[0], run(longer, ids, [4] * 6)[0])


def test_a_state_may_hold_more_or_fewer_entries_than_memory_len() -> None:
    model, ids = build(memory_len=8), tokens(2, 14)
    _, state = run(model, ids[:, :8])
    shorter = {k: v[:, -3:] if k.startswith("memory") else v for k, v in state.items()}
    small = rebuild(model, memory_len=3)
    from_long, after = run(small, ids[:, 8:], state=state)
    assert_close(run(model, ids[:, 8:], state=shorter)[0], from_long, 0.0)
    assert after["memory.0"].shape[1] == 3


def test_distances_beyond_clamp_len_are_not_told_apart() -> None:
    rows = sinusoids(7, 8, 3, torch.float64, torch.device("cpu"))
    assert (rows[3:] == rows[3]).all()
    assert torch.equal(rows[:4], sinusoids(4, 8, None, torch.float64, torch.device("cpu")))
    angle = 2 * 10000 ** (-2 * 1 / 8)
    assert rows[2, [1, 5]].tolist() == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-15)


@pytest.mark.parametrize(("queries", "past"), [(1, 0), (1, 6), (4, 0), (4, 3), (3, 9)])
def test_relative_attention_is_its_formula(queries: int, past: int) -> None:
    keys, generator = past + queries, torch.Generator().manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = random(1, queries, 2, 3), random(1, keys, 2, 3), random(1, keys, 2, 3)
    relative, bias_u, bias_v = random(keys, 2, 3), random(2, 3), random(2, 3)
    allowed = torch.ones(1, queries, keys, dtype=torch.bool).tril(past)
    found = attend_relative(q, k, v, relative, (bias_u, bias_v), allowed).view(queries, 2, 3)
    for i in range(queries):
        for head in range(2):
            seen = past + i + 1
            scores = [
                (q[0, i, head] + bias_u[head]) @ k[0, j, head]
                + (q[0, i, head] + bias_v[head]) @ relative[keys - 1 - (past + i - j), head]
                for j in range(seen)
            ]
            weights = (torch.stack(scores) / math.sqrt(3)).softmax(0)
            assert_close(found[i, head], weights @ v[0, :seen, head], 1e-13)


@pytest.mark.parametrize("options", VARIANTS)
def test_a_row_alone_gives_what_it_gives_in_a_batch(options: dict[str, Any]) -> None:
    model, ids, targets = build(**options), tokens(3, 8), tokens(3, 8, seed=2)
    outputs, state = run(model, ids, [3, 5])
    nll = model.nll(outputs, targets)
    for row in range(3):
        one = slice(row, row + 1)
        alone, alone_state = run(model, ids[one], [3, 5])
        assert_close(alone, outputs[one], 1e-12)
        assert_close(model.nll(alone, targets[one]), nll[one], 1e-12)
        assert_close(alone_state["memory.1"], select_lanes(state, one)["memory.1"], 1e-12)


DROPOUT: dict[str, Any] = {"dropout": 0.3, "dropatt": 0.2}


def test_dropout_does_not_depend_on_micro_batches_or_order() -> None:
    model, ids = build(**DROPOUT), tokens(4, 8)
    lanes = torch.arange(4)
    whole, _ = run(model, ids, [3, 5], noise=Noise(1, 7, lanes))
    for rows in ([0, 1], [2, 3], [3], [2, 0]):
        part, _ = run(model, ids[rows], [3, 5], noise=Noise(1, 7, lanes[rows]))
        assert_close(part, whole[rows], 1e-12)
    assert not torch.allclose(run(model, ids, [3, 5], noise=Noise(1, 8, lanes))[0], whole)
    assert not torch.allclose(run(model, ids, [3, 5])[0], whole)


def test_dropout_does_not_depend_on_how_many_memory_positions_are_stored() -> None:
    model, ids, noise = build(memory_len=9, **DROPOUT), tokens(2, 6), Noise(1, 0, torch.arange(2))
    padded = model.empty_state(2)
    padded |= {f"memory.{n}": torch.zeros(2, 9, 8, dtype=torch.float64) for n in range(2)}
    assert_close(run(model, ids, state=padded, noise=noise)[0], run(model, ids, noise=noise)[0])


def test_memory_holds_the_dropped_embedding_and_the_output_is_dropped() -> None:
    model, noise = build(dropout=0.5, memory_len=40), Noise(1, 0, torch.arange(2))
    outputs, state = run(model, tokens(2, 40), noise=noise)
    for tensor in (outputs, state["memory.0"]):
        assert 0.4 < (tensor == 0).double().mean() < 0.6
    assert (state["memory.1"] != 0).all()


@dataclass(frozen=True)
class RecordingNoise(Noise):
    """Notes which masks are asked for: (site, layer, p), the layer None where all share one."""

    asked: list[tuple[str, int | None, float]] = field(default_factory=list)

    def lane_mask(self, p: float, site: str, layer: int, shape: tuple[int, ...]) -> Tensor:
        self.asked.append((site, layer, p))
        return super().lane_mask(p, site, layer, shape)

    def weight_mask(
        self, p: float, site: str, layer: int, heads: range, all_heads: int
    ) -> WeightMask:
        self.asked.append((site, layer, p))
        return super().weight_mask(p, site, layer, heads, all_heads)

    def shared_mask(self, p: float, site: str, shape: tuple[int, ...]) -> Tensor:
        self.asked.append((site, None, p))
        return super().shared_mask(p, site, shape)


def test_every_dropout_site_has_its_own_mask_and_relative_positions_one_for_all_layers() -> None:
    noise = RecordingNoise(1, 0, torch.arange(2))
    run(build(**DROPOUT), tokens(2, 4), noise=noise)
    layered = [(site, n, 0.3) for n in range(2) for site in ("attn", "ffn", "ffn.inner")]
    layered += [("attn.weights", n, 0.2) for n in range(2)]
    once = [("embed", 0, 0.3), ("output", 0, 0.3), ("relative", None, 0.3)]
    assert sorted(noise.asked, key=str) == sorted(layered + once, key=str)


SOFTMAXES: list[dict[str, Any]] = [
    {},
    ADAPTIVE,
    {"cutoffs": (3, 7)},
    {**ADAPTIVE, "tie_projections": False},
]


@pytest.mark.parametrize("options", SOFTMAXES)
def test_probabilities_of_all_ids_sum_to_one_and_agree_with_nll(options: dict[str, Any]) -> None:
    model = build(**options)
    hidden = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits = model.logits(hidden)
    log_p = logits.log_softmax(-1)
    if model.config.cutoffs:
        assert_close(logits.exp().sum(-1), torch.ones(2, 3, dtype=torch.float64), 1e-12)
    for target in range(VOCABULARY):
        nll = model.nll(hidden, torch.full((2, 3), target))
        assert_close(-nll, log_p[..., target], 1e-12)


def test_a_cluster_without_targets_is_no_special_case() -> None:
    model, ids = build(**ADAPTIVE), tokens(1, 6)
    output, _ = run(model, ids)
    model.nll(output, torch.zeros_like(ids)).mean().backward()
    grads = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert all(grad is not None and grad.isfinite().all() for grad in grads.values())
    bias = grads["crit.out_layers.2.bias"]
    assert bias is not None
    assert (bias == 0).all()


def test_cutoffs_beyond_the_vocabulary_are_refused() -> None:
    for vocabulary in (6, 7):
        with pytest.raises(UserError, match=f"7.*{vocabulary}"):
            build(vocabulary=vocabulary, **ADAPTIVE)
    build(vocabulary=8, **ADAPTIVE)


def test_tied_weights_appear_once_and_the_heads_projection_is_always_its_own() -> None:
    def projections(**options: Any) -> list[str]:
        names = [name for name, _ in build(**options).named_parameters()]
        assert len(names) == len(set(names))
        return [name for name in names if "out_projs" in name]

    assert projections() == projections(cutoffs=(3, 7)) == []
    assert projections(**ADAPTIVE) == ["crit.out_projs.0"]
    untied = projections(**ADAPTIVE, tie_projections=False)
    assert untied == [f"crit.out_projs.{i}" for i in range(3)]


def test_untied_projections_equal_to_the_embeddings_give_the_tied_model() -> None:
    tied, ids = build(**ADAPTIVE), tokens(2, 6)
    untied = build(**ADAPTIVE, tie_projections=False)
    values = tied.state_dict()
    values |= {f"crit.out_projs.{i}": values[f"word_emb.emb_projs.{i}"] for i in (1, 2)}
    untied.load_state_dict(values)
    outputs, _ = run(tied, ids)
    assert_close(untied.nll(outputs, ids), tied.nll(outputs, ids), 1e-13)


@pytest.mark.parametrize("options", [*VARIANTS, {**ADAPTIVE, "tie_projections": False}])
def test_gradients_are_those_of_central_differences(options: dict[str, Any]) -> None:
    model, ids, targets = build(**options), tokens(2, 6), tokens(2, 6, seed=2)

    def loss() -> Tensor:
        return model.nll(run(model, ids, [2, 4])[0], targets).mean()

    loss().backward()
    generator, step = torch.Generator().manual_seed(3), 1e-5
    for name, parameter in model.named_parameters():
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        assert parameter.grad is not None, name
        expected = (parameter.grad * direction).sum().item()
        values = []
        with torch.no_grad():
            for change in (step, -2 * step):
                parameter.add_(direction, alpha=change)
                values.append(loss().item())
            parameter.add_(direction, alpha=step)
        assert (values[0] - values[1]) / (2 * step) == pytest.approx(expected, rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("options", SOFTMAXES)
def test_bfloat16_autocast_keeps_memory_and_losses_in_float32(options: dict[str, Any]) -> None:
    model, ids = build(**options).float(), tokens(2, 8)
    reference, _ = run(model, ids, [4, 4])
    with torch.autocast("cpu", torch.bfloat16):
        outputs, state = run(model, ids, [4, 4])
        nll, logits = model.nll(outputs, ids), model.logits(outputs)
    nll.mean().backward()
    assert {state["memory.0"].dtype, state["memory.1"].dtype} == {torch.float32}
    assert nll.dtype == logits.dtype == torch.float32
    assert_close(outputs.float(), reference, 0.1)


WIKITEXT: dict[str, Any] = {"cutoffs": (20_000, 40_000, 200_000)}
PUBLISHED = {
    "enwik8 base": (41_055_436, 204, (12, 512, 8, 64, 2048), {}),
    "enwik8 large": (277_231_820, 204, (24, 1024, 8, 128, 3072), {}),
    "WikiText-103 base": (151_107_538, 267_735, (16, 410, 10, 41, 2100), WIKITEXT),
    "WikiText-103 large": (
        285_170_506,
        267_735,
        (18, 1024, 16, 64, 4096),
        {**WIKITEXT, "div_val": 4},
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_authors_number_of_parameters(name: str) -> None:
    count, vocabulary, shape, options = PUBLISHED[name]
    sizes = dict(zip(("layers", "d_model", "heads", "d_head", "d_inner"), shape, strict=True))
    config = TransformerXLConfig.model_validate({**sizes, "memory_len": 1, **options})
    with torch.device("meta"):
        model = TransformerXL(config, vocabulary)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_initial_values_follow_the_authors() -> None:
    config = TransformerXLConfig(
        d_model=64, heads=4, d_inner=256, layers=1, memory_len=4, cutoffs=(100, 200), div_val=2
    )
    model = initial_model(config, 300, seed=0, dtype=torch.float64)
    for name, parameter in model.named_parameters():
        if name.endswith("layer_norm.weight"):
            mean, deviation = 1.0, 0.02
        elif name.endswith(".bias") or name == "crit.cluster_bias":
            mean, deviation = 0.0, 0.0
        else:
            mean, deviation = 0.0, 0.01 if "projs" in name else 0.02
        bound = 5 * deviation / math.sqrt(parameter.numel())
        assert abs(parameter.mean().item() - mean) <= bound, name
        assert abs(parameter.std().item() - deviation) <= bound, name
