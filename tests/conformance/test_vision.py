"""Tower, patches, canvases and frame lists against the reference library's fixtures."""

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image

from tests.conformance.sets import GlmSet, read_json
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

BLOCK = 1e-4
README_BUDGET = (6, 20)


def tower_of(which: GlmSet) -> VisionTower:
    assert which.config.vision is not None
    return VisionTower.load(Checkpoint.open(which.model), which.config.vision)


def media_config(which: GlmSet) -> MediaConfig:
    """The image budget of a set: of the budgets in preprocess.json the one that gives the recorded
    grids, else the README's."""
    preprocess, vision = preprocess_of(which), which.config.vision
    assert vision is not None
    budgets = {(c["min_tokens"], c["max_tokens"]) for c in preprocess.get("canvas", [])}
    patch = vision.patch_size
    for low, high in sorted(budgets):
        config = MediaConfig(min_tokens=low, max_tokens=high, patch_size=patch)
        if all(
            canvas_size(image["height"], image["width"], 2, config)
            == (image["grid"][1] * patch, image["grid"][2] * patch)
            for image in preprocess.get("images", {}).values()
        ):
            return config
    return MediaConfig(min_tokens=README_BUDGET[0], max_tokens=README_BUDGET[1], patch_size=patch)


def preprocess_of(which: GlmSet) -> dict:
    path = which.path.with_name("preprocess.json")
    return read_json(path) if path.is_file() else {}


def grid_of(vision: dict[str, torch.Tensor], name: str) -> list[tuple[int, int, int]]:
    return [(t, gh, gw) for t, gh, gw in vision[f"{name}.grid_thw"].tolist()]


def test_tower(vision_media):
    which, name = vision_media
    vision = which.tensors
    got = vision_embeddings(tower_of(which), vision[f"{name}.pixel_values"], grid_of(vision, name))
    assert (got - vision[f"{name}.tower.out"]).abs().max() <= BLOCK


@torch.inference_mode()
def test_tower_stages(vision_media):
    """Each stage from the recorded input of that stage, so that a fault names its place."""
    which, name = vision_media
    vision, tower = which.tensors, tower_of(which)
    prefix = f"{name}.tower."
    stage = {k.removeprefix(prefix): v for k, v in vision.items() if k.startswith(prefix)}
    if "patch_embed" not in stage:
        return  # recorded for one picture only
    grid = grid_of(vision, name)
    assert len(grid) == grid[0][0] == 1
    patches = F.linear(vision[f"{name}.pixel_values"], tower.patch_weight, tower.patch_bias)
    assert (patches - stage["patch_embed"]).abs().max() <= BLOCK
    rope = rotary(*grid[0][1:], tower.config.head_dim)
    x = stage["patch_embed"]
    for i, block in enumerate(tower.blocks):
        got = tower._block(block, x, *rope)
        x = stage.get(f"block{i}", got)
        assert (got - x).abs().max() <= BLOCK, i
    assert (tower._merge(x) - stage["out"]).abs().max() <= BLOCK


def test_every_vision_tensor_is_read(vision_set):
    ckpt = Checkpoint.open(vision_set.model)
    VisionTower.load(ckpt, vision_set.config.vision)
    assert [name for name in ckpt.unused() if "visual." in name] == []


def test_pixel_values_are_exact(vision_image):
    which, name = vision_image
    vision, images = which.tensors, preprocess_of(which).get("images", {})
    image = Image.fromarray(vision[f"{name}.image_u8"].numpy())
    patches = preprocess_image(image, media_config(which))
    assert patches.grid == grid_of(vision, name)[0]
    assert patches.num_tokens == len(vision[f"{name}.tower.out"])
    if name in images:
        assert patches.grid == tuple(images[name]["grid"])
        assert patches.num_tokens == images[name]["tokens"]
    np.testing.assert_array_equal(patches.pixel_values, vision[f"{name}.pixel_values"].numpy())


def test_canvases(preprocess_file):
    for case in read_json(preprocess_file).get("canvas", []):
        config = MediaConfig(min_tokens=case["min_tokens"], max_tokens=case["max_tokens"])
        size = (case["height"], case["width"], case["frames"])
        canvas = canvas_size(*size, config)
        assert list(canvas) == case["canvas"], case
        assert list(content_size(*size, canvas, config)) == case["content"], case


def test_frame_sampling(preprocess_file):
    for case in read_json(preprocess_file).get("video_frames", []):
        got = sample_frames(case["total_num_frames"], case["fps"], case["duration"], MediaConfig())
        assert len(got) == case["count"], case
        if "indices" in case:
            assert got == case["indices"], case
        else:
            assert got[:8] + got[-8:] == case["first_and_last_8"], case


def test_placeholders_match_the_embeddings(vision_prompt):
    """As many placeholders as some of the recorded media have rows (see test_glm5_next.py)."""
    which, kind = vision_prompt
    want = which.tensors
    places = placeholder_positions(want[f"{kind}.input_ids"][0].tolist(), which.config)
    found = len(places.image) + len(places.video)
    rows = [len(value) for key, value in want.items() if key.endswith(".tower.out")]
    sums = {0}
    for _ in range(4):
        sums |= {a + b for a in sums for b in rows}
    assert found in sums - {0}
