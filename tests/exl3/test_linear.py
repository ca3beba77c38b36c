"""Reading linear layers: EXL3, legacy signs, plain, padded and FP8 weights, and damaged ones."""

import pytest
import torch

from tests.exl3.fakes import FakeCheckpoint, random_exl3
from twining.errors import CheckpointError
from twining.exl3.codec import Codebook
from twining.exl3.hadamard import hadamard128, hadamard_matrix
from twining.exl3.linear import has_linear, read_exl3, read_linear


def dense_slow(tensors: dict[str, torch.Tensor], inner: torch.Tensor) -> torch.Tensor:
    """Section 7.3 with an explicit block-diagonal Hadamard matrix, float64 [out, in]."""
    index = torch.arange(128)
    parity = torch.tensor([[bin(i & j).count("1") & 1 for j in range(128)] for i in index.tolist()])
    h = (1.0 - 2.0 * parity).double() / 128**0.5
    k, n = inner.shape
    left = torch.block_diag(*[h] * (k // 128))
    right = torch.block_diag(*[h] * (n // 128))
    w = left @ inner.double() @ right
    return (tensors["m.suh"].double()[:, None] * w * tensors["m.svh"].double()).T


@pytest.mark.parametrize(("out", "inp"), [(256, 128), (200, 100), (128, 384), (1, 129)])
@pytest.mark.parametrize(("codebook", "bits"), [("mul1", 3.5), ("mcg", 4), ("3inst", 2)])
def test_quantised_weight(out: int, inp: int, codebook: str, bits: float) -> None:
    k, n = -(-inp // 128) * 128, -(-out // 128) * 128
    tensors = random_exl3("m", k, n, bits, codebook, seed=out + inp)
    tensors["m.bias"] = torch.randn(n).half()
    ckpt = FakeCheckpoint(tensors)
    got = read_linear(ckpt, "m", out, inp)
    want = dense_slow(tensors, read_exl3(ckpt, "m", out, inp).inner())[:out, :inp]
    assert got.weight.shape == (out, inp) and got.weight.is_contiguous()
    assert got.bits == bits and got.codebook == Codebook(codebook)
    torch.testing.assert_close(got.weight.double(), want, rtol=1.2e-7, atol=1e-12)
    assert torch.equal(got.bias, tensors["m.bias"][:out].float())


def test_dense_does_not_depend_on_the_slab(monkeypatch: pytest.MonkeyPatch) -> None:
    ckpt = FakeCheckpoint(random_exl3("m", 640, 256, 3, "mul1", seed=5))
    whole = read_linear(ckpt, "m", 256, 640).weight
    monkeypatch.setattr("twining.exl3.linear._SLAB", 1)
    assert torch.equal(read_linear(ckpt, "m", 256, 640).weight, whole)


def test_trellis_wins_over_a_redundant_weight() -> None:
    tensors = random_exl3("m", 128, 128, 4, "mul1", seed=1)
    tensors["m.weight"] = torch.zeros(128, 128)
    assert read_linear(FakeCheckpoint(tensors), "m", 128, 128).weight.abs().max() > 0


def test_legacy_signs() -> None:
    tensors = random_exl3("m", 128, 256, 3, "3inst", seed=2)
    tensors["m.suh"] = (torch.randint(0, 2, (128,)) * 2 - 1).half()
    want = read_linear(FakeCheckpoint(tensors), "m", 256, 128).weight
    bits = (tensors.pop("m.suh") < 0).view(8, 16).long()
    words = (bits << torch.arange(16)).sum(1)
    tensors["m.su"] = torch.where(words >= 32768, words - 65536, words).to(torch.int16)
    assert torch.equal(read_linear(FakeCheckpoint(tensors), "m", 256, 128).weight, want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(70, 100), (128, 100), (70, 128), (128, 128)])
def test_plain_weight_true_or_padded(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    weight = torch.randn(shape).to(dtype)
    got = read_linear(FakeCheckpoint({"m.weight": weight}), "m", 70, 100)
    assert torch.equal(got.weight, weight[:70, :100].float())
    assert got.bias is None and got.codebook is None
    assert got.bits == (32 if dtype == torch.float32 else 16)


def test_fp8_blocks() -> None:
    values = torch.randn(200, 130).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 2) + 0.5
    got = read_linear(
        FakeCheckpoint({"m.weight": values, "m.weight_scale_inv": scale}), "m", 200, 130
    )
    want = values.float()
    for i in range(2):
        for j in range(2):
            want[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] *= scale[i, j]
    assert torch.equal(got.weight, want) and got.bits == 8


def test_absent_module() -> None:
    ckpt = FakeCheckpoint({"other.weight": torch.zeros(1, 1)})
    assert read_linear(ckpt, "m", 1, 1, optional=True) is None
    assert has_linear(ckpt, "other") and not has_linear(ckpt, "m")
    with pytest.raises(CheckpointError, match=r"neither m\.weight nor m\.trellis"):
        read_linear(ckpt, "m", 1, 1)


DAMAGE = {
    "suh missing": (lambda t: t.pop("m.suh"), "suh missing"),
    "svh missing": (lambda t: t.pop("m.svh"), "svh missing"),
    "trellis missing": (lambda t: t.pop("m.trellis"), "trellis missing"),
    "two markers": (lambda t: t.update({"m.mcg": torch.tensor(1, dtype=torch.int32)}), "both"),
    "unknown marker": (
        lambda t: t.update({"m.mul1": torch.tensor(7, dtype=torch.int32)}),
        "0x7|07",
    ),
    "float marker": (lambda t: t.update({"m.mul1": torch.tensor(7.0)}), "I32 scalar"),
    "short suh": (lambda t: t.update({"m.suh": t["m.suh"][:64]}), r"expected F16 \[128\]"),
    "fp32 svh": (lambda t: t.update({"m.svh": t["m.svh"].float()}), "expected F16"),
    "nan svh": (lambda t: t["m.svh"].fill_(float("nan")), "not finite"),
    "int32 trellis": (lambda t: t.update({"m.trellis": t["m.trellis"].int()}), "expected I16"),
    "bad words": (lambda t: t.update({"m.trellis": t["m.trellis"][..., :20]}), "words per tile"),
    "other shape": (lambda t: t.update({"m.trellis": t["m.trellis"][:4]}), "does not fit"),
    "2-D trellis": (
        lambda t: t.update({"m.trellis": t["m.trellis"][0], "m.signs": t["m.suh"]}),
        "embedding table",
    ),
    "half rate": (
        lambda t: (t.pop("m.mul1"), t.update({"m.trellis": t["m.trellis"][..., :40]})),
        "half rates",
    ),
    "long bias": (lambda t: t.update({"m.bias": torch.zeros(300)}), "expected a float tensor"),
    "integer bias": (lambda t: t.update({"m.bias": torch.zeros(128).int()}), "expected a float"),
    "short sign words": (
        lambda t: (t.pop("m.suh"), t.update({"m.su": torch.zeros(3, dtype=torch.int16)})),
        "expected I16",
    ),
    "rank slices": (
        lambda t: t.update({"m.rank0.trellis": t.pop("m.trellis")}),
        "rank-sliced",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damage_is_one_clear_line(case: str) -> None:
    change, message = DAMAGE[case]
    tensors = random_exl3("m", 128, 128, 3, "mul1", seed=3)
    change(tensors)
    with pytest.raises(CheckpointError, match=message) as caught:
        read_linear(FakeCheckpoint(tensors), "m", 128, 128)
    assert "\n" not in str(caught.value) and "m" in str(caught.value)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"m.weight": torch.zeros(5, 4)}, r"expected \[4, 4\]"),
        ({"m.weight": torch.zeros(4)}, r"expected \[4, 4\]"),
        ({"m.weight": torch.zeros(4, 4).int()}, "expected F32"),
        ({"m.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn)}, "scale_inv is missing"),
        (
            {
                "m.weight": torch.zeros(4, 4).to(torch.float8_e4m3fn),
                "m.weight_scale_inv": torch.zeros(2, 1),
            },
            r"expected \[1, 1\]",
        ),
    ],
)
def test_damaged_plain_weight(tensors: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_linear(FakeCheckpoint(tensors), "m", 4, 4)


def test_hadamard_is_its_own_inverse_along_any_dimension() -> None:
    x = torch.randn(256, 3, 128)
    for dim in (0, 2, -1):
        torch.testing.assert_close(hadamard128(hadamard128(x, dim), dim), x)
    h = hadamard_matrix()
    torch.testing.assert_close(hadamard128(x[:128, 0], 0), h @ x[:128, 0], rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="multiple of 128"):
        hadamard128(x, 1)
