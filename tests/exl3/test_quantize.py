"""Quantising a layer: errors, padding, zero channels, calibration, repeatability, refusals."""

import pytest
import torch

from twining.exl3.codec import Codebook
from twining.exl3.encoder import TileEncoder
from twining.exl3.hadamard import hadamard128
from twining.exl3.ldlq import damp, feedback_matrix
from twining.exl3.quantize import find_scale, quantize_linear

ENCODER = TileEncoder(3, Codebook.MUL1)


def uneven(out: int, inp: int, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    rows = torch.rand(out, 1, generator=gen) + 0.2
    cols = torch.rand(1, inp, generator=gen) + 0.2
    return torch.randn(out, inp, generator=gen) * rows * cols * 0.02


def correlated_inputs(rows: int, width: int, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    mix = torch.randn(width, width, generator=gen) * 0.15 + torch.eye(width)
    return torch.randn(rows, width, generator=gen) @ mix


def test_padded_layer_keeps_its_zero_channels() -> None:
    weight = uneven(100, 70, seed=1)
    weight[3] = 0
    done = quantize_linear(weight, ENCODER, seed=9, scale=0.76)
    dense = done.packed.dense()
    assert dense.shape == (128, 128) and not done.is_calibrated
    assert not dense[3].any() and not dense[100:].any()
    error = (dense[:100, :70] - weight).square().sum() / weight.square().sum()
    assert abs(float(error) - done.mse) < 1e-6 and done.mse < 0.025
    assert done.packed.suh.dtype == torch.float16 and done.packed.trellis.shape == (8, 8, 48)


class GridEncoder:
    """Stands in for the search: rounds to a grid and clips, so the best scale is easy to find."""

    bits = 4.0
    device = torch.device("cpu")

    def encode(self, tiles: torch.Tensor) -> torch.Tensor:
        return (tiles * 4).round().clamp(-10, 10).int()

    def values(self, states: torch.Tensor) -> torch.Tensor:
        return states.float() / 4


def test_scale_search_finds_the_optimum() -> None:
    gen = torch.Generator().manual_seed(2)
    weight = torch.randn(256, 128, generator=gen) * 1.24371088
    grid = GridEncoder()

    def error(scale: float) -> float:
        coded = grid.values(grid.encode(weight * scale)) / scale
        return float((coded - weight).square().mean())

    best = min((0.01 * i for i in range(1, 200)), key=error)
    found = find_scale(weight, grid)
    assert abs(found - best) < 0.06 and error(found) < 1.02 * error(best)


def test_seed_decides_the_result() -> None:
    weight = uneven(128, 128, seed=3)
    first, again, other = (
        quantize_linear(weight, ENCODER, seed=s, scale=0.76).packed for s in (4, 4, 5)
    )
    assert torch.equal(first.trellis, again.trellis) and torch.equal(first.suh, again.suh)
    assert not torch.equal(first.trellis, other.trellis)


def test_hessian_lowers_the_output_error() -> None:
    weight = uneven(128, 200, seed=4)
    x = correlated_inputs(600, 200, seed=5)
    hessian = x.T @ x / len(x)

    def output_error(dense: torch.Tensor) -> float:
        y = x @ weight.T
        return float((x @ dense[:128, :200].T - y).square().sum() / y.square().sum())

    plain = quantize_linear(weight, ENCODER, seed=6, scale=0.76)
    calibrated = quantize_linear(weight, ENCODER, seed=6, scale=0.76, hessian=hessian)
    assert calibrated.is_calibrated
    got = output_error(calibrated.packed.dense())
    assert got < 0.8 * output_error(plain.packed.dense())
    assert abs(got / calibrated.output_error - 1) < 0.02


@pytest.mark.parametrize("bad", [torch.zeros(128, 128), torch.full((128, 128), float("nan"))])
def test_useless_hessian_falls_back(bad: torch.Tensor) -> None:
    done = quantize_linear(uneven(128, 128, seed=7), ENCODER, seed=1, hessian=bad, scale=0.76)
    assert not done.is_calibrated and done.mse < 0.0185


def test_feedback_matrix_factors_the_hessian() -> None:
    x = correlated_inputs(300, 128, seed=8)
    damped = damp(x.T @ x / len(x))
    signs = torch.randint(0, 2, (128,)).float() * 2 - 1
    lower = feedback_matrix(damped, signs)
    for i in range(0, 128, 16):
        assert not lower[i : i + 16, i:].any()
    unit = lower.double() + torch.eye(128)
    rotated = hadamard128(hadamard128(damped * signs * signs[:, None], 0), 1).double()
    core = torch.linalg.inv(unit) @ rotated @ torch.linalg.inv(unit).T
    blocks = torch.block_diag(*[core[i : i + 16, i : i + 16] for i in range(0, 128, 16)])
    torch.testing.assert_close(core, blocks, rtol=0, atol=1e-4)


def test_hopeless_hessian_has_no_factor() -> None:
    broken = torch.eye(128)
    broken[0, 1] = broken[1, 0] = 1e6
    assert feedback_matrix(broken, torch.ones(128)) is None


def test_zero_weight() -> None:
    done = quantize_linear(torch.zeros(128, 128), ENCODER, seed=1, scale=0.76)
    assert done.mse == 0 and not done.packed.dense().any()


@pytest.mark.parametrize(
    ("weight", "hessian", "message"),
    [
        (torch.zeros(128), None, r"need \[out, in\]"),
        (torch.zeros(0, 128), None, r"need \[out, in\]"),
        (torch.full((4, 4), float("inf")), None, "not finite"),
        (torch.full((4, 4), 1e8), None, "too large"),
        (torch.full((4, 4), 1e-12), None, "too small"),
        (torch.ones(4, 4), torch.eye(5), "4 inputs"),
    ],
)
def test_refusals(weight: torch.Tensor, hessian: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantize_linear(weight, ENCODER, seed=1, hessian=hessian, scale=0.76)
