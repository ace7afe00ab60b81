"""The models beside RLT and Transformer-XL, against loops written down plainly, token by token."""

from collections.abc import Mapping

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from rlt_dist.config.model import GruConfig, RltConfig
from rlt_dist.models.build import build_model, initial_model
from rlt_dist.models.gru import GatedRecurrentUnits
from rlt_dist.models.state import detach

VOCABULARY = 11
Weights = Mapping[str, Tensor]
TOKEN_FED = {"feedback_from": "token", "memory_groups": 2, "kv_heads": 1, "memory_len": 3}
PLAIN = {"decoder_layers": 0, "feedback": 0, "memory_len": 3}


def gru(layers: int = 2, dtype: torch.dtype = torch.float64) -> GatedRecurrentUnits:
    """A GRU none of whose parameters is 0."""
    model = build_model(GruConfig(d_model=6, layers=layers), VOCABULARY, dtype)
    assert isinstance(model, GatedRecurrentUnits)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.5, generator=generator)
    return model


# -- loops -------------------------------------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * (x.square().mean() + 1e-6).rsqrt() * weight


def rotary(heads: Tensor, t: int) -> Tensor:
    a, b = heads.chunk(2, dim=-1)
    angle = t * 10000.0 ** (-torch.arange(a.shape[-1], dtype=heads.dtype) / a.shape[-1])
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def mixed(query: Tensor, entries: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Attention of one token, query [H, w], entries of [KV, w] each."""
    sharing = len(query) // len(entries[0][0])
    heads = []
    for h, q in enumerate(query):
        keys = torch.stack([k[h // sharing] for k, _ in entries])
        values = torch.stack([v[h // sharing] for _, v in entries])
        heads.append((keys @ q / len(q) ** 0.5).softmax(0) @ values)
    return torch.cat(heads)


def rlt_loop(config: RltConfig, p: Weights, tokens: Tensor, starts: Tensor) -> Tensor:
    """Outputs [T, d] of one lane of a plain Transformer or of token-only merge."""
    width, reach = config.head_width, config.memory_len
    assert reach is not None

    def heads(weight: Tensor, x: Tensor) -> Tensor:
        return (weight @ x).unflatten(0, (-1, width))

    def feed_forward(x: Tensor, at: str) -> Tensor:
        n = norm(x, p[f"{at}.ffn_norm.weight"])
        gate, up = p[f"{at}.ffn.gate.weight"] @ n, p[f"{at}.ffn.up.weight"] @ n
        return x + p[f"{at}.ffn.down.weight"] @ (gate * gate.sigmoid() * up)

    def self_attention(x: Tensor, at: str, t: int, span: int) -> Tensor:
        n = norm(x, p[f"{at}.attn_norm.weight"])
        q, k, v = (heads(p[f"{at}.attn.{name}.weight"], n) for name in "qkv")
        seen.setdefault(at, []).append((rotary(k, t), v))
        return x + p[f"{at}.attn.o.weight"] @ mixed(rotary(q, t), seen[at][-span:])

    outputs, t = [], 0
    for token, start in zip(tokens.tolist(), starts.tolist(), strict=True):
        if start or not outputs:
            t, seen = 0, {}
            fed = p.get("merge.initial_state")
        x = p["embed.weight"][token]
        y = x
        for i in range(config.encoder_layers):
            y = feed_forward(self_attention(y, f"encoder.{i}", t, reach + 1), f"encoder.{i}")
        for g in range(config.memory_groups if config.decoder_layers else 0):
            n = norm(y, p["memory.norm.weight"])
            k, v = (heads(p[f"memory.{g}.{name}.weight"], n) for name in "kv")
            seen.setdefault(f"memory.{g}", []).append((rotary(k, t), v))
        if fed is not None:
            r = norm(fed, p["merge.state_norm.weight"])
            gate = p["merge.gate.weight"] @ torch.cat((y, r)) + p["merge.gate.bias"]
            y = y + config.alpha * gate.sigmoid() * (p["merge.state.weight"] @ r)
            fed = x
        for j in range(config.decoder_layers):
            at, group = f"decoder.{j}", j * config.memory_groups // config.decoder_layers
            y = self_attention(y, at, t, config.window)
            q = heads(p[f"{at}.cross.q.weight"], norm(y, p[f"{at}.cross_norm.weight"]))
            entries = seen[f"memory.{group}"][-reach - 1 :]
            y = y + p[f"{at}.cross.o.weight"] @ mixed(rotary(q, t), entries)
            y = feed_forward(y, at)
        outputs.append(y)
        t += 1
    return torch.stack(outputs)


def gru_loop(config: GruConfig, p: Weights, tokens: Tensor, starts: Tensor) -> Tensor:
    """Outputs [T, d] of one lane: Cho et al. (2014), reset after the product as in cuDNN."""
    outputs: list[Tensor] = []
    for token, start in zip(tokens.tolist(), starts.tolist(), strict=True):
        if start or not outputs:
            h = [torch.zeros_like(p["embed.weight"][0])] * config.layers
        x = p["embed.weight"][token]
        for i in range(config.layers):
            given = p[f"gru.weight_ih_l{i}"] @ x + p[f"gru.bias_ih_l{i}"]
            kept = p[f"gru.weight_hh_l{i}"] @ h[i] + p[f"gru.bias_hh_l{i}"]
            (r, z, n), (of_r, of_z, of_n) = given.chunk(3), kept.chunk(3)
            z = (z + of_z).sigmoid()
            candidate = (n + (r + of_r).sigmoid() * of_n).tanh()
            x = (1 - z) * candidate + z * h[i]
            h = [*h[:i], x, *h[i + 1 :]]
        outputs.append(x)
    return torch.stack(outputs)


# -- against them ------------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[], [4], list(range(1, 9))], ids=["whole", "two", "steps"])
@pytest.mark.parametrize("kind", ["token", "plain", "gru"])
def test_outputs_and_gradients_are_those_of_a_plain_loop(lab, kind, cuts):
    """Documents start inside rows; whole, in segments, and token by token as in generation."""
    if kind == "gru":
        model, loop = gru(), gru_loop
    else:
        model, loop = lab.model(**(TOKEN_FED if kind == "token" else PLAIN)), rlt_loop
    tokens, starts = lab.tokens(3, 9), lab.starts(3, 9, (0, 3), (0, 4), (2, 6))
    targets = lab.tokens(3, 9, seed=2)
    output, _ = lab.run(model, tokens, starts, cuts)
    found = lab.gradients(model, model.loss(output.flatten(0, 1), targets.flatten()))

    p = dict(model.named_parameters())
    rows = [loop(model.config, p, *row) for row in zip(tokens, starts, strict=True)]
    expected = torch.stack(rows)
    hidden = expected.flatten(0, 1)
    if kind != "gru":
        hidden = torch.stack([norm(x, p["output_norm.weight"]) for x in hidden])
    loss = nn.functional.cross_entropy(
        hidden @ p["output.weight"].T, targets.flatten(), reduction="sum"
    )
    assert lab.error(output, expected) <= 1e-12
    assert lab.worst(found, lab.gradients(model, loss)) <= 1e-10
    assert all(gradient.any() for gradient in found.values())


def test_only_the_token_before_is_merged_in(lab):
    """Nothing recurs: with W 1 and no memory an output knows its own token and the one before."""
    model = lab.model(feedback_from="token", window=1, memory_len=0)
    tokens = lab.tokens(1, 8)
    changed = tokens.clone()
    changed[0, 3] = (changed[0, 3] + 1) % VOCABULARY
    outputs = [lab.run(model, ids)[0][0] for ids in (tokens, changed)]
    differs = (outputs[0] != outputs[1]).any(dim=1).nonzero()[:, 0].tolist()
    assert differs == [3, 4]


def test_alpha_zero_takes_the_merged_token_away(lab):
    model, plain = lab.model(**TOKEN_FED, alpha=0.0), lab.model(**TOKEN_FED | {"alpha": 0.5})
    tokens = lab.tokens(2, 6)
    cut = lab.run(model, tokens)[0]
    assert lab.error(cut, lab.run(plain, tokens)[0]) > 1e-3
    plain.config = lab.config(**TOKEN_FED | {"feedback_from": "state", "feedback": 0})
    plain.merge = None
    assert lab.error(cut, lab.run(plain, tokens)[0]) <= 1e-12


# -- the GRU's state ---------------------------------------------------------------------------

few = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@few
@given(starts=st.lists(st.booleans(), min_size=8, max_size=8), cuts=st.sets(st.integers(1, 7)))
def test_a_gru_does_not_depend_on_segments_or_on_other_lanes(lab, starts, cuts):
    model, tokens = gru(), lab.tokens(2, 8)
    rows = torch.tensor([starts, starts[::-1]])
    whole, state = lab.run(model, tokens, rows)
    parts, after = lab.run(model, tokens, rows, list(cuts))
    assert lab.error(parts, whole) <= 1e-12
    assert lab.worst(after, state) <= 1e-12
    alone, _ = lab.run(model, tokens[:1], rows[:1])
    assert lab.error(alone, whole[:1]) <= 1e-12


def test_a_grus_state_carries_gradients_unless_it_is_detached(lab):
    model, tokens = gru(), lab.tokens(2, 6)
    start = lab.starts(2, 3)
    for cut in (False, True):
        _, state = model(tokens[:, :3], start, model.empty_state(2))
        output, _ = model(tokens[:, 3:], start, detach(state) if cut else state)
        (gradient,) = torch.autograd.grad(output.sum(), [model.embed.weight])
        earlier = [i for i in tokens[:, :3].unique().tolist() if i not in tokens[:, 3:]]
        assert earlier
        assert bool(gradient[earlier].any()) != cut


def test_a_grus_bfloat16_products_leave_a_float32_state(lab):
    model, tokens = gru(dtype=torch.float32), lab.tokens(2, 6)
    exact, _ = lab.run(model, tokens)
    with torch.autocast("cpu", torch.bfloat16):
        output, state = lab.run(model, tokens)
    assert state["gru.1.h"].dtype == torch.float32
    assert lab.error(output.float(), exact) < 0.05


def test_a_gru_starts_from_values_that_its_seed_names():
    config = GruConfig(d_model=64)
    first, again, other = (dict(initial_model(config, 50, s).named_parameters()) for s in (0, 0, 1))
    assert list(first) == [
        *("embed.weight", "gru.weight_ih_l0", "gru.weight_hh_l0", "gru.bias_ih_l0"),
        *("gru.bias_hh_l0", "output.weight"),
    ]
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["gru.weight_hh_l0"], other["gru.weight_hh_l0"])
    assert first["gru.weight_hh_l0"].std().item() == pytest.approx(64**-0.5, rel=0.05)
