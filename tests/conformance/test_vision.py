"""Tower, patches, canvases and frame lists against the reference library's fixtures."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from twining.checkpoint.hf_config import Glm5NextConfig, parse_glm5_next
from twining.checkpoint.reader import Checkpoint
from twining.models.glm5_next.preprocess import (
    MediaConfig,
    canvas_size,
    content_size,
    preprocess_image,
    sample_frames,
)
from twining.models.glm5_next.vision import (
    VisionTower,
    placeholder_positions,
    rotary,
    vision_embeddings,
)

IMAGES = ("pad", "shrink", "grow", "exact")
SMALL = MediaConfig(min_tokens=6, max_tokens=20)  # the budgets of the fixtures


@pytest.fixture(scope="module")
def model(golden: Path) -> tuple[VisionTower, Glm5NextConfig, Checkpoint]:
    ckpt = Checkpoint.open(golden / "glm5_next" / "tiny")
    config = parse_glm5_next(ckpt.config)
    assert config.vision is not None
    return VisionTower.load(ckpt, config.vision), config, ckpt


@pytest.fixture(scope="module")
def vision(golden: Path) -> dict[str, torch.Tensor]:
    return load_file(golden / "glm5_next" / "vision.safetensors")


@pytest.fixture(scope="module")
def preprocess(golden: Path) -> dict:
    return json.loads((golden / "glm5_next" / "preprocess.json").read_text())


def grid_of(vision: dict[str, torch.Tensor], name: str) -> list[tuple[int, int, int]]:
    return [(t, gh, gw) for t, gh, gw in vision[f"{name}.grid_thw"].tolist()]


@pytest.mark.parametrize("name", [*IMAGES, "video"])
def test_tower(model, vision, name):
    got = vision_embeddings(model[0], vision[f"{name}.pixel_values"], grid_of(vision, name))
    assert (got - vision[f"{name}.tower.out"]).abs().max() <= 1e-4


@torch.inference_mode()
def test_tower_stages(model, vision):
    """Each stage from the recorded input of that stage, so that a fault names its place."""
    tower, _, _ = model
    grid = grid_of(vision, "pad")[0]
    stage = {k: vision[f"pad.tower.{k}"] for k in ("patch_embed", "block0", "block1", "downsample")}
    patches = torch.nn.functional.linear(
        vision["pad.pixel_values"], tower.patch_weight, tower.patch_bias
    )
    rope = rotary(grid[1], grid[2], tower.config.head_dim)
    block0 = tower._block(tower.blocks[0], stage["patch_embed"], *rope)
    block1 = tower._block(tower.blocks[1], stage["block0"], *rope)
    for got, name in ((patches, "patch_embed"), (block0, "block0"), (block1, "block1")):
        assert (got - stage[name]).abs().max() <= 1e-4, name
    assert (tower._merge(stage["block1"]) - vision["pad.tower.out"]).abs().max() <= 1e-4


def test_every_vision_tensor_is_read(model):
    _, _, ckpt = model
    assert [name for name in ckpt.unused() if ".visual." in name] == []


@pytest.mark.parametrize("name", IMAGES)
def test_pixel_values_are_exact(vision, preprocess, name):
    image = Image.fromarray(vision[f"{name}.image_u8"].numpy())
    patches = preprocess_image(image, SMALL)
    assert patches.grid == grid_of(vision, name)[0] == tuple(preprocess["images"][name]["grid"])
    assert patches.num_tokens == preprocess["images"][name]["tokens"]
    np.testing.assert_array_equal(patches.pixel_values, vision[f"{name}.pixel_values"].numpy())


def test_canvases(preprocess):
    assert len(preprocess["canvas"]) > 40
    for case in preprocess["canvas"]:
        config = MediaConfig(min_tokens=case["min_tokens"], max_tokens=case["max_tokens"])
        size = (case["height"], case["width"], case["frames"])
        canvas = canvas_size(*size, config)
        assert list(canvas) == case["canvas"], case
        assert list(content_size(*size, canvas, config)) == case["content"], case


def test_frame_sampling(preprocess):
    for case in preprocess["video_frames"]:
        got = sample_frames(case["total_num_frames"], case["fps"], case["duration"], MediaConfig())
        assert len(got) == case["count"], case
        if "indices" in case:
            assert got == case["indices"], case
        else:
            assert got[:8] + got[-8:] == case["first_and_last_8"], case


def test_placeholders_match_the_embeddings(model, vision):
    _, config, _ = model
    images = placeholder_positions(vision["mm.input_ids"][0].tolist(), config)
    rows = sum(len(vision[f"{name}.tower.out"]) for name in ("pad", "grow"))
    assert (len(images.image), images.video) == (rows, [])
    video = placeholder_positions(vision["video.input_ids"][0].tolist(), config)
    assert (video.image, len(video.video)) == ([], len(vision["video.tower.out"]))
