"""Fixture sets: what is found under --golden, wherever it lies.

A set is recognised by its files, not by its folder's name: EXL3 fixtures (README of exl3), folders
of glm5_next and dflash2 fixtures, and JSON files that name their format. Several sets of one format
may stand side by side, and a set may lack files. Names of items are paths relative to the root.
"""

import json
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

from twining.checkpoint.hf_config import Glm5NextConfig, parse_glm5_next
from twining.checkpoint.reader import Checkpoint
from twining.errors import CheckpointError
from twining.models.glm5_next.model import Glm5Next

CHAT_FORMAT = "chat-prompt-vectors/1"
TOOL_FORMAT = "tool-parse-vectors/1"
GLM_FILES = ("text", "mtp", "shared_indexer", "units", "vision")
DFLASH_FILES = ("block", "rounds", "variants", "verify", "train")
EXL3_FILES = ("codebooks", "hadamard", "viterbi", "cache")
_MAX_SIZES = 64 << 20


@dataclass(frozen=True)
class GlmSet:
    """One file of recorded tensors and the model folder that made it."""

    path: Path
    model: Path

    @property
    def tensors(self) -> dict[str, Tensor]:
        return tensors(self.path)

    @property
    def config(self) -> Glm5NextConfig:
        return model_config(self.model)


def kinds_of(folder: Path) -> set[str]:
    """Formats of the fixture files that lie directly in a folder."""
    here = {path.name for path in folder.iterdir() if path.is_file()}
    found = set()
    if any(f"{name}.safetensors" in here for name in EXL3_FILES) or any(
        name.startswith(("lin_", "quant_")) and name.endswith(".safetensors") for name in here
    ):
        found.add("exl3")
    if ("weights.safetensors" in here and "config.json" in here) or "verify.safetensors" in here:
        found.add("dflash2")
    if "preprocess.json" in here or any(f"{name}.safetensors" in here for name in GLM_FILES):
        found.add("glm5_next")
    return found


@lru_cache
def folders(root: Path, kind: str) -> tuple[Path, ...]:
    """All set folders of a kind below root (root itself included), by path."""
    if not root.is_dir():
        return ()
    every = [root, *(path for path in root.rglob("*") if path.is_dir())]
    return tuple(sorted(path for path in every if kind in kinds_of(path)))


@lru_cache
def vector_files(root: Path, wanted: str) -> tuple[Path, ...]:
    """JSON files below root that name this format."""
    found = []
    for path in sorted(root.rglob("*.json")) if root.is_dir() else ():
        if path.stat().st_size <= _MAX_SIZES and f'"{wanted}"' in path.read_text("utf-8"):
            content = read_json(path)
            if isinstance(content, dict) and content.get("format") == wanted:
                found.append(path)
    return tuple(found)


def files(root: Path, kind: str, pattern: str) -> list[Path]:
    """Files of that name pattern in the set folders of a kind."""
    return [path for folder in folders(root, kind) for path in sorted(folder.glob(pattern))]


def every_set(root: Path) -> list[Path]:
    """All sets of all formats."""
    found: list[Path] = []
    for kind in ("exl3", "glm5_next", "dflash2"):
        found += folders(root, kind)
    for wanted in (CHAT_FORMAT, TOOL_FORMAT):
        found += vector_files(root, wanted)
    return found


def models_of(folder: Path) -> list[Path]:
    """Model folders that belong to a glm5_next set: in it, at most two levels below."""
    found = []
    for path in sorted([*folder.glob("config.json"), *folder.glob("*/config.json"),
                        *folder.glob("*/*/config.json")]):  # fmt: skip
        config = read_json(path)
        if str(config.get("model_type", "")).startswith("glm5_next"):
            found.append(path.parent)
    return found


def glm_sets(root: Path, name: str) -> list[GlmSet]:
    """Every `name`.safetensors with every model folder beside it whose sizes fit its tensors.

    Where several fit, those with the usual folder names win (tiny, tiny_shared_indexer). Where none
    fits all are taken, so that the tests of that set fail; a file without a model runs no test.
    """
    sets = []
    usual = "tiny_shared_indexer" if name == "shared_indexer" else "tiny"
    for path in files(root, "glm5_next", f"{name}.safetensors"):
        models = models_of(path.parent)
        fitting = [model for model in models if _fits(path, model)] or models
        named = [model for model in fitting if model.name == usual]
        sets += [GlmSet(path, model) for model in named or fitting]
    return sets


def _fits(path: Path, model: Path) -> bool:
    try:
        config, shapes = model_config(model), shapes_of(path)
    except CheckpointError:
        return True  # the tests that load it say why
    for name, shape in shapes.items():
        kind = name.rpartition(".")[2]
        wrong_width = kind == "logits" and shape[-1] != config.vocab_size
        if name == "streams":
            wrong_width = (shape[0] - 1, *shape[2:]) != (
                config.num_layers, config.hc_mult, config.hidden_size
            )  # fmt: skip
        if kind in ("final_norm", "head_norm", "attn_in"):
            wrong_width = shape[-1] != config.hidden_size
        if name.endswith("tower.out"):
            wrong_width = config.vision is None or shape[-1] != config.hidden_size
        if name.startswith("keep."):
            wrong_width |= config.num_mtp_layers == 0
        if wrong_width:
            return False
        layer = layer_of(name)
        if layer is not None and not _layer_fits(config, layer, kind):
            return False
    return True


def _layer_fits(config: Glm5NextConfig, layer: int, kind: str) -> bool:
    if layer >= config.num_layers:
        return False
    if kind in ("recurrent", "conv"):
        return config.layer_types[layer] == "kda"
    if kind in ("latent", "index_pool_keys", "topk"):
        return config.layer_types[layer] == "mla"
    return kind != "route_ids" or config.mlp_types[layer] == "sparse"


def layer_of(name: str) -> int | None:
    """Layer number in a tensor name such as layer3.topk or state.layer3.latent."""
    for part in name.split("."):
        if part.startswith("layer") and part[5:].isdigit():
            return int(part[5:])
    return None


def layers_with(path: Path, kind: str) -> list[int]:
    """Layers for which a file records a tensor of that kind, ascending."""
    names = (name for name in shapes_of(path) if name.rpartition(".")[2] == kind)
    return sorted(layer for name in names if (layer := layer_of(name)) is not None)


@lru_cache
def shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of all tensors of a file, from its header."""
    with safe_open(path, "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@lru_cache
def metadata(path: Path) -> dict[str, str]:
    with safe_open(path, "pt") as file:
        return dict(file.metadata() or {})


@lru_cache(maxsize=16)
def tensors(path: Path) -> dict[str, Tensor]:
    """Contents of a safetensors file; shared by tests, not to be written to."""
    return load_file(path)


def read_json(path: Path):
    return json.loads(path.read_text(encoding="utf-8"))


@lru_cache(maxsize=32)
def model_config(folder: Path) -> Glm5NextConfig:
    return parse_glm5_next(read_json(folder / "config.json"))


@lru_cache(maxsize=4)
def load_model(folder: Path) -> Glm5Next:
    return Glm5Next.load(Checkpoint.open(folder), model_config(folder))


def close(got: Tensor, want: Tensor, limit: float) -> None:
    """Same shape, and no value further apart than limit."""
    assert got.shape == want.shape
    assert torch.isfinite(got).all() and (got - want).abs().max().item() <= limit
