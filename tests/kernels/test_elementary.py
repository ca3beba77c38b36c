"""Activation, linear, norm, convolution: values, and the independence of rows."""

import math

import pytest
import torch
from torch.nn import functional as F

from twining.kernels.activation.reference import SPAN, exp, sigmoid, silu, softplus, swiglu
from twining.kernels.causal_conv.reference import causal_conv, windows
from twining.kernels.norm.reference import l2_norm, layer_norm, rms_norm
from twining.kernels.row_linear.reference import head_linear, pad_rows, padded_rows, row_linear


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


FUNCTIONS = {
    "sigmoid": (sigmoid, torch.sigmoid),
    "silu": (silu, F.silu),
    "exp": (exp, torch.exp),
    "softplus": (softplus, F.softplus),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("width", [1, 3, 8, 33, 700])
def test_elementwise_rows_stand_alone(name, width):
    ours, torchs = FUNCTIONS[name]
    x = randn(160, width, seed=width) * 4
    want = ours(x)
    torch.testing.assert_close(want, torchs(x.double()).float(), rtol=1e-6, atol=1e-7)
    for start, stop in ((0, 16), (3, 19), (144, 160), (7, 8), (0, 159)):
        assert torch.equal(ours(x[start:stop].contiguous()), want[start:stop])
    wide = torch.cat((x, x), 1)[:, width:]  # not contiguous
    assert torch.equal(ours(wide), want)


def test_elementwise_beyond_one_span():
    x = randn(SPAN + 17)
    assert torch.equal(exp(x)[SPAN:], exp(x[SPAN:]))


def test_swiglu_clamps():
    gate = torch.tensor([[-50.0, 5.0, 1.0, 1.0]])
    up = torch.tensor([[1.0, 1.0, 7.0, -7.0]])
    got = swiglu(torch.cat((gate, up), 1), 2.0)
    s = [x / (1 + math.exp(-x)) for x in (-50.0, 2.0, 1.0, 1.0)]
    want = torch.tensor([[s[0], s[1], 2 * s[2], -2 * s[3]]])
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize(("rows", "block"), [(8, 8), (48, 8), (64, 64), (128, 64)])
@pytest.mark.parametrize(("inputs", "outputs"), [(96, 203), (40, 24), (256, 512)])
def test_row_linear(rows, block, inputs, outputs):
    x, weight = randn(rows, inputs), randn(outputs, inputs, seed=1)
    got = row_linear(x, weight, block=block)
    want = (x.double() @ weight.double().t()).float()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    for shift in (1, 5, block - 1):
        rolled = row_linear(x.roll(shift, 0), weight, block=block)
        assert torch.equal(rolled, got.roll(shift, 0))


def test_row_linear_refuses_ragged_rows():
    with pytest.raises(ValueError, match="17 rows"):
        row_linear(torch.zeros(17, 8), torch.zeros(4, 8), block=8)


def test_head_linear_and_padding():
    x, weight = randn(48, 3, 24), randn(3, 24, 32, seed=1)
    got = head_linear(x, weight, block=8)
    torch.testing.assert_close(got, torch.einsum("rai,aio->rao", x, weight), rtol=1e-5, atol=1e-5)
    assert torch.equal(head_linear(x.roll(5, 0), weight, block=8), got.roll(5, 0))
    assert [padded_rows(n) for n in (1, 8, 17)] == [8, 8, 24]
    padded = pad_rows(x, 64)
    assert torch.equal(padded[:48], x) and not padded[48:].any()


def test_norms():
    x, weight, bias = randn(32, 40), randn(40, seed=1), randn(40, seed=2)
    d = x.double()
    want = d / (d.pow(2).mean(-1, keepdim=True) + 1e-2).sqrt() * weight
    torch.testing.assert_close(rms_norm(x, weight, 1e-2), want.float())
    d0 = d - d.mean(-1, keepdim=True)
    want = d0 / (d0.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight + bias
    torch.testing.assert_close(layer_norm(x, weight, bias), want.float(), rtol=1e-5, atol=1e-5)
    tiny = x * 1e-3  # where the epsilon shows
    want = d * 1e-3 / ((d * 1e-3).pow(2).sum(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(l2_norm(tiny), want.float(), rtol=1e-5, atol=1e-6)
    assert not l2_norm(torch.zeros(1, 8)).any()


def test_causal_conv_order_of_taps():
    z, weight = randn(3 + 20, 24), randn(4, 24, seed=1)
    z[:3] = 0
    got = causal_conv(windows(z, 4), weight)
    want = torch.zeros(20, 24)
    for t in range(20):
        for j in range(4):
            want[t] += weight[j] * z[t + j]  # tap 3 meets the current row
    torch.testing.assert_close(got, F.silu(want), rtol=1e-5, atol=1e-6)
