"""Engine torch is torch's AdamW, with a clip over the mesh, undecayed vectors and named state."""

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from rlt_dist.config.run import OptimizerConfig
from rlt_dist.mesh.axes import Axes
from rlt_dist.mesh.mesh import Mesh, open_mesh
from rlt_dist.mesh.world import open_world
from rlt_dist.parallel.engine.engine import Engine, make_engine
from rlt_dist.parallel.local import LocalModel
from rlt_dist.parallel.plan.layout import Layout
from rlt_dist.parallel.plan.placement import Placement

FREE = {"learning_rate": 1.0, "clip": 1e9}
ALONE = Axes(1, 1, 1)


@pytest.fixture(scope="module")
def mesh() -> Iterator[Mesh]:
    with open_world({"OMP_NUM_THREADS": "1"}) as world, open_mesh(world, ALONE) as mesh:
        yield mesh


def adamw(model: nn.Module, mesh: Mesh, **choices: Any) -> Engine:
    config = OptimizerConfig(**(FREE | choices))
    layouts = {n: Layout(p.shape, None, False, (0,)) for n, p in model.named_parameters()}
    local: Any = LocalModel(model, None, Placement(0, 1), 0, 1, layouts)  # type: ignore[arg-type]
    return make_engine(local, config, mesh)


def small_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)).double()


def fill_gradients(model: nn.Module, step: int, size: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = size * noise


def updated(model: nn.Module, optimizer: Engine, step: int, size: float = 1.0) -> float:
    fill_gradients(model, step, size)
    norm = math.sqrt(optimizer.reduce())
    optimizer.step(0.01 * step, norm)
    return norm


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def test_it_is_torchs_adamw_with_matrices_decayed_and_vectors_not(mesh: Mesh) -> None:
    mine, reference = small_model(), small_model()
    optimizer = adamw(mine, mesh, betas=(0.8, 0.9), eps=1e-7, weight_decay=0.3)
    kinds: dict[bool, list[Any]] = {True: [], False: []}
    for parameter in reference.parameters():
        kinds[parameter.dim() > 1].append(parameter)
    groups = [
        {"params": kinds[True], "weight_decay": 0.3},
        {"params": kinds[False], "weight_decay": 0.0},
    ]
    twin = torch.optim.AdamW(groups, betas=(0.8, 0.9), eps=1e-7)
    for step in range(1, 6):
        updated(mine, optimizer, step)
        fill_gradients(reference, step)
        for group in twin.param_groups:
            group["lr"] = 0.01 * step
        twin.step()
    assert same(mine, reference)


def test_without_gradients_to_follow_only_matrices_shrink(mesh: Mesh) -> None:
    model = small_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = adamw(model, mesh, weight_decay=0.5)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step(0.1, optimizer.reduce().sqrt())
    for name, parameter in model.named_parameters():
        factor = 1 - 0.1 * 0.5 if parameter.dim() > 1 else 1.0
        assert torch.allclose(parameter, factor * before[name], rtol=1e-12)


def test_the_norm_is_that_of_all_gradients_as_one_vector(mesh: Mesh) -> None:
    model = small_model()
    fill_gradients(model, 1)
    everything = torch.cat([p.grad.flatten() for p in model.parameters()])
    found = adamw(model, mesh).reduce().sqrt()
    assert float(found) == pytest.approx(float(everything.norm()), rel=1e-14)


def test_a_norm_of_float32_gradients_does_not_overflow(mesh: Mesh) -> None:
    model = small_model().float()
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e30)
    norm = float(adamw(model, mesh).reduce().sqrt())
    count = sum(p.numel() for p in model.parameters())
    assert norm == pytest.approx(1e30 * math.sqrt(count), rel=1e-6)


def test_a_long_gradient_is_scaled_to_the_clip_in_its_own_direction(mesh: Mesh) -> None:
    model = small_model()
    optimizer = adamw(model, mesh, clip=0.5)
    norm = updated(model, optimizer, 1, size=7.0)
    scaled = [parameter.grad.clone() for parameter in model.parameters()]
    assert norm > 0.5
    assert float(optimizer.reduce().sqrt()) == pytest.approx(0.5, rel=1e-12)
    fill_gradients(model, 1, size=7.0)
    for parameter, gradient in zip(model.parameters(), scaled, strict=True):
        assert torch.allclose(gradient, parameter.grad * (0.5 / norm), rtol=1e-12)


def test_a_short_gradient_is_left_as_it_is(mesh: Mesh) -> None:
    model = small_model()
    optimizer = adamw(model, mesh, clip=1e3)
    fill_gradients(model, 1)
    before = [parameter.grad.clone() for parameter in model.parameters()]
    optimizer.step(0.1, optimizer.reduce().sqrt())
    assert all(torch.equal(p.grad, b) for p, b in zip(model.parameters(), before, strict=True))


def test_its_state_goes_out_and_comes_in_by_name(mesh: Mesh) -> None:
    first, second = small_model(), small_model()
    one, other = (adamw(model, mesh, weight_decay=0.1) for model in (first, second))
    for step in range(1, 4):
        updated(first, one, step)
    exported = {name: tensor.clone() for name, tensor in one.tensors().items()}
    names = [name for name, _ in first.named_parameters()]
    moments = [f"{m}.{name}" for name in names for m in ("exp_avg", "exp_avg_sq")]
    assert exported.keys() == {*moments, "updates"}
    assert float(exported["updates"]) == 3
    second.load_state_dict(first.state_dict())
    other.load(exported)
    assert all(torch.equal(other.tensors()[name], exported[name]) for name in exported)
    for step in range(4, 6):
        updated(first, one, step)
        updated(second, other, step)
    assert same(first, second)


def test_forgetting_gradients_leaves_none(mesh: Mesh) -> None:
    model = small_model()
    fill_gradients(model, 1)
    optimizer = adamw(model, mesh)
    optimizer.zero_gradients()
    assert all(parameter.grad is None for parameter in model.parameters())
