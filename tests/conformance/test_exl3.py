"""EXL3 decoding, products and cache code against fixtures made by the reference kernels."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.exl3.fakes import FakeCheckpoint
from twining.exl3.cache_codec import dequantize, quantize
from twining.exl3.codec import (
    Codebook,
    codebook_values,
    decode_trellis,
    pack_states,
    trellis_bits,
    trellis_states,
)
from twining.exl3.hadamard import hadamard128
from twining.exl3.linear import read_linear, unpack_signs

INTEGER = [(cb, str(k)) for cb in Codebook for k in range(1, 9)]
CASES = INTEGER + [(Codebook.MUL1, rate) for rate in ("1p5", "2p5", "3p5")]


@pytest.fixture(scope="session")
def exl3(golden: Path) -> Path:
    folder = golden / "exl3"
    if not folder.is_dir():
        pytest.skip(f"no EXL3 fixtures at {folder}")
    return folder


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def ulps(a: torch.Tensor, b: torch.Tensor) -> int:
    """Largest distance of two fp16 tensors in units in the last place (signs folded)."""

    def key(x: torch.Tensor) -> torch.Tensor:
        bits = x.contiguous().view(torch.int16).int()
        return torch.where(bits < 0, -(bits & 0x7FFF), bits)

    return int((key(a) - key(b)).abs().max())


def test_codebooks(exl3: Path) -> None:
    stored = load_file(exl3 / "codebooks.safetensors")
    digests = json.loads((exl3 / "manifest.json").read_text())["phases"]["exact"]["lut_sha256"]
    for codebook in Codebook:
        values = codebook_values(codebook)
        assert same_bits(values, stored[codebook])
        assert hashlib.sha256(values.numpy().tobytes()).hexdigest() == digests[codebook]


@pytest.mark.parametrize(("codebook", "rate"), CASES)
def test_linear(exl3: Path, codebook: Codebook, rate: str) -> None:
    path = exl3 / f"lin_{codebook}_K{rate}.safetensors"
    t = load_file(path)
    with safe_open(path, "pt") as file:
        digest = file.metadata()["states_sha256"]
    states = trellis_states(t["trellis"])
    assert hashlib.sha256(states.to(torch.int16).numpy().tobytes()).hexdigest() == digest
    assert torch.equal(states[0, 0].to(torch.int16), t["states_tile00"])
    assert torch.equal(pack_states(states, trellis_bits(t["trellis"])), t["trellis"])
    assert same_bits(decode_trellis(t["trellis"], codebook), t["w_inner"])

    tensors = {f"m.{key}": t[key] for key in ("trellis", "suh", "svh")}
    marker = {"mcg": -877912083, "mul1": -2082680531}.get(codebook)
    if marker is not None:
        tensors[f"m.{codebook}"] = torch.tensor(marker, dtype=torch.int32)
    weight = read_linear(FakeCheckpoint(tensors), "m", 256, 128).weight
    # The reference rounds the full weight to fp16 four times, we round once.
    assert relative(weight.T, t["w_full"]) < 6e-4
    rotated = hadamard128((t["x5"] * t["suh"]).float()).half()
    assert ulps(rotated, t["x5_had"]) <= 1
    for name in ("y1_f16", "y1_f32", "y5_f16", "y5_f32", "y5_recon_f16", "y5_recon_f32"):
        exact = t["x1" if name.startswith("y1") else "x5"].double() @ weight.T.double()
        assert relative(t[name], exact) < 6e-4, name


@pytest.mark.parametrize(
    ("file", "limit"), [("y_gemv", 4e-3), ("y_default", 1.5e-2), ("y_int8r", 1.5e-2)]
)
def test_other_product_paths(exl3: Path, file: str, limit: float) -> None:
    """The reference's faster small-row kernels stay within their known errors of our weights."""
    outputs = load_file(exl3 / f"{file}.safetensors")
    for codebook, rate in CASES:
        t = load_file(exl3 / f"lin_{codebook}_K{rate}.safetensors")
        inner = decode_trellis(t["trellis"], codebook).double()
        rotated = hadamard128(hadamard128(inner, 0), 1)
        weight = t["suh"].double()[:, None] * rotated * t["svh"].double()
        for name, x in (("y1", t["x1"]), ("y5", t["x5"])):
            for kind in ("f16", "f32"):
                y = outputs[f"{codebook}_K{rate}.{name}_{kind}"]
                assert relative(y, x.double() @ weight) < limit, (codebook, rate, name, kind)


def test_hadamard(exl3: Path) -> None:
    t = load_file(exl3 / "hadamard.safetensors")
    x, scale = t["x"], t["scale"]
    plain = hadamard128(x.float())
    pre = hadamard128((x * scale).float())
    pre32 = hadamard128(x.float() * scale.float())
    torch.testing.assert_close(plain, t["plain_f32"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(pre32, t["pre_f32"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(plain * scale.float(), t["post_f32"], rtol=1e-5, atol=1e-6)
    assert ulps(hadamard128(x), t["plain_f16"]) <= 1
    assert ulps(pre.half(), t["pre_f16"]) <= 1
    assert ulps(plain.half() * scale, t["post_f16"]) <= 1
    assert torch.equal(unpack_signs(t["signs_packed"]), t["signs"].sign())


@pytest.mark.parametrize("bits", range(2, 9))
def test_cache(exl3: Path, bits: int) -> None:
    t = load_file(exl3 / "cache.safetensors")
    words, scales = quantize(t["x"], bits)
    assert torch.equal(words, t[f"q{bits}"])
    assert same_bits(scales, t[f"s{bits}"])
    assert same_bits(dequantize(words, scales, bits), t[f"y{bits}"])
