"""Pictures and video frames to patch rows, and the prompt text that stands for them.

Source: spec/glm5_next.md section 13. One token covers 28 x 28 pixels of two frames (patch 14, merge
2, temporal patch 2); a picture counts as two equal frames. Sizes are (height, width) in pixels.
Letters: n patches, t temporal patches, gh x gw patch grid, C channels, F frames. Pure functions on
decoded pictures; decoding, limits on files and EXIF belong to the caller. No torch.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
from PIL import Image

from twining.checkpoint.config_fields import Fields
from twining.checkpoint.hf_config import load_json
from twining.errors import RequestError

Floats = npt.NDArray[np.float32]

TEMPORAL_PATCH: Final = 2  # frames per patch; the tower's config is checked against it
MERGE: Final = 2  # patches per token and side
MAX_VIDEO_FRAMES: Final = 2048  # sampled frames of one video
MAX_SOURCE_FRAMES: Final = 10_000_000
DEFAULT_FPS: Final = 24.0  # assumed for a video that does not say
VIDEO_TOKEN_CAP: Final = 30_000  # tokens; the model's own limit is higher (spec/api.md section 12)

BEGIN_IMAGE: Final = "<|begin_of_image|>"
IMAGE: Final = "<|image|>"
END_IMAGE: Final = "<|end_of_image|>"


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaConfig:
    """Settings of one processor; the defaults are the published ones for pictures (section 2.2)."""

    patch_size: int = 14  # pixels
    expand_factor: int = 1
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)
    min_tokens: int = 16
    max_tokens: int = 8000
    fps: float = 2.0  # sampled frames per second; video only

    @property
    def unit(self) -> int:
        """Side of one token's square, in pixels."""
        return self.patch_size * MERGE * self.expand_factor


@dataclass(frozen=True, slots=True)
class Patches:
    """Input of the vision tower: pixel_values fp32 [n, C * 2 * patch * patch], grid (t, gh, gw)."""

    pixel_values: Floats
    grid: tuple[int, int, int]

    @property
    def step_tokens(self) -> int:
        """Tokens of one temporal patch."""
        return self.grid[1] * self.grid[2] // MERGE**2

    @property
    def num_tokens(self) -> int:
        return self.grid[0] * self.step_tokens


def load_media_configs(
    folder: Path, *, video_token_cap: int = VIDEO_TOKEN_CAP
) -> tuple[MediaConfig, MediaConfig]:
    """(picture, video) settings from processor_config.json; without the file the published ones.

    Raises CheckpointError for settings that this engine would have to ignore.
    """
    path = folder / "processor_config.json"
    top = Fields(load_json(path) if path.exists() else {})
    picture = _media_config(top.nested("image_processor") or Fields({}), 8000)
    video = _media_config(top.nested("video_processor") or Fields({}), 240_000, video_token_cap)
    return picture, video


def _media_config(fields: Fields, max_tokens: int, cap: int = 1 << 24) -> MediaConfig:
    for key in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        fields.only(key, True)
    fields.only("resample", 3)  # PIL's number for bicubic
    fields.only("temporal_patch_size", TEMPORAL_PATCH)
    fields.only("merge_size", MERGE)
    default = MediaConfig()
    mean = fields.numbers("image_mean", 3, default=default.mean)
    std = fields.numbers("image_std", 3, low=1e-3, default=default.std)
    return MediaConfig(
        patch_size=fields.integer("patch_size", high=256, default=default.patch_size),
        expand_factor=fields.integer("patch_expand_factor", high=16, default=1),
        mean=mean,
        std=std,
        min_tokens=fields.integer("min_image_tokens", default=default.min_tokens),
        max_tokens=min(cap, fields.integer("max_image_tokens", default=max_tokens)),
        fps=fields.number("fps", low=0.01, high=240.0, default=default.fps),
    )


def _up(value: int, unit: int) -> int:
    """The next multiple of unit."""
    return -(-value // unit) * unit


def canvas_size(height: int, width: int, frames: int, config: MediaConfig) -> tuple[int, int]:
    """Canvas (height, width), multiples of 28, for `frames` frames (a picture has 2); 13.1.

    Raises RequestError (media_too_large) when not even one token per temporal patch fits.
    """
    unit = config.unit
    per_token = TEMPORAL_PATCH * unit * unit
    min_pixels, max_pixels = config.min_tokens * per_token, config.max_tokens * per_token
    # Python rounds halves to even, as the reference does: 5 frames count as 4, 3 frames as 4.
    counted = max(TEMPORAL_PATCH, TEMPORAL_PATCH * round(frames / TEMPORAL_PATCH))
    high, wide = _up(height, unit), _up(width, unit)
    if counted * high * wide < min_pixels:
        scale = math.sqrt(min_pixels / (frames * height * width))
        high = _up(max(1, math.ceil(height * scale)), unit)
        wide = _up(max(1, math.ceil(width * scale)), unit)
    if counted * high * wide <= max_pixels:
        return high, wide
    if counted * unit * unit > max_pixels:
        raise RequestError(
            f"a video of {frames} frames needs more than {config.max_tokens} tokens;"
            " send a shorter one",
            code="media_too_large",
        )
    return _largest_canvas(height, width, max_pixels // counted, unit)


def _largest_canvas(height: int, width: int, max_area: int, unit: int) -> tuple[int, int]:
    """The canvas of the tallest content of the same shape whose canvas is within max_area."""
    best, low, high = (unit, unit), 1, height
    while low <= high:
        middle = (low + high) // 2
        canvas = _up(middle, unit), _up(max(1, width * middle // height), unit)
        if canvas[0] * canvas[1] <= max_area:
            best, low = canvas, middle + 1
        else:
            high = middle - 1
    return best


def content_size(
    height: int, width: int, frames: int, canvas: tuple[int, int], config: MediaConfig
) -> tuple[int, int]:
    """(height, width) of the resized picture inside its canvas; the rest is padding (13.2)."""
    scale = min(canvas[0] / height, canvas[1] / width)
    per_token = TEMPORAL_PATCH * config.unit**2
    if frames * height * width >= config.min_tokens * per_token:
        scale = min(1.0, scale)  # never enlarge what meets the minimum
    high = min(max(math.floor(height * scale), 1), canvas[0])
    wide = min(max(math.floor(width * scale), 1), canvas[1])
    return high, wide


def preprocess_image(image: Image.Image, config: MediaConfig) -> Patches:
    """One picture, any mode and size. Raises RequestError (media_invalid) for an empty one."""
    return _preprocess([image], TEMPORAL_PATCH, config)


def preprocess_video(frames: Sequence[Image.Image], config: MediaConfig) -> Patches:
    """Sampled frames of one video, all of one size; an odd count repeats the last frame."""
    return _preprocess(frames, len(frames), config)


def _preprocess(frames: Sequence[Image.Image], counted: int, config: MediaConfig) -> Patches:
    if not frames or min(frames[0].size) < 1 or any(f.size != frames[0].size for f in frames):
        raise RequestError(
            "the picture is empty, or the frames differ in size; send it re-encoded",
            code="media_invalid",
        )
    width, height = frames[0].size
    canvas = canvas_size(height, width, counted, config)
    content = content_size(height, width, counted, canvas, config)
    planes = [_normalised(frame, content, canvas, config) for frame in frames]
    if len(planes) % TEMPORAL_PATCH:
        planes.append(planes[-1])  # also doubles a single picture
    rows = patch_rows(np.stack(planes), config.patch_size)
    gh, gw = canvas[0] // config.patch_size, canvas[1] // config.patch_size
    return Patches(rows, (len(planes) // TEMPORAL_PATCH, gh, gw))


def _normalised(
    frame: Image.Image, content: tuple[int, int], canvas: tuple[int, int], config: MediaConfig
) -> Floats:
    """fp32 [C, height, width] of the canvas: resized, padded with black, then normalised."""
    frame = frame if frame.mode == "RGB" else frame.convert("RGB")
    if (frame.height, frame.width) != content:
        frame = frame.resize((content[1], content[0]), Image.Resampling.BICUBIC)
    pixels = np.zeros((3, *canvas), dtype=np.float32)
    pixels[:, : content[0], : content[1]] = np.asarray(frame).transpose(2, 0, 1)
    mean = np.asarray(config.mean, dtype=np.float32)[:, None, None]
    std = np.asarray(config.std, dtype=np.float32)[:, None, None]
    scaled: Floats = (pixels / np.float32(255) - mean) / std
    return scaled


def patch_rows(frames: Floats, patch: int) -> Floats:
    """[F, C, height, width] to rows [n, C * 2 * patch * patch] in merge-block order (13.3)."""
    count, channels, height, width = frames.shape
    gh, gw = height // patch, width // patch
    split = frames.reshape(
        count // TEMPORAL_PATCH,
        TEMPORAL_PATCH,
        channels,
        gh // MERGE,
        MERGE,
        patch,
        gw // MERGE,
        MERGE,
        patch,
    )
    rows = split.transpose(0, 3, 6, 4, 7, 2, 1, 5, 8)
    return rows.reshape(count // TEMPORAL_PATCH * gh * gw, -1)


def sample_frames(
    num_frames: int, fps: float | None, duration: float | None, config: MediaConfig
) -> list[int]:
    """Indices of the frames to show the model, an even number of them (13.4).

    fps: of the source, None if unknown. duration: seconds, None to derive it from the count.
    Raises RequestError (media_invalid) when these cannot belong to a video.
    """
    rate = DEFAULT_FPS if fps is None else fps
    seconds = (
        float(round((num_frames - 1) / rate) + 1) if duration is None and rate > 0 else duration
    )
    if (
        not 1 <= num_frames <= MAX_SOURCE_FRAMES
        or not 0 < rate < 1e6
        or seconds is None
        or not 0 <= seconds < 1e9
    ):
        raise RequestError(
            f"a video of {num_frames} frames at {fps} frames/s, {duration} s; send it re-encoded",
            code="media_invalid",
        )
    # A clip shorter than one sampling step still shows one frame.
    want = max(1, min(int(seconds * config.fps), MAX_VIDEO_FRAMES))
    if num_frames < want:
        picked = _spread(0, num_frames - 1, want)
    else:
        picked = _walk(num_frames, rate, 1 / config.fps, int(seconds))
        if len(picked) < want:
            picked = _spread(picked[0], picked[-1], want)
        elif len(picked) > want:
            picked = _spread(0, num_frames - 1, want)
    picked = list(dict.fromkeys(picked))
    return picked if len(picked) % 2 == 0 else [*picked, picked[-1]]


def _spread(first: int, last: int, count: int) -> list[int]:
    return [int(v) for v in np.linspace(first, last, count)]


def _walk(num_frames: int, rate: float, step: float, last_second: int) -> list[int]:
    """The first frame at or after each step until the whole seconds are used up."""
    picked, due = [], 0.0
    for i in range(num_frames):
        if i / rate >= due:
            picked.append(i)
            due += step
            if due >= last_second:
                break
    return picked


def image_placeholder(patches: Patches) -> str:
    """Replaces the one `<|image|>` of a picture; the begin and end tokens around it stay."""
    return IMAGE * patches.num_tokens


def video_placeholder(patches: Patches, indices: Sequence[int], fps: float | None) -> str:
    """Replaces the `<|video|>` of a video: per step its tokens and the time of its first frame.

    indices: what sample_frames returned. The times are ordinary text, not special tokens.
    """
    rate = DEFAULT_FPS if fps is None else fps
    step = f"{BEGIN_IMAGE}{IMAGE * patches.step_tokens}{END_IMAGE}"
    firsts = indices[::TEMPORAL_PATCH]
    assert len(firsts) == patches.grid[0]
    return "".join(f"{step}{index / rate:.1f} seconds" for index in firsts)
