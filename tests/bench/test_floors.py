"""A floor is the products of a step, all of them and no others; the plain model is the model."""

from math import prod
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rlt_dist.bench.floor import LoopProducts, batched_products, layer_sizes
from rlt_dist.bench.products import Product, Products, attention, linear
from rlt_dist.bench.recurrence import RecurrenceShape, whole_step
from rlt_dist.bench.straightforward import StraightforwardXL
from rlt_dist.bench.transformer_xl import TransformerXLShape, products, straightforward_step
from rlt_dist.config.model import RltConfig, TransformerXLConfig
from rlt_dist.models.build import initial_model
from rlt_dist.models.state import detach
from rlt_dist.models.transformer_xl.model import TransformerXL
from rlt_dist.ops.recurrence.dispatch import Recurrence

LANES, TOKENS = 3, 6
RLT = RltConfig(
    d_model=24,
    heads=4,
    kv_heads=2,
    ffn=20,
    encoder_layers=2,
    decoder_layers=3,
    window=4,
    memory_groups=2,
    memory_len=TOKENS,
)
XL = TransformerXLConfig(d_model=16, heads=2, d_inner=24, layers=2, memory_len=7)


def counted(step: Any) -> int:
    """The floating-point operations of torch's matrix products; fused attention hides its own."""
    in_place = {torch.ops.aten.addmm_: addmm_flops, torch.ops.aten.baddbmm_: addmm_flops}
    counting = FlopCounterMode(display=False, custom_mapping=in_place)
    with sdpa_kernel(SDPBackend.MATH), counting as counter:
        step()
    return counter.get_total_flops()


def addmm_flops(_: Any, a: tuple[int, ...], b: tuple[int, ...], **__: Any) -> int:
    """Of a product that is added to something in place, which torch's own counter passes over."""
    return 2 * prod(a) * b[-1]


def test_products_are_run_as_listed() -> None:
    listed = [*linear(5, 3, 4), *attention(heads=2, queries=3, keys=5, width=4)]
    assert counted(Products(listed)) == sum(product.flops for product in listed)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_product_multiplies_its_operands(batch: int, layout: Any) -> None:
    step = Products([Product(batch, 2, 3, 5, layout)])
    step()
    ((x, y, out),) = step._operands.values()
    assert x.shape[-2:] == (2, 3)
    assert torch.allclose(out, x @ y)


def test_the_loop_s_floor_does_the_multiplications_of_the_decoder() -> None:
    """Counted from the sizes: projections forward and backward, window, memory within reach."""
    weights = sum(inputs * outputs for inputs, outputs in layer_sizes(RLT))
    weights = RLT.decoder_layers * weights + 2 * RLT.d_model**2
    window = (2 + 4) * RLT.window  # of a head, forward and backward
    memory = (2 + 2) * (RLT.memory_len + 1)
    read = RLT.decoder_layers * RLT.heads * RLT.head_width * (window + memory)
    expected = LANES * TOKENS * (2 * weights + read)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            assert LoopProducts(RLT, LANES, TOKENS)() == expected
    finally:
        torch.set_num_threads(before)


def test_loop_and_batched_products_are_those_of_a_step_of_the_reference() -> None:
    """Plain autograd multiplies with all memory entries, in reach or not, and masks later."""
    reference = counted(whole_step(Recurrence("reference"), 1, RecurrenceShape(RLT, LANES, TOKENS)))
    batched = sum(product.flops for product in batched_products(RLT, 256, LANES, TOKENS))
    loop = 2 * LoopProducts(RLT, LANES, TOKENS)()
    unseen = RLT.memory_len + TOKENS - (RLT.memory_len + 1)
    of_unseen = 2 * (2 + 2) * unseen * LANES * TOKENS * RLT.decoder_layers * RLT.d_model
    assert batched + loop + of_unseen == reference


def test_transformer_xl_s_floor_is_the_plain_step_without_what_it_wastes_on_the_memory() -> None:
    """Queries of memory positions and their gradient, and gradients into the memory."""
    shape = TransformerXLShape(XL, 30, LANES, XL.memory_len)
    listed = sum(product.flops for product in products(shape))
    of_one_projection = 2 * LANES * XL.memory_len * XL.d_model * XL.heads * XL.head_width
    wasted = XL.layers * 5 * of_one_projection
    assert listed + wasted == counted(straightforward_step(shape))


def test_the_straightforward_transformer_xl_is_the_model_gradients_included() -> None:
    model = initial_model(XL, 30, seed=3, dtype=torch.float64)
    assert isinstance(model, TransformerXL)
    plain = StraightforwardXL(XL, 30).double()
    plain.load_state_dict(model.state_dict())
    for parameter, other in zip(model.parameters(), plain.parameters(), strict=True):
        parameter.data += 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
        other.data.copy_(parameter.data)
    found, expected = (three_segments(each) for each in (plain, model))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (found[name] - tensor).abs().max() <= 1e-10 * tensor.abs().max(), name


def three_segments(model: TransformerXL) -> dict[str, Tensor]:
    """-log p and state of three carried segments, and the gradients of the mean."""
    tokens = torch.randint(30, (LANES, 16), generator=torch.Generator().manual_seed(0))
    state, parts = model.empty_state(LANES), []
    for first in range(0, 15, 5):
        part = tokens[:, first : first + 5]
        output, state = model(part, torch.zeros_like(part, dtype=torch.bool), detach(state))
        parts.append(model.nll(output, tokens[:, first + 1 : first + 6]))
    nll = torch.cat(parts, dim=1)
    nll.mean().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters()))
    return {name: x.detach() for name, x in {"nll": nll, **state, **gradients}.items()}
