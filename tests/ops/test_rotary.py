"""Rotary positions against rotations of complex numbers, near and far."""

from math import cos, sin

import pytest
import torch

from rlt_dist.ops.rotary import rotary_tables, rotate


def test_halves_rotate_as_complex_numbers():
    position = torch.tensor([[0, 1, 7], [3, 0, 123456]])
    x = torch.randn(2, 3, 5, 6, dtype=torch.float64)
    rotated = rotate(x, *rotary_tables(position, 6, 100.0, torch.float64))
    for row, token, i in ((r, t, i) for r in range(2) for t in range(3) for i in range(3)):
        angle = position[row, token].item() * 100.0 ** (-2 * i / 6)
        turned = torch.complex(x[row, token, :, i], x[row, token, :, i + 3]) * complex(
            cos(angle), sin(angle)
        )
        torch.testing.assert_close(rotated[row, token, :, i], turned.real)
        torch.testing.assert_close(rotated[row, token, :, i + 3], turned.imag)


@pytest.mark.parametrize("position", [0, 1, 4097, 10**7, 2**24 + 1])
def test_float32_tables_are_the_rounded_float64_tables(position):
    at = torch.tensor([[position]])
    wide = rotary_tables(at, 16, 10000.0, torch.float64)
    narrow = rotary_tables(at, 16, 10000.0, torch.float32)
    for exact, rounded in zip(wide, narrow, strict=True):
        assert exact.shape == (1, 1, 1, 8)
        assert torch.equal(exact.float(), rounded)


def test_the_angles_at_ten_million_are_exact():
    cosine, sine = rotary_tables(torch.tensor([[10**7]]), 4, 10000.0, torch.float64)
    wanted = [10.0**7, 10.0**5]  # frequencies 1 and 1 / 100
    torch.testing.assert_close(cosine.flatten().tolist(), [cos(a) for a in wanted])
    torch.testing.assert_close(sine.flatten().tolist(), [sin(a) for a in wanted])


@pytest.mark.parametrize("far", [10, 10**7])
def test_products_depend_on_the_distance_alone(far):
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def product(at: int) -> float:
        tables = [rotary_tables(torch.tensor([[t]]), 8, 10000.0, q.dtype) for t in (at + 3, at)]
        return (rotate(q, *tables[0]) * rotate(k, *tables[1])).sum().item()

    assert product(far) == pytest.approx(product(0), abs=1e-7)
