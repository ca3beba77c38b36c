"""The tiny published-layout model converts to a pack whose modules all read back."""

from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from twining.checkpoint.hf_config import parse_glm5_next
from twining.checkpoint.naming import TensorNames
from twining.checkpoint.reader import Checkpoint
from twining.exl3.convert import convert_model
from twining.exl3.linear import read_linear

VISUAL = "model.visual."
LIMIT = 0.003  # relative MSE at 5 bits; padded matrices at a fixed global scale are the worst


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """The search works on small tensors: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def tiny(golden: Path) -> Path:
    folder = golden / "glm5_next" / "tiny"
    if not (folder / "model.safetensors").is_file():
        pytest.skip(f"no tiny model at {folder}")
    return folder


def test_pack_of_the_tiny_model(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twining.exl3.quantize.find_scale", lambda weight, encoder: 0.75)
    patterns = (
        "*.layers.0.self_attn.qkv_proj",
        "*.layers.3.self_attn.indexer.wq_b",
        "*.layers.3.mlp.experts.0.down_proj",
        "*.layers.8.eh_proj",
        "*.blocks.0.attn.[qkv]_proj",
    )
    report = convert_model(
        tiny,
        tmp_path,
        bits=16,
        head_bits=16,
        mtp_bits=16,
        vision_bits=16,
        bits_for=tuple((pattern, 5.0) for pattern in patterns),
    )
    assert len(report.modules) == 7 and all(m.mse < LIMIT for m in report.modules)

    source, pack = Checkpoint.open(tiny), Checkpoint.open(tmp_path)
    config = parse_glm5_next(pack.config)
    names = TensorNames.find(pack.tensors)
    old = TensorNames.find(source.tensors)
    kda = names.kda(0)
    assert len(kda.qkv) == 1 and len(kda.conv) == 1
    parts = [source.read(f"{module}.weight", torch.float32) for module in old.kda(0).qkv]
    got = read_linear(pack, kda.qkv[0], 3 * config.kda_heads * config.kda_head_dim, 128)
    want = torch.cat(parts)
    assert float((got.weight - want).square().sum() / want.square().sum()) < LIMIT
    for i in range(config.num_layers):
        mixer = names.kda(i) if config.layer_types[i] == "kda" else names.mla(i)
        for part in (*astuple(mixer), *astuple(names.hyper(i, "attn")), *names.norms(i)):
            for name in part if isinstance(part, tuple) else (part,):
                assert name in pack or names.has_module(name), name

    fused = source.read(f"{VISUAL}blocks.0.attn.qkv.weight", torch.float32)
    bias = source.read(f"{VISUAL}blocks.0.attn.qkv.bias", torch.float32)
    for j, x in enumerate("qkv"):
        rows = slice(64 * j, 64 * j + 64)
        linear = read_linear(pack, f"{VISUAL}blocks.0.attn.{x}_proj", 64, 64)
        error = (linear.weight - fused[rows]).square().sum() / fused[rows].square().sum()
        assert float(error) < LIMIT and linear.bias is not None
        assert torch.equal(linear.bias, bias[rows].half().float())
    assert pack.shape(f"{VISUAL}patch_embed.proj.weight") == (64, 3, 2, 14, 14)
