"""The cache code: the published vector, round trips, and refusal of what the format lacks."""

import hashlib

import pytest
import torch

from twining.exl3.cache_codec import dequantize, dequantize_rotated, quantize, rotate32, row_words

# Two groups' words (hex) and the first four decoded values (hex fp16), spec/exl3.md 6.6.
VECTOR = {
    2: "d9749d98 96c9eabe 57569231 9af2a9b4 -> 42f7 c678 c0fa b7f6",
    3: "d9749d98 96c9eabe 454c7c17 57569231 9af2a9b4 4b028671 -> 4278 c4ba c278 bcfa",
    4: "85d787b2 c7b66f40 db99afd9 8759d387 863a1c17 744d5668 98858c70 8698fd3b"
    " -> 43b6 c41b c238 c03b",
    5: "85d787b2 c7b66f40 db99afd9 8759d387 85141630 863a1c17 744d5668 98858c70 8698fd3b 711849fd"
    " -> 42f7 c3b6 c1f8 c03b",
    7: "85d787b2 c7b66f40 db99afd9 8759d387 43784f41 90260661 909b878b"
    " 863a1c17 744d5668 98858c70 8698fd3b 6482eee6 3a135380 73cc6f2a -> 42cf c3ee c1f0 bf86",
    8: "8670b226 8651dd7c 65ff4a02 c770b06c a6f9d396 d2b1949b d0388478 8b755192"
    " 1ec81679 8c683fa9 5a62628b 754b46d1 8bc37100 9687815d f1d533be 816f9a8a"
    " -> 42bf c3ee c200 bfa6",
}
RMS = {2: 0.355, 3: 0.1726, 4: 0.0859, 5: 0.0440, 6: 0.0220, 7: 0.0111, 8: 0.00552}


def vector() -> torch.Tensor:
    r, values = 1772, []
    for _ in range(64):
        r = (1664525 * r + 1013904223) % 2**32
        values.append(((r >> 21) - 1024) / 256)
    x = torch.tensor(values).half()
    assert hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16] == "d7855b8d1effc92b"
    return x


@pytest.mark.parametrize("bits", VECTOR)
def test_published_vector(bits: int) -> None:
    words, scales = quantize(vector(), bits)
    want_words, want_values = VECTOR[bits].split(" -> ")
    assert " ".join(f"{w & 0xFFFFFFFF:08x}" for w in words.tolist()) == want_words
    assert [f"{s & 0xFFFF:04x}" for s in scales.view(torch.int16).tolist()] == ["45a1", "4528"]
    values = dequantize(words, scales, bits)[:4].view(torch.int16).tolist()
    assert " ".join(f"{v & 0xFFFF:04x}" for v in values) == want_values


@pytest.mark.parametrize("bits", RMS)
def test_error_on_gaussian_data(bits: int) -> None:
    gen = torch.Generator().manual_seed(bits)
    x = torch.randn(3, 70, 96, generator=gen).half()
    words, scales = quantize(x, bits)
    assert words.shape == (3, 70, row_words(96, bits)) and scales.shape == (3, 70, 3)
    error = (dequantize(words, scales, bits).float() - x.float()).norm() / x.float().norm()
    assert abs(float(error) / RMS[bits] - 1) < 0.05
    turned = rotate32(dequantize_rotated(words, scales, bits))
    torch.testing.assert_close(turned.half(), dequantize(words, scales, bits), rtol=2e-3, atol=2e-3)


def test_rows_do_not_depend_on_their_company() -> None:
    x = torch.randn(37, 512).half()
    words, scales = quantize(x, 6)
    alone_words, alone_scales = quantize(x[20], 6)
    assert torch.equal(words[20], alone_words) and torch.equal(scales[20], alone_scales)
    assert torch.equal(dequantize(words, scales, 6)[20], dequantize(alone_words, alone_scales, 6))


@pytest.mark.parametrize("bits", range(2, 9))
def test_zeros_stay_zeros(bits: int) -> None:
    words, scales = quantize(torch.zeros(2, 64).half(), bits)
    assert not scales.any() and not dequantize(words, scales, bits).any()


def test_refusals() -> None:
    with pytest.raises(ValueError, match="use 2"):
        quantize(torch.zeros(32).half(), 9)
    with pytest.raises(ValueError, match="multiple of 32"):
        quantize(torch.zeros(48).half(), 8)
    with pytest.raises(ValueError, match="expected 8"):
        dequantize(torch.zeros(7, dtype=torch.int32), torch.zeros(2).half(), 4)
