"""Transformer-XL cut from outside gives what the whole model gives, in float64.

Cut by processes that share the weights (threads stand for them), by stages that have some of the
layers, and by recomputation.
"""

import re
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlt_dist.config.model import TransformerXLConfig
from rlt_dist.models.dropout import Dropout
from rlt_dist.models.state import State
from rlt_dist.models.transformer_xl.model import TransformerXL
from rlt_dist.ops.noise import Noise
from rlt_dist.ops.seam import Seam

LANES, TOKENS = 2, 9
SIZES = {"d_model": 8, "d_head": 3, "d_inner": 10, "layers": 2, "memory_len": 5}
DROPOUT = {"dropout": 0.3, "dropatt": 0.2}
SOFTMAXES: list[dict[str, Any]] = [
    {},
    {"cutoffs": (4, 5)},
    {"cutoffs": (4, 5), "div_val": 2},
    {"cutoffs": (4, 5), "div_val": 2, "tie_projections": False},
]
PARTIAL = re.compile("word_emb.emb_projs|crit.out_projs|crit.cluster_")


def build(vocabulary: int = 13, heads: int = 3, **options: Any) -> TransformerXL:
    """A tiny model none of whose parameters is at a special value."""
    config = TransformerXLConfig.model_validate({**SIZES, "heads": heads, **options})
    model = TransformerXL(config, vocabulary).double()
    chance = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        values = torch.randn(parameter.shape, generator=chance, dtype=torch.float64)
        with torch.no_grad():
            parameter.copy_(0.5 * values + (1.0 if "norm.weight" in name else 0.0))
    return model


def ids(vocabulary: int, seed: int) -> Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(vocabulary, (LANES, TOKENS), generator=chance)


Cut = tuple[int, Sequence[int], int]
"""The dimension that is cut, the segments that are cut one by one, and the entries of a unit."""


def cut_of(name: str, model: TransformerXL) -> Cut | None:
    """How a parameter is cut; None where every process has the whole."""
    config = model.config
    heads, width = config.heads, config.head_width
    bounds = (0, *config.cutoffs, model.vocabulary)
    clusters = [bounds[i + 1] - bounds[i] for i in range(len(bounds) - 1)]
    ends: dict[str, Cut] = {
        "qkv_net.weight": (0, [heads] * 3, width),
        "r_net.weight": (0, [heads], width),
        "o_net.weight": (1, [heads], width),
        "r_w_bias": (0, [heads], 1),
        "r_r_bias": (0, [heads], 1),
        "CoreNet.0.weight": (0, [config.d_inner], 1),
        "CoreNet.0.bias": (0, [config.d_inner], 1),
        "CoreNet.3.weight": (1, [config.d_inner], 1),
    }
    for i, size in enumerate(clusters):
        rows = clusters if config.div_val == 1 else [size]
        ends |= {f"emb_layers.{i}.weight": (0, rows, 1), f"out_layers.{i}.bias": (0, rows, 1)}
    return next((cut for end, cut in ends.items() if name.endswith(end)), None)


def part(seams: ModuleType, model: TransformerXL, seam: Seam) -> TransformerXL:
    """What one process has of a model: the module of the whole sizes with its own weights."""
    with torch.device("meta"):
        own = TransformerXL(model.config, model.vocabulary)
    for module in own.modules():
        if hasattr(module, "seam"):
            module.seam = seam
    for name, parameter in model.named_parameters():
        cut, values = cut_of(name, model), parameter.detach()
        if cut is not None:
            dim, segments, unit = cut
            values = seams.cut(values, dim, segments, seam, unit)
        path, _, leaf = name.rpartition(".")
        module = own.get_submodule(path)
        if isinstance(module, nn.ParameterList):
            module[int(leaf)] = nn.Parameter(values.clone())
        else:
            setattr(module, leaf, nn.Parameter(values.clone()))
    return own


def train(model: TransformerXL, training: bool = True) -> tuple[dict[str, Tensor], State]:
    """Loss and every parameter's gradient over two segments, and the state after them.

    The memory is not detached, so that gradients run through it too.
    """
    tokens, targets = ids(model.vocabulary, 1), ids(model.vocabulary, 2)
    start = torch.zeros_like(tokens, dtype=torch.bool)
    start[1, 6] = True
    state, losses = model.empty_state(LANES), []
    noise = Noise(3, 1, torch.arange(LANES))
    for part in (slice(0, 4), slice(4, TOKENS)):
        output, state = model(tokens[:, part], start[:, part], state, noise)
        wanted = targets[:, part]
        if training:
            losses.append(model.loss(output.flatten(0, 1), wanted.flatten()))
        else:
            losses.append(model.nll(output, wanted).sum())
    loss = torch.stack(losses).sum() / TOKENS
    loss.backward()
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        # Each has one, zeros where no token of this process touches it.
        assert parameter.grad is not None, name
        found[name] = parameter.grad
    return found, {name: tensor.detach() for name, tensor in state.items()}


def assert_close(x: Tensor, y: Tensor, name: str) -> None:
    assert x.shape == y.shape, name
    # Some gradients are 0 but for rounding: those of a memory's keys where there is one.
    assert (x - y).abs().max() <= 1e-12 * y.abs().max().clamp(min=1e-3), name


def check_cut(seams: ModuleType, model: TransformerXL, size: int, training: bool) -> None:
    expected, state = train(model, training)
    done = seams.run(size, lambda seam: train(part(seams, model, seam), training))
    for name, y in expected.items():
        given_ = [found[name] for found, _ in done]
        cut = cut_of(name, model)
        if cut is not None:
            x = seams.join(given_, *cut)
        elif PARTIAL.match(name):
            x = torch.stack(given_).sum(0)
        else:
            x = given_[0]
            assert all(torch.equal(other, x) for other in given_), name
        assert_close(x, y, name)
    for _, other in done:
        for name, y in state.items():
            assert_close(other[name].double(), y.double(), name)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("softmax", SOFTMAXES)
@pytest.mark.parametrize("pre_norm", [False, True])
def test_processes_that_share_the_weights_find_the_whole_s_loss_and_gradients(
    seams: ModuleType, size: int, softmax: dict[str, Any], pre_norm: bool
) -> None:
    check_cut(seams, build(pre_norm=pre_norm, **softmax, **DROPOUT), size, training=True)
    check_cut(seams, build(pre_norm=pre_norm, **softmax), size, training=False)


@settings(max_examples=8, deadline=None)
@given(
    size=st.integers(2, 5),
    heads=st.integers(1, 4),
    vocabulary=st.integers(7, 20),
    softmax=st.sampled_from(SOFTMAXES),
    d_inner=st.sampled_from([1, 3, 8]),
)
def test_cuts_may_be_uneven_and_leave_some_processes_nothing(
    seams: ModuleType,
    size: int,
    heads: int,
    vocabulary: int,
    softmax: dict[str, Any],
    d_inner: int,
) -> None:
    model = build(vocabulary, heads, d_inner=d_inner, **softmax, **DROPOUT)
    check_cut(seams, model, size, training=True)


def test_masks_of_a_part_are_those_of_the_whole(seams: ModuleType) -> None:
    dropout = Dropout(0.4, Noise(3, 1, torch.arange(LANES)))
    whole = dropout(torch.ones(LANES, TOKENS, 7), "ffn.inner", 1)

    def work(seam: Any) -> Tensor:
        ones = torch.ones(LANES, TOKENS, len(seam.own(7)))
        return dropout.columns(ones, "ffn.inner", 1, 7, seam)

    assert torch.equal(seams.join(seams.run(3, work), -1, [7]), whole)


@pytest.mark.parametrize("options", SOFTMAXES)
def test_an_id_outside_the_vocabulary_is_refused_by_all(
    seams: ModuleType, options: dict[str, Any]
) -> None:
    model = build(**options)

    def work(seam: Any) -> None:
        own = part(seams, model, seam)
        for wrong in (-1, model.vocabulary):
            tokens = torch.tensor([[0, wrong]])
            with pytest.raises(IndexError):
                own.word_emb(tokens)
            with pytest.raises(IndexError, match="a row of 0 processes"):
                own.loss(torch.zeros(2, 8, dtype=torch.float64), tokens[0])

    seams.run(2, work)


@pytest.mark.parametrize("options", SOFTMAXES)
def test_each_end_of_a_model_alone_gives_all_its_parameters_a_gradient(
    seams: ModuleType, options: dict[str, Any]
) -> None:
    """Zeros where a process has none of the rows, or of the ids: partial ones must be summed."""
    model = build(**options)

    def work(seam: Any) -> None:
        first, last = part(seams, model, seam), part(seams, model, seam)
        first.word_emb(torch.tensor([[0]])).sum().backward()
        last.loss(torch.ones(1, 8, dtype=torch.float64), torch.tensor([0])).backward()
        tables = [layer.get_parameter("weight") for layer in last.word_emb.emb_layers]
        for parameter in (*first.word_emb.parameters(), *last.crit.parameters(), *tables):
            assert parameter.grad is not None

    seams.run(3, work)


@pytest.mark.parametrize("options", [{}, {"cutoffs": (4, 5)}])
def test_logits_of_a_cut_vocabulary_are_refused(seams: ModuleType, options: dict[str, Any]) -> None:
    own = part(seams, build(**options), seams.ThreadSeam(seams.Meeting(2), 0))
    with pytest.raises(RuntimeError, match="whole weights"):
        own.logits(torch.zeros(1, 1, 8, dtype=torch.float64))


def test_bfloat16_autocast_of_a_part_keeps_memory_and_loss_in_float32(seams: ModuleType) -> None:
    model = build(cutoffs=(4, 5), div_val=2).float()
    expected, _ = train(model)

    def work(seam: Any) -> tuple[dict[str, Tensor], State]:
        own = part(seams, model, seam)
        with torch.autocast("cpu", torch.bfloat16):
            return train(own)

    for found, state in seams.run(2, work):
        assert {x.dtype for x in found.values()} == {torch.float32}
        assert state["memory.1"].dtype == torch.float32
        assert (found["loss"] - expected["loss"]).abs() <= 0.05 * expected["loss"]


@pytest.mark.parametrize("pre_norm", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_recomputed_layers_give_the_same_bits(pre_norm: bool, autocast: bool) -> None:
    models = [build(pre_norm=pre_norm, **DROPOUT).float() for _ in range(2)]
    models[1].recompute_layers = True
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        (found, state), (again, state_again) = (train(model) for model in models)
    for name, x in (found | state).items():
        assert torch.equal(x, (again | state_again)[name]), name


def test_a_recomputed_layer_keeps_only_its_input() -> None:
    kept: dict[bool, int] = {}
    for recompute in (False, True):
        model = TransformerXL(build(**DROPOUT).config, 13, recompute_layers=recompute).double()
        x, state = torch.randn(LANES, TOKENS, 8, dtype=torch.float64), model.empty_state(LANES)
        segment, _ = model.begin(torch.zeros(LANES, TOKENS, dtype=torch.bool), state)
        sizes: list[int] = []

        def keep(tensor: Tensor, sizes: list[int] = sizes) -> Tensor:
            sizes.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model.run_layers(x, segment, state)
        kept[recompute] = sum(sizes)
    assert kept[True] == 2 * LANES * TOKENS * 8 < kept[False]


def test_cut_layers_may_be_recomputed(seams: ModuleType) -> None:
    model = build(**DROPOUT)

    def work(seam: Any) -> list[dict[str, Tensor]]:
        results = []
        for recompute in (False, True):
            own = part(seams, model, seam)
            own.recompute_layers = recompute
            results.append(train(own)[0])
        return results

    for kept, again in seams.run(2, work):
        assert all(torch.equal(kept[name], again[name]) for name in kept)


def stages(model: TransformerXL) -> list[TransformerXL]:
    """Three stages: one layer and the embedding, two layers alone, no layer but the head."""
    here: list[set[str]] = [{"0"}, {"1", "2"}, set()]
    made = []
    for number, own in enumerate(here):
        stage = TransformerXL(model.config, model.vocabulary).double()
        stage.load_state_dict(model.state_dict())
        for name in set(stage.layers) - own:
            del stage.layers[name]
        if number < 2:
            setattr(stage, "crit", None)  # noqa: B010  (a stage is no whole model)
        if number == 1:
            setattr(stage, "word_emb", None)  # noqa: B010
        made.append(stage)
    return made


@pytest.mark.parametrize("softmax", SOFTMAXES)
def test_stages_with_some_of_the_layers_give_the_whole_s_results(softmax: dict[str, Any]) -> None:
    model = build(**{**softmax, **DROPOUT, "layers": 3})
    expected, state = train(model)
    parts = stages(model)
    tokens, targets = ids(13, 1), ids(13, 2)
    start = torch.zeros_like(tokens, dtype=torch.bool)
    start[1, 6] = True
    noise, losses = Noise(3, 1, torch.arange(LANES)), []
    states = [stage.empty_state(LANES) for stage in parts]
    memories = [{name for name in state if name.startswith("memory")} for state in states]
    assert memories == [{"memory.0"}, {"memory.1", "memory.2"}, set()]
    for cut in (slice(0, 4), slice(4, TOKENS)):
        x = torch.empty(0)
        for number, stage in enumerate(parts):
            segment, counts = stage.begin(start[:, cut], states[number], noise)
            x = stage.embedded(tokens[:, cut], segment) if number == 0 else x
            x, after = stage.run_layers(x, segment, states[number])
            states[number] = counts | after
        output = parts[-1].finish(x, segment)
        losses.append(parts[-1].loss(output.flatten(0, 1), targets[:, cut].flatten()))
    loss = torch.stack(losses).sum() / TOKENS
    loss.backward()
    assert torch.equal(loss.detach(), expected["loss"])
    for own in states:
        assert all(torch.equal(tensor.detach(), state[name]) for name, tensor in own.items())
    for name, _ in model.named_parameters():
        held = [dict(stage.named_parameters()).get(name) for stage in parts]
        found = [x.grad for x in held if x is not None and x.grad is not None]
        assert_close(torch.stack(found).sum(0), expected[name], name)
