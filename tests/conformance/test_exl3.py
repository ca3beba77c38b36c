"""EXL3 decoding, products and cache code against fixtures made by the reference kernels."""

import hashlib
from pathlib import Path

import torch

from tests.conformance.sets import metadata, read_json, tensors
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

MARKER = {Codebook.MCG: -877912083, Codebook.MUL1: -2082680531}
# Known errors of the reference's faster small-row kernels; int8 activations cost up to 1e-2.
PRODUCT_LIMITS = {"y_gemv": 4e-3}
INT8_LIMIT = 1.5e-2


def case_of(path: Path) -> tuple[Codebook, float]:
    """Codebook and bits of a `lin_` file: from its metadata, else from its name."""
    _, name, rate = path.stem.split("_")
    meta = metadata(path)
    return Codebook(meta.get("codebook", name)), float(meta.get("K", rate[1:].replace("p", ".")))


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


def test_codebooks(codebooks_file: Path) -> None:
    stored = tensors(codebooks_file)
    assert set(stored) <= set(Codebook) and stored
    manifest = codebooks_file.parent / "manifest.json"
    digests = lut_digests(read_json(manifest)) if manifest.is_file() else {}
    for codebook in map(Codebook, stored):
        values = codebook_values(codebook)
        assert same_bits(values, stored[codebook])
        digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
        assert digests.get(codebook, digest) == digest


def lut_digests(manifest: object) -> dict[str, str]:
    """The manifest's `lut_sha256`, at whatever depth."""
    if not isinstance(manifest, dict):
        return {}
    if isinstance(manifest.get("lut_sha256"), dict):
        return manifest["lut_sha256"]
    return next(filter(None, map(lut_digests, manifest.values())), {})


def test_linear(linear_file: Path) -> None:
    t = tensors(linear_file)
    codebook, bits = case_of(linear_file)
    states = trellis_states(t["trellis"])
    digest = hashlib.sha256(states.to(torch.int16).numpy().tobytes()).hexdigest()
    assert metadata(linear_file).get("states_sha256", digest) == digest
    assert trellis_bits(t["trellis"]) == bits
    if "states_tile00" in t:
        assert torch.equal(states[0, 0].to(torch.int16), t["states_tile00"])
    assert torch.equal(pack_states(states, bits), t["trellis"])
    assert same_bits(decode_trellis(t["trellis"], codebook), t["w_inner"])

    stored = {f"m.{key}": t[key] for key in ("trellis", "suh", "svh")}
    if codebook in MARKER:
        stored[f"m.{codebook}"] = torch.tensor(MARKER[codebook], dtype=torch.int32)
    outputs, inputs = len(t["svh"]), len(t["suh"])
    weight = read_linear(FakeCheckpoint(stored), "m", outputs, inputs).weight
    if "w_full" in t:  # the reference rounds it to fp16 four times, we round once
        assert relative(weight.T, t["w_full"]) < 6e-4
    for name, got in t.items():
        x = name.partition("_")[0].replace("y", "x")
        if name.endswith("_had"):
            rotated = hadamard128((t[x] * t["suh"]).float()).half()
            assert ulps(rotated, got) <= 1, name
        elif name.startswith("y"):
            assert relative(got, t[x].double() @ weight.T.double()) < 6e-4, name


def test_other_product_paths(product_file: Path) -> None:
    """The reference's faster small-row kernels stay within their known errors of our weights."""
    outputs = tensors(product_file)
    limit = PRODUCT_LIMITS.get(product_file.stem, INT8_LIMIT)
    weights: dict[str, torch.Tensor] = {}
    for name, y in outputs.items():
        case, _, product = name.partition(".")
        path = product_file.parent / f"lin_{case}.safetensors"
        t = tensors(path)
        if case not in weights:
            inner = decode_trellis(t["trellis"], case_of(path)[0]).double()
            rotated = hadamard128(hadamard128(inner, 0), 1)
            weights[case] = t["suh"].double()[:, None] * rotated * t["svh"].double()
        x = t[product.partition("_")[0].replace("y", "x")]
        assert relative(y, x.double() @ weights[case]) < limit, name


def test_hadamard(hadamard_file: Path) -> None:
    t = tensors(hadamard_file)
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


def test_cache(cache_case: tuple[Path, int]) -> None:
    path, bits = cache_case
    t = tensors(path)
    words, scales = quantize(t["x"], bits)
    assert torch.equal(words, t[f"q{bits}"])
    assert same_bits(scales, t[f"s{bits}"])
    assert same_bits(dequantize(words, scales, bits), t[f"y{bits}"])
