"""Converting miniature models and drafters: names, rates, contents, resuming, refusals."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.exl3 import tiny_source as tiny
from twining.checkpoint.headers import scan_folder
from twining.checkpoint.reader import Checkpoint
from twining.errors import CheckpointError, ConfigError
from twining.exl3.codec import Codebook
from twining.exl3.convert import Calibration, convert_model
from twining.exl3.encoder import TileEncoder
from twining.exl3.linear import Exl3Tensor, padded, read_exl3, read_linear
from twining.exl3.quantize import Quantized

TEXT = "model.language_model."
Q_B = f"{TEXT}layers.1.self_attn.q_b_proj"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tiny.write_source(tmp_path / "source", tiny.model_tensors(), tiny.config())


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Random trellises in place of the search; records one entry per module."""
    calls: list[str] = []

    def fake(weight: torch.Tensor, encoder: TileEncoder, **options: Any) -> Quantized:
        calls.append(f"{tuple(weight.shape)} {encoder.bits} {options['hessian'] is not None}")
        out, inp = (padded(size) for size in weight.shape)
        gen = torch.Generator().manual_seed(options["seed"] & 0xFFFF)
        shape = (inp // 16, out // 16, int(16 * encoder.bits))
        trellis = torch.randint(-999, 999, shape, generator=gen).to(torch.int16)
        packed = Exl3Tensor(
            trellis, torch.ones(inp).half(), torch.ones(out).half(), encoder.codebook
        )
        return Quantized(packed, 1.0, 0.5, None)

    monkeypatch.setattr("twining.exl3.convert.quantize_linear", fake)
    return calls


@pytest.fixture
def fixed_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the scale search, which takes most of the time of a small matrix."""
    monkeypatch.setattr("twining.exl3.quantize.find_scale", lambda weight, encoder: 0.75)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    ckpt = Checkpoint.open(folder)
    return {name: ckpt.read(name) for name in ckpt.tensors}


def test_quantised_modules_read_back(source: Path, tmp_path: Path, fixed_scale: None) -> None:
    out = tmp_path / "pack"
    wanted = ((f"{TEXT}layers.0.self_attn.qkv_proj", 4.0), (Q_B, 3.5), ("lm_head", 5.0))
    report = convert_model(
        source, out, bits=16, bits_for=wanted, head_bits=16, mtp_bits=16, vision_bits=16
    )
    ckpt, original = Checkpoint.open(out), tiny.model_tensors()
    q, k, v = (original[f"{TEXT}layers.0.self_attn.{x}_proj.weight"].float() for x in "qkv")
    weights = [torch.cat([q, k, v]), original[f"{Q_B}.weight"], original["lm_head.weight"]]
    limits = (0.0060, 0.0125, 0.0016)
    assert [m.module for m in report.modules] == [
        name for name in (wanted[0][0], wanted[1][0], wanted[2][0])
    ]
    for (module, bits), weight, limit, done in zip(
        wanted, weights, limits, report.modules, strict=True
    ):
        got = read_linear(ckpt, module, *weight.shape)
        error = float((got.weight - weight.float()).square().sum() / weight.float().square().sum())
        assert got.bits == bits == done.bits and got.codebook is Codebook.MUL1
        assert error < limit and abs(error - done.mse) < 1e-6
    assert report.num_bytes == sum(t.nbytes for t in tensors_of(out).values())
    numbers = (192 * 64 * 4.0 + 64 * 40 * 3.5) / (192 * 64 + 64 * 40)
    assert report.bits == round(numbers, 2)
    assert json.loads(json.dumps(report.to_dict()))["modules"][1]["bits"] == 3.5
    assert not (out / ".partial").exists()


def test_names_and_types_of_a_pack(source: Path, tmp_path: Path, fast: list[str]) -> None:
    out = tmp_path / "pack"
    convert_model(source, out, bits=4, head_bits=6, mtp_bits=3)
    pack, original = tensors_of(out), tiny.model_tensors()
    kda, mla = f"{TEXT}layers.0.self_attn.", f"{TEXT}layers.1.self_attn."
    quantised = {name.removesuffix(".trellis") for name in pack if name.endswith(".trellis")}
    swiglu = ("gate_proj", "up_proj", "down_proj")
    expected = {"lm_head", f"{kda}qkv_proj", f"{kda}o_proj", f"{TEXT}layers.2.eh_proj"}
    expected |= {f"{TEXT}layers.0.mlp.{p}" for p in swiglu}
    for layer in (f"{TEXT}layers.1.", f"{TEXT}layers.2."):
        attn = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "indexer.wq_b")
        expected |= {f"{layer}self_attn.{p}" for p in attn}
        for mlp in ("experts.0", "experts.1", "shared_experts"):
            expected |= {f"{layer}mlp.{mlp}.{p}" for p in swiglu}
    assert quantised == expected and len(fast) == len(expected)
    for module in quantised:
        assert pack[f"{module}.mul1"].item() == -2082680531 and f"{module}.weight" not in pack
        rate = 6 if module == "lm_head" else 3 if ".layers.2." in module else 4
        assert pack[f"{module}.trellis"].shape[2] == 16 * rate

    assert torch.equal(
        pack[f"{kda}conv1d.weight"],
        torch.cat([original[f"{kda}{x}_conv1d.weight"] for x in "qkv"]),
    )
    for name in (f"{kda}b_proj", f"{kda}f_a_proj", f"{mla}kv_b_proj", f"{mla}indexer.wk"):
        assert torch.equal(pack[f"{name}.weight"], original[f"{name}.weight"].half())
    assert pack[f"{TEXT}layers.1.mlp.gate.weight"].dtype == torch.float16
    assert pack[f"{mla}indexer.index_kpool_compress_gate"].dtype == torch.float16
    assert pack[f"{mla}indexer.index_kpool_compress_ape"].dtype == torch.float32
    assert pack[f"{TEXT}layers.0.hc_attn_fn"].dtype == torch.float32
    for name in (f"{TEXT}embed_tokens.weight", f"{TEXT}layers.2.enorm.weight", f"{kda}A_log"):
        assert torch.equal(pack[name], original[name]) and pack[name].dtype == original[name].dtype
    split = {f"{kda}{x}_{kind}.weight" for x in "qkv" for kind in ("proj", "conv1d")}
    assert not split & set(pack)


def test_configs_and_other_files(source: Path, tmp_path: Path, fast: list[str]) -> None:
    out = tmp_path / "pack"
    config = tiny.config(tie_word_embeddings=True)
    config["quantization_config"] = {"quant_method": "fp8"}
    (source / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    convert_model(source, out, bits=4, codebook="mcg")
    written = json.loads((out / "config.json").read_text())
    quantisation = written["quantization_config"]
    assert written["tie_word_embeddings"] is False
    assert written["text_config"]["tie_word_embeddings"] is False
    assert quantisation["quant_method"] == "exl3" and quantisation["codebook"] == "mcg"
    assert quantisation["bits"] == 4 and quantisation["head_bits"] == 6
    assert quantisation["original_quantization_config"] == {"quant_method": "fp8"}
    table = json.loads((out / "quantization_config.json").read_text())["tensor_storage"]
    entry = table[Q_B]
    assert entry["bits_per_weight"] == 4 and entry["mcg_multiplier"] == 3417055213
    assert entry["stored_tensors"][f"{Q_B}.trellis"]["dtype"] == "torch.int16"
    stored = {name for entry in table.values() for name in entry["stored_tensors"]}
    assert stored == set(scan_folder(out))
    assert (out / "tokenizer.json").is_file() and not (out / "notes.bin").exists()


def test_tied_embedding_becomes_a_head(tmp_path: Path, fast: list[str]) -> None:
    tensors = tiny.model_tensors()
    del tensors["lm_head.weight"]
    config = tiny.config() | {"tie_word_embeddings": True}
    source = tiny.write_source(tmp_path / "source", tensors, config)
    convert_model(source, tmp_path / "pack", bits=4)
    pack = tensors_of(tmp_path / "pack")
    assert "lm_head.trellis" in pack and f"{TEXT}embed_tokens.weight" in pack


class Stop(Exception):
    pass


def test_interrupted_run_continues(source: Path, tmp_path: Path, fast: list[str]) -> None:
    out, whole = tmp_path / "pack", tmp_path / "whole"

    def stop_after_five(done: int, total: int, module: str) -> None:
        if done == 5:
            raise Stop

    with pytest.raises(Stop):
        convert_model(source, out, bits=4, progress=stop_after_five)
    first = len(fast)
    assert first == 5 and not list(out.glob("*.safetensors"))
    damaged = sorted((out / ".partial").iterdir())[2]
    damaged.write_bytes(damaged.read_bytes()[:-10])
    (out / "shard-00001.partial").write_bytes(b"left by a second pass that was cut off")
    report = convert_model(source, out, bits=4)
    assert sum(m.resumed for m in report.modules) == 4
    assert len(fast) == first + len(report.modules) - 4
    convert_model(source, whole, bits=4)
    a, b = tensors_of(out), tensors_of(whole)
    assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
    assert not (out / "shard-00001.partial").exists()


@pytest.mark.parametrize("change", ["bits", "seed", "codebook", "source", "fresh"])
def test_other_settings_are_not_resumed(
    source: Path, tmp_path: Path, fast: list[str], change: str
) -> None:
    def stop(done: int, total: int, module: str) -> None:
        raise Stop

    options: dict[str, Any] = {"bits": 4}
    with pytest.raises(Stop):
        convert_model(source, tmp_path / "pack", **options, progress=stop)
    if change == "source":
        for path in source.glob("*.safetensors"):
            path.touch()
            path.write_bytes(path.read_bytes())
    else:
        options |= {
            "bits": {"bits": 5},
            "seed": {"seed": 1},
            "codebook": {"codebook": "mcg"},
            "fresh": {"resume": False},
        }[change]
    report = convert_model(source, tmp_path / "pack", **options)
    assert not any(m.resumed for m in report.modules)


def test_calibration_reaches_its_module(source: Path, tmp_path: Path, fixed_scale: None) -> None:
    x = torch.randn(300, 40) @ (torch.eye(40) + torch.randn(40, 40) * 0.3)
    calibration = Calibration({Q_B: x.T @ x / 300}, rows=3, cols=100)
    plain: dict[str, Any] = {"head_bits": 16, "mtp_bits": 16}
    report = convert_model(
        source, tmp_path / "a", bits=16, bits_for=((Q_B, 3),), calibration=calibration, **plain
    )
    done = report.modules[0]
    ckpt = Checkpoint.open(tmp_path / "a")
    y = x @ tiny.model_tensors()[f"{Q_B}.weight"].float().T
    error = (x @ read_linear(ckpt, Q_B, 64, 40).weight.T - y).square().sum() / y.square().sum()
    assert done.output_error is not None and done.mse > done.output_error
    assert abs(float(error) / done.output_error - 1) < 0.05
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert config["quantization_config"]["calibration"] == {"rows": 3, "cols": 100}
    with pytest.raises(ConfigError, match="no module of the pack"):
        unknown = Calibration({"nothing": torch.eye(4)}, rows=1, cols=1)
        convert_model(source, tmp_path / "b", bits=4, calibration=unknown)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"bits": 9}, "bits=9 is no rate"),
        ({"bits": 2.5, "codebook": "mcg"}, "bits=2.5 is no rate for codebook mcg; use 1..8 or 16"),
        ({"bits": 4, "head_bits": 0}, "head_bits=0"),
        ({"bits": 4, "bits_for": (("*q_a_proj", 4.25),)}, "q_a_proj"),
        ({"bits": 4, "bits_for": (("*typo*", 4),)}, "matches no module"),
        ({"bits": 4, "bits_for": (("*kv_b_proj", 4),)}, "matches no module"),
        ({"bits": 4, "codebook": "best"}, "use 3inst, mcg, mul1"),
        ({"bits": 4, "device": "warp9"}, "use cpu or cuda"),
        ({"bits": 4, "device": "meta"}, "use cpu or cuda"),
    ],
)
def test_impossible_settings(
    source: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        convert_model(source, tmp_path / "pack", **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "pack").exists()


def test_unusable_folders(source: Path, tmp_path: Path, fast: list[str]) -> None:
    with pytest.raises(ConfigError, match="source folder"):
        convert_model(source, source, bits=4)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a folder"):
        convert_model(source, tmp_path / "file", bits=4)
    convert_model(source, tmp_path / "pack", bits=4)
    with pytest.raises(ConfigError, match="already holds"):
        convert_model(source, tmp_path / "pack", bits=4)
    with pytest.raises(CheckpointError, match="already EXL3"):
        convert_model(tmp_path / "pack", tmp_path / "again", bits=4)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    tensors = tiny.model_tensors()
    del tensors[f"{Q_B}.weight"]
    source = tiny.write_source(tmp_path / "source", tensors, tiny.config())
    with pytest.raises(CheckpointError, match="q_b_proj"):
        convert_model(source, tmp_path / "pack", bits=4)


def test_fp16_overflow_keeps_the_source_type(tmp_path: Path, fast: list[str]) -> None:
    tensors = tiny.model_tensors()
    name = f"{TEXT}layers.1.self_attn.kv_b_proj.weight"
    tensors[name][0, 0] = 1e6
    source = tiny.write_source(tmp_path / "source", tensors, tiny.config())
    convert_model(source, tmp_path / "pack", bits=4)
    assert torch.equal(tensors_of(tmp_path / "pack")[name], tensors[name])


def drafter_source(folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (64, 192),
        "norm.weight": (64,),
        "candidate_selector.predecessor_codebook.weight": (96, 16),
        "candidate_selector.successor_codebook": (96, 16),
        "candidate_selector.hidden_projection.weight": (16, 64),
    }
    for x, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
        shapes[f"model.layers.0.self_attn.{x}_proj.weight"] = (rows, 64)
    for site in ("attention_conv", "mlp_conv"):
        shapes[f"model.layers.0.{site}.base_kernel"] = (2, 2, 64)
        shapes[f"model.layers.0.{site}.kernel_projection.weight"] = (16, 64)
    for x in ("gate", "up"):
        shapes[f"model.layers.0.mlp.{x}_proj.weight"] = (128, 64)
    shapes["model.layers.0.mlp.down_proj.weight"] = (64, 128)
    tensors = {name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}
    config = {"architectures": ["DFlash2DraftModel"], "model_type": "qwen3"}
    return tiny.write_source(folder, tensors, config), tensors


def test_drafter(tmp_path: Path, fast: list[str]) -> None:
    source, original = drafter_source(tmp_path / "source")
    report = convert_model(source, tmp_path / "pack", bits=4)
    pack = tensors_of(tmp_path / "pack")
    quantised = {name.removesuffix(".trellis") for name in pack if name.endswith(".trellis")}
    assert quantised == {
        "fc",
        *(f"layers.0.self_attn.{x}_proj" for x in "qo"),
        *(f"layers.0.mlp.{x}_proj" for x in ("gate", "up", "down")),
        *(f"layers.0.{x}_conv.kernel_projection" for x in ("attention", "mlp")),
    }
    for x in "kv":
        name = f"layers.0.self_attn.{x}_proj.weight"
        assert torch.equal(pack[name], original[f"model.{name}"])
    codebook = pack["candidate_selector.predecessor_codebook"]
    assert torch.equal(codebook, original["candidate_selector.predecessor_codebook.weight"])
    assert "candidate_selector.successor_codebook" in pack
    selector = pack["candidate_selector.hidden_projection.weight"]
    assert selector.shape == (128, 64) and not selector[16:].any()
    assert "layers.0.attention_conv.base_kernel" in pack and report.bits == 4
    quantisation = json.loads((tmp_path / "pack" / "config.json").read_text())
    assert quantisation["quantization_config"]["head_bits"] == 16
    convert_model(source, tmp_path / "kv", bits=4, bits_for=(("*.[kv]_proj", 8),))
    assert (
        read_exl3(Checkpoint.open(tmp_path / "kv"), "layers.0.self_attn.k_proj", 32, 64).bits == 8
    )
