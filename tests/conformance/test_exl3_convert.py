"""The models of the text fixtures convert to packs whose modules all read back."""

from collections.abc import Iterator
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from tests.conformance.sets import model_config
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


def test_pack_of_a_model(
    glm_packable: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("twining.exl3.quantize.find_scale", lambda weight, encoder: 0.75)
    config = model_config(glm_packable)
    kda, num_layers = config.kda_layers[0], config.num_layers
    full = next(i for i in config.mla_layers if config.indexer_types[i] == "full")
    wanted = {f"*.layers.{kda}.self_attn.qkv_proj": 1, f"*.layers.{full}.*.indexer.wq_b": 1}
    if "sparse" in config.mlp_types:
        sparse = config.mlp_types.index("sparse")
        wanted[f"*.layers.{sparse}.mlp.experts.0.down_proj"] = 1
    if TensorNames.find(Checkpoint.open(glm_packable).tensors).has_layer(num_layers):
        wanted[f"*.layers.{num_layers}.eh_proj"] = 1
    if config.vision is not None:
        wanted["*.blocks.0.attn.[qkv]_proj"] = 3
    report = convert_model(
        glm_packable,
        tmp_path,
        bits=16,
        head_bits=16,
        mtp_bits=16,
        vision_bits=16,
        bits_for=tuple((pattern, 5.0) for pattern in wanted),
    )
    assert len(report.modules) == sum(wanted.values())
    assert all(m.mse < LIMIT for m in report.modules)

    source, pack = Checkpoint.open(glm_packable), Checkpoint.open(tmp_path)
    config = parse_glm5_next(pack.config)
    names = TensorNames.find(pack.tensors)
    old = TensorNames.find(source.tensors)
    new = names.kda(kda)
    assert len(new.qkv) == 1 and len(new.conv) == 1
    parts = [source.read(f"{module}.weight", torch.float32) for module in old.kda(kda).qkv]
    got = read_linear(pack, new.qkv[0], 3 * config.kda_width, config.hidden_size)
    want = torch.cat(parts)
    assert float((got.weight - want).square().sum() / want.square().sum()) < LIMIT
    for i in range(config.num_layers):
        mixer = names.kda(i) if config.layer_types[i] == "kda" else names.mla(i)
        for part in (*astuple(mixer), *astuple(names.hyper(i, "attn")), *names.norms(i)):
            for name in part if isinstance(part, tuple) else (part,):
                assert name in pack or names.has_module(name), name

    if config.vision is None:
        return
    C = config.vision.hidden_size
    fused = source.read(f"{VISUAL}blocks.0.attn.qkv.weight", torch.float32)
    bias = source.read(f"{VISUAL}blocks.0.attn.qkv.bias", torch.float32)
    for j, x in enumerate("qkv"):
        rows = slice(C * j, C * j + C)
        linear = read_linear(pack, f"{VISUAL}blocks.0.attn.{x}_proj", C, C)
        error = (linear.weight - fused[rows]).square().sum() / fused[rows].square().sum()
        assert float(error) < LIMIT and linear.bias is not None
        assert torch.equal(linear.bias, bias[rows].half().float())
    patch = f"{VISUAL}patch_embed.proj.weight"
    assert pack.shape(patch) == source.shape(patch)
