"""Canvases, patches, frame lists and prompt text; worked examples and invariants."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from twining.errors import CheckpointError, RequestError
from twining.models.glm5_next.preprocess import (
    MediaConfig,
    canvas_size,
    content_size,
    image_placeholder,
    load_media_configs,
    patch_rows,
    preprocess_image,
    preprocess_video,
    sample_frames,
    video_placeholder,
)

DEFAULT = MediaConfig()
FEW = MediaConfig(min_tokens=2, max_tokens=12)

# (height, width), canvas, content, tokens: the table of spec/chat_format.md section 6.1.
PICTURES = [
    ((1, 1), (112, 112), (112, 112), 16),
    ((64, 128), (84, 168), (84, 168), 18),
    ((224, 224), (224, 224), (224, 224), 64),
    ((500, 333), (504, 336), (500, 333), 216),
    ((100, 2000), (112, 2016), (100, 2000), 288),
    ((28, 20000), (28, 20020), (28, 20000), 715),
    ((720, 1280), (728, 1288), (720, 1280), 1196),
    ((1080, 1920), (1092, 1932), (1080, 1920), 2691),
    ((4000, 3000), (2884, 2156), (2874, 2156), 7931),
    ((10000, 10000), (2492, 2492), (2492, 2492), 7921),
    ((2160, 3840), (1876, 3332), (1874, 3332), 7973),
]


@pytest.mark.parametrize(("size", "canvas", "content", "tokens"), PICTURES)
def test_picture_table(size, canvas, content, tokens):
    got = canvas_size(*size, 2, DEFAULT)
    assert got == canvas
    assert content_size(*size, 2, got, DEFAULT) == content
    assert got[0] * got[1] // 28**2 == tokens


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 200_000), st.integers(1, 200_000), st.integers(1, 64))
def test_canvas_keeps_its_bounds(height, width, frames):
    config = MediaConfig(min_tokens=16, max_tokens=8000)
    high, wide = canvas_size(height, width, frames, config)
    counted = max(2, 2 * round(frames / 2))
    assert high % 28 == wide % 28 == 0
    assert counted * high * wide <= config.max_tokens * 2 * 28 * 28
    content = content_size(height, width, frames, (high, wide), config)
    assert 1 <= content[0] <= high
    assert 1 <= content[1] <= wide


def test_too_many_frames_for_the_budget():
    with pytest.raises(RequestError, match="send a shorter one") as caught:
        canvas_size(100, 100, 50, MediaConfig(max_tokens=20))
    assert caught.value.code == "media_too_large"


def naive_rows(frames: np.ndarray, patch: int) -> np.ndarray:
    count, channels, height, width = frames.shape
    rows = []
    for t in range(count // 2):
        for by in range(height // (2 * patch)):
            for bx in range(width // (2 * patch)):
                for y in (2 * by, 2 * by + 1):
                    for x in (2 * bx, 2 * bx + 1):
                        rows.append(
                            [
                                frames[2 * t + k, c, y * patch + i, x * patch + j]
                                for c in range(channels)
                                for k in range(2)
                                for i in range(patch)
                                for j in range(patch)
                            ]
                        )
    return np.array(rows)


def test_patch_order():
    frames = np.random.default_rng(1).standard_normal((4, 3, 8, 12)).astype(np.float32)
    np.testing.assert_array_equal(patch_rows(frames, 2), naive_rows(frames, 2))


def pixel(patches, row: int, time: int, y: int, x: int) -> np.ndarray:
    return patches.pixel_values[row].reshape(3, 2, 14, 14)[:, time, y, x]


def test_padding_is_black_before_normalisation():
    image = Image.new("RGB", (30, 29), (255, 0, 128))  # canvas 56 x 56
    patches = preprocess_image(image, FEW)
    assert (patches.grid, patches.num_tokens) == ((1, 4, 4), 4)
    mean, std = np.array(FEW.mean), np.array(FEW.std)
    np.testing.assert_allclose(pixel(patches, 0, 0, 0, 0), ([1, 0, 128 / 255] - mean) / std, 1e-5)
    np.testing.assert_allclose(pixel(patches, 15, 1, 13, 13), -mean / std, 1e-5)
    np.testing.assert_array_equal(  # a picture fills both temporal slots
        patches.pixel_values.reshape(16, 3, 2, -1)[:, :, 0],
        patches.pixel_values.reshape(16, 3, 2, -1)[:, :, 1],
    )


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "I;16", "LA"])
def test_any_mode_is_converted(mode):
    assert preprocess_image(Image.new(mode, (56, 56)), FEW).pixel_values.shape == (16, 1176)


def test_video_pairs_frames_and_repeats_an_odd_last_one():
    frames = [Image.new("RGB", (28, 28), (shade, 0, 0)) for shade in (10, 20, 30)]
    patches = preprocess_video(frames, MediaConfig(min_tokens=1))
    assert (patches.grid, patches.step_tokens, patches.num_tokens) == ((2, 2, 2), 1, 2)
    reds = [pixel(patches, row, time, 0, 0)[0] for row in (0, 4) for time in (0, 1)]
    shades = np.array(reds) * DEFAULT.std[0] + DEFAULT.mean[0]
    np.testing.assert_allclose(shades * 255, [10, 20, 30, 30], rtol=1e-4)


@pytest.mark.parametrize("sizes", [[], [(28, 28), (28, 56)], [(0, 5)]])
def test_empty_or_uneven_frames_are_refused(sizes):
    with pytest.raises(RequestError) as caught:
        preprocess_video([Image.new("RGB", s) for s in sizes], DEFAULT)
    assert caught.value.code == "media_invalid"


@pytest.mark.parametrize(
    ("num_frames", "fps", "duration"),
    [
        (0, 24.0, None),
        (-1, 24.0, 1.0),
        (10**12, 24.0, None),
        (10, 0.0, None),
        (10, -1.0, None),
        (10, float("nan"), 1.0),
        (10, float("inf"), None),
        (10, 24.0, float("nan")),
        (10, 24.0, float("inf")),
        (10, 24.0, -1.0),
    ],
)
def test_impossible_videos_are_refused(num_frames, fps, duration):
    with pytest.raises(RequestError) as caught:
        sample_frames(num_frames, fps, duration, DEFAULT)
    assert caught.value.code == "media_invalid"


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 5000),
    st.none() | st.floats(0.1, 240.0),
    st.none() | st.floats(0, 10_000.0),
)
def test_frame_lists_are_even_ordered_and_bounded(num_frames, fps, duration):
    picked = sample_frames(num_frames, fps, duration, DEFAULT)
    assert len(picked) % 2 == 0
    assert 2 <= len(picked) <= 2048
    assert picked == sorted(picked)
    assert picked[0] >= 0
    assert picked[-1] < num_frames


def test_prompt_text():
    picture = preprocess_image(Image.new("RGB", (56, 84)), FEW)
    assert image_placeholder(picture) == "<|image|>" * 6
    frames = [Image.new("RGB", (56, 28))] * 4
    video = preprocess_video(frames, MediaConfig(min_tokens=1))
    step = "<|begin_of_image|><|image|><|image|><|end_of_image|>"
    text = video_placeholder(video, [0, 15, 37, 45], 30.0)
    assert text == f"{step}0.0 seconds{step}1.2 seconds"
    assert video_placeholder(video, [0, 12, 36, 48], None).endswith("1.5 seconds")


def write_processor(tmp_path, picture: dict, video: dict | None = None):
    config = {"image_processor": picture, "video_processor": video or {}}
    (tmp_path / "processor_config.json").write_text(json.dumps(config))
    return tmp_path


def test_processor_config(tmp_path):
    picture, video = load_media_configs(tmp_path)  # no file: the published values
    assert picture == MediaConfig()
    assert (video.max_tokens, video.fps) == (30_000, 2.0)
    folder = write_processor(
        tmp_path,
        {"patch_size": 16, "image_mean": [0.5] * 3, "max_image_tokens": 99, "resample": 3},
        {"fps": 4, "min_image_tokens": 5, "max_image_tokens": 240000},
    )
    picture, video = load_media_configs(folder, video_token_cap=500_000)
    assert (picture.patch_size, picture.mean, picture.max_tokens) == (16, (0.5,) * 3, 99)
    assert (video.fps, video.min_tokens, video.max_tokens) == (4.0, 5, 240_000)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("resample", 2),
        ("merge_size", 4),
        ("temporal_patch_size", 1),
        ("do_normalize", False),
        ("image_mean", [0.5]),
        ("image_mean", [0.5, "a", 0.5]),
        ("image_std", [1, 0, 1]),
        ("patch_size", 0),
        ("max_image_tokens", 1e9),
    ],
)
def test_processor_settings_that_cannot_be_honoured(tmp_path, key, value):
    with pytest.raises(CheckpointError, match=key):
        load_media_configs(write_processor(tmp_path, {key: value}))
