"""The vision tower's loading in every spelling, its independence of company, and insertion."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import twining.models.glm5_next.vision as vision_module
from tests.exl3.fakes import random_exl3
from twining.checkpoint.hf_config import VisionConfig, parse_glm5_next
from twining.checkpoint.reader import Checkpoint
from twining.checkpoint.writer import write_safetensors
from twining.errors import CheckpointError
from twining.exl3.linear import read_linear
from twining.models.glm5_next.vision import (
    Placeholders,
    VisionTower,
    insert_embeddings,
    placeholder_positions,
)

CONFIG = VisionConfig(
    depth=2,
    hidden_size=128,
    num_heads=4,
    intermediate_size=256,
    out_hidden_size=128,
    projection_intermediate_size=256,
    patch_size=14,
    temporal_patch_size=2,
    spatial_merge_size=2,
    in_channels=3,
    swiglu_limit=1.5,
    rms_norm_eps=1e-3,
    block_norm_eps=1e-2,
)
P = "model.visual."


def linears(config: VisionConfig) -> dict[str, tuple[int, int, bool]]:
    """module: (out, in, has bias), attention fused."""
    C, H = config.hidden_size, config.out_hidden_size
    M, W = config.intermediate_size, config.projection_intermediate_size
    found = {f"{P}merger.proj": (H, H, False)}
    for i in range(config.depth):
        block = f"{P}blocks.{i}."
        found |= {
            f"{block}attn.qkv": (3 * C, C, True),
            f"{block}attn.proj": (C, C, True),
            f"{block}mlp.gate_proj": (M, C, True),
            f"{block}mlp.up_proj": (M, C, True),
            f"{block}mlp.down_proj": (C, M, True),
        }
    return found | {
        f"{P}merger.gate_proj": (W, H, False),
        f"{P}merger.up_proj": (W, H, False),
        f"{P}merger.down_proj": (H, W, False),
    }


def plain_tensors(config: VisionConfig, seed: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)

    def rand(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return torch.randn(shape, generator=gen) * scale

    C, H, D = config.hidden_size, config.out_hidden_size, config.head_dim
    tensors = {
        "model.language_model.embed_tokens.weight": rand(4, H),
        f"{P}patch_embed.proj.weight": rand(C, 3, 2, 14, 14, scale=0.03),
        f"{P}patch_embed.proj.bias": rand(C),
        f"{P}post_layernorm.weight": rand(C),
        f"{P}downsample.weight": rand(H, C, 2, 2, scale=0.05),
        f"{P}downsample.bias": rand(H),
        f"{P}merger.post_projection_norm.weight": rand(H),
        f"{P}merger.post_projection_norm.bias": rand(H),
    }
    for i in range(config.depth):
        for norm, size in (("norm1", C), ("norm2", C), ("attn.q_norm", D), ("attn.k_norm", D)):
            tensors[f"{P}blocks.{i}.{norm}.weight"] = rand(size)
    for module, (out, inp, bias) in linears(config).items():
        tensors[f"{module}.weight"] = rand(out, inp, scale=inp**-0.5)
        if bias:
            tensors[f"{module}.bias"] = rand(out)
    return tensors


def open_with(folder: Path, tensors: dict[str, torch.Tensor]) -> Checkpoint:
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    write_safetensors(folder, tensors)
    return Checkpoint.open(folder)


def random_pixels(grid, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(sum(t * h * w for t, h, w in grid), 1176, generator=gen)


def split_qkv(tensors: dict[str, torch.Tensor], *, keep_fused: bool) -> dict[str, torch.Tensor]:
    out = dict(tensors)
    for name, value in tensors.items():
        if ".attn.qkv." in name:
            for part, piece in zip("qkv", value.chunk(3), strict=True):
                out[name.replace("qkv", f"{part}_proj")] = piece
            if keep_fused:
                out[name] = torch.full_like(value, torch.nan)  # must not be used
            else:
                del out[name]
    return out


@pytest.mark.parametrize("keep_fused", [False, True])
def test_split_and_fused_qkv_agree(tmp_path, keep_fused):
    tensors = plain_tensors(CONFIG, seed=1)
    grid = [(1, 4, 6)]
    pixels = random_pixels(grid, 2)
    want = VisionTower.load(open_with(tmp_path / "a", tensors), CONFIG).forward(pixels, grid)
    assert want.shape == (6, CONFIG.out_hidden_size)
    ckpt = open_with(tmp_path / "b", split_qkv(tensors, keep_fused=keep_fused))
    assert torch.equal(VisionTower.load(ckpt, CONFIG).forward(pixels, grid), want)
    assert [name for name in ckpt.unused() if name.startswith(P)] == []


@pytest.mark.parametrize("codebook", ["3inst", "mul1"])
def test_exl3_tower_equals_its_dense_form(tmp_path, codebook):
    """Packs store q, k and v apart, quantised, beside a redundant fused copy (exl3.md 4.5)."""
    packed = split_qkv(plain_tensors(CONFIG, seed=3), keep_fused=False)
    dims = {}
    for name in [n for n in packed if n.endswith(".weight") and packed[n].dim() == 2]:
        if name.startswith(P):
            dims[name.removesuffix(".weight")] = tuple(packed.pop(name).shape)
    for seed, (module, (out, inp)) in enumerate(dims.items()):
        packed |= random_exl3(module, inp, out, 3, codebook, seed)
    ckpt = open_with(tmp_path / "packed", packed)
    plain = {n: t for n, t in packed.items() if n.rsplit(".", 1)[1] in ("weight", "bias")}
    for module, (out, inp) in dims.items():
        plain[f"{module}.weight"] = read_linear(ckpt, module, out, inp).weight
    grid = [(1, 2, 4)]
    pixels = random_pixels(grid, 4)
    want = VisionTower.load(open_with(tmp_path / "plain", plain), CONFIG).forward(pixels, grid)
    assert torch.isfinite(want).all()
    assert torch.equal(VisionTower.load(ckpt, CONFIG).forward(pixels, grid), want)


@pytest.fixture(scope="module")
def tower(tmp_path_factory) -> VisionTower:
    folder = tmp_path_factory.mktemp("tower") / "x"
    return VisionTower.load(open_with(folder, plain_tensors(CONFIG, seed=5)), CONFIG)


def test_a_picture_does_not_depend_on_its_company(tower):
    grids = [(1, 6, 2), (1, 2, 2), (1, 4, 10)]
    parts = [random_pixels([g], seed) for seed, g in enumerate(grids)]
    alone = [tower.forward(p, [g]) for p, g in zip(parts, grids, strict=True)]
    together = tower.forward(torch.cat(parts), grids)
    assert torch.equal(together, torch.cat(alone))


def test_a_video_is_its_frames_one_by_one(tower):
    pixels = random_pixels([(3, 4, 2)], 9)
    whole = tower.forward(pixels, [(3, 4, 2)])
    assert torch.equal(whole, tower.forward(pixels, [(1, 4, 2)] * 3))


def test_large_pictures_are_computed_in_slices(tower, monkeypatch):
    grid = [(1, 16, 18)]
    pixels = random_pixels(grid, 11)
    want = tower.forward(pixels, grid)
    monkeypatch.setattr(vision_module, "_SCORES", 1)
    monkeypatch.setattr(vision_module, "_MLP_ROWS", 100)
    torch.testing.assert_close(tower.forward(pixels, grid), want, rtol=0, atol=2e-5)


def test_each_eps_is_used(tower):
    grid = [(1, 4, 4)]
    pixels = random_pixels(grid, 12)
    base = tower.forward(pixels, grid)
    for field in ("block_norm_eps", "rms_norm_eps", "swiglu_limit"):
        changed = replace(tower, config=replace(CONFIG, **{field: 0.5}))
        assert (changed.forward(pixels, grid) - base).abs().max() > 1e-3, field


@pytest.mark.parametrize(
    ("grid", "rows"),
    [([], 0), ([(1, 3, 2)], 6), ([(0, 2, 2)], 0), ([(1, 2, 2)], 8), ([(1, 2, 2), (1, 2, 2)], 4)],
)
def test_forward_refuses_what_does_not_fit(tower, grid, rows):
    with pytest.raises(ValueError, match="grid"):
        tower.forward(torch.zeros(rows, 1176), grid)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({f"{P}blocks.1.norm2.weight": None}, r"blocks\.1\.norm2\.weight"),
        ({f"{P}blocks.0.attn.proj.bias": None}, r"attn\.proj\.bias is missing"),
        ({f"{P}downsample.weight": torch.zeros(128, 64, 2, 2)}, "does not fit"),
        ({f"{P}post_layernorm.weight": torch.zeros(64)}, "does not fit"),
        ({f"{P}merger.proj.weight": torch.zeros(64, 64)}, "does not fit"),
    ],
)
def test_loading_names_what_is_wrong(tmp_path, change, words):
    tensors = plain_tensors(CONFIG, seed=6)
    for name, value in change.items():
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    with pytest.raises(CheckpointError, match=words):
        VisionTower.load(open_with(tmp_path / "x", tensors), CONFIG)


def test_files_without_a_tower(tmp_path):
    tensors = {"model.language_model.embed_tokens.weight": torch.ones(2, 2)}
    with pytest.raises(CheckpointError, match="start without vision"):
        VisionTower.load(open_with(tmp_path / "x", tensors), CONFIG)


def test_placeholders_and_insertion():
    from tests.checkpoint.test_hf_config import released

    config = parse_glm5_next(released())
    image, video = config.image_token_id, (154832, 154833)
    ids = [5, 154830, image, image, 154831, video[0], image, video[1], image]
    places = placeholder_positions(ids, config)
    assert places == Placeholders(image=[2, 3, 8], video=[6])
    embeds = torch.arange(9.0)[:, None].repeat(1, 3)
    images, frames = torch.full((3, 3), -1.0), torch.full((1, 3), -2.0)
    insert_embeddings(embeds, places, images, frames)
    assert embeds[:, 0].tolist() == [0, 1, -1, -1, 4, 5, -2, 7, -1]
    with pytest.raises(ValueError, match="3 image placeholders in the prompt, 2 embeddings"):
        insert_embeddings(embeds, places, images[:2], frames)
    with pytest.raises(ValueError, match="1 video placeholders in the prompt, 0 embeddings"):
        insert_embeddings(embeds, places, images, None)
    insert_embeddings(embeds, Placeholders([], []), None, None)
