"""The parts of a model that are placed as wholes, with their bytes: from headers, or from configs.

Source: spec/glm5_next.md 3, spec/exl3.md 4. Packed bytes are what the files store, which is what a
graphics card holds; values count the dense matrix that the float32 engine holds on a CPU. Only
headers are read. Pure but for `from_folder`. No torch.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from twining.checkpoint.config_fields import shown
from twining.checkpoint.dflash2_config import DFlash2Config, parse_dflash2
from twining.checkpoint.headers import (
    DTYPE_BYTES,
    MAX_DIMS,
    MAX_HEADER_BYTES,
    TensorInfo,
    scan_folder,
)
from twining.checkpoint.hf_config import Glm5NextConfig, load_config, parse_glm5_next
from twining.checkpoint.naming import TensorNames
from twining.errors import CheckpointError
from twining.planner import params
from twining.planner.known import Rates

PartKind = Literal["embed", "layer", "final", "head", "mtp", "vision", "drafter"]
_REDUNDANT: Final = re.compile(r"\.attn\.qkv\.(?:weight|bias)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """An indivisible piece of the weights. index: the layer's, else 0. values: dense numbers."""

    kind: PartKind
    index: int = 0
    packed_bytes: int
    values: int

    @property
    def name(self) -> str:
        return f"layer {self.index}" if self.kind == "layer" else self.kind


@dataclass(frozen=True, slots=True, kw_only=True)
class Inventory:
    """A model's parts in order. source: "headers" or "config". file_bytes: on disk."""

    config: Glm5NextConfig
    layers: tuple[Part, ...]
    embed: Part
    final: Part
    head: Part | None  # None: the embedding is the head
    mtp: Part | None
    vision: Part | None
    source: Literal["headers", "config"]
    file_bytes: int

    @property
    def trunk_bytes(self) -> int:
        return sum(p.packed_bytes for p in (*self.layers, self.embed, self.final)) + (
            self.head.packed_bytes if self.head else 0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterInventory:
    config: DFlash2Config
    part: Part
    source: Literal["headers", "config"]


def from_config(config: Glm5NextConfig, rates: Rates) -> Inventory:
    """The parts of a pack at given rates. EXL3 overheads are included, file headers are not."""
    layers = []
    for index in range(config.num_layers):
        found = params.layer(config, index)
        layers.append(
            Part(
                kind="layer",
                index=index,
                packed_bytes=sum(p.packed_bytes(rates.of(name)) for name, p in found.items()),
                values=sum(p.total for p in found.values()),
            )
        )
    head = None if config.tie_word_embeddings else _part("head", params.head(config), rates.head)
    mtp = _part("mtp", params.mtp(config), rates.mtp) if config.num_mtp_layers else None
    tower = config.vision
    vision = None if tower is None else _part("vision", params.vision(tower), rates.vision)
    embed = _part("embed", params.embedding(config), 16)
    final = _part("final", params.Params(half=config.hidden_size), 16)
    optional = [p for p in (head, mtp, vision) if p is not None]
    return Inventory(
        config=config,
        layers=tuple(layers),
        embed=embed,
        final=final,
        head=head,
        mtp=mtp,
        vision=vision,
        source="config",
        file_bytes=sum(p.packed_bytes for p in (*layers, embed, final, *optional)),
    )


def _part(kind: PartKind, found: params.Params, bits: float) -> Part:
    return Part(kind=kind, packed_bytes=found.packed_bytes(bits), values=found.total)


def from_headers(config: Glm5NextConfig, tensors: Mapping[str, TensorInfo]) -> Inventory:
    """The parts of a checkpoint by its tensors' headers. Raises CheckpointError if it has no text
    model, or a layer that the config lists has no tensors."""
    names = TensorNames.find(tensors)
    layer_prefix = f"{names.text}layers."
    sums: dict[tuple[str, int], int] = {}
    splits = any(".attn.q_proj." in name for name in tensors)
    for name, info in tensors.items():
        key = _place(name, names, layer_prefix, config.num_layers)
        if splits and key[0] == "vision" and _REDUNDANT.search(name):
            continue  # the source's fused copy beside the split one is never loaded
        sums[key] = sums.get(key, 0) + info.nbytes
    missing = [i for i in range(config.num_layers) if ("layer", i) not in sums]
    if missing:
        raise CheckpointError(
            f"layer {missing[0]} has no tensors ({len(missing)} of {config.num_layers} layers are"
            " absent); incomplete download, fetch the rest"
        )
    dense = from_config(config, _DENSE)

    def part(kind: PartKind, like: Part | None, index: int = 0) -> Part | None:
        stored = sums.get((kind, index))
        if stored is None or like is None:
            return None
        return Part(kind=kind, index=index, packed_bytes=stored, values=like.values)

    layers = [part("layer", dense.layers[i], i) for i in range(config.num_layers)]
    embed, final = part("embed", dense.embed), part("final", dense.final)
    if embed is None or final is None:
        raise CheckpointError("the final norm has no tensor; incomplete download, fetch the rest")
    return Inventory(
        config=config,
        layers=tuple(p for p in layers if p is not None),
        embed=embed,
        final=final,
        head=part("head", dense.head),
        mtp=part("mtp", dense.mtp),
        vision=part("vision", dense.vision),
        source="headers",
        file_bytes=sum(info.nbytes for info in tensors.values()),
    )


_DENSE: Final = Rates(kda=16, mla=16, dense=16, experts=16, shared=16, head=16, mtp=16, vision=16)


def _place(
    name: str, names: TensorNames, layer_prefix: str, num_layers: int
) -> tuple[PartKind, int]:
    """Which part a tensor belongs to."""
    if name.startswith(layer_prefix):
        digits = name[len(layer_prefix) :].split(".", 1)[0]
        index = int(digits) if digits.isdecimal() and len(digits) < 6 else num_layers
        return ("layer", index) if index < num_layers else ("mtp", 0)
    if names.visual is not None and name.startswith(names.visual):
        return ("vision", 0)
    if "lm_head." in name:
        return ("head", 0)
    if name.startswith(f"{names.text}embed_tokens."):
        return ("embed", 0)
    return ("final", 0)


def read_headers_only(path: Path) -> dict[str, TensorInfo]:
    """Headers of a safetensors file whose data may be absent: the first bytes of a large file.

    Sizes are computed from types and shapes. Raises CheckpointError on damage.
    """
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= MAX_HEADER_BYTES:
                raise CheckpointError(
                    f"{path.name}: header length {length}; not a safetensors file"
                )
            raw = file.read(length)
        parsed = json.loads(raw)
    except OSError as err:
        raise CheckpointError(f"{path.name}: {err.strerror}; check the path") from None
    except (ValueError, RecursionError):
        raise CheckpointError(
            f"{path.name}: the header is not whole; fetch its first bytes"
        ) from None
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path.name}: the header is not an object; fetch it again")
    tensors, at = {}, 8 + length
    for name, entry in parsed.items():
        if name == "__metadata__":
            continue
        info = _header_entry(path, name, entry, at)
        tensors[name], at = info, info.end
    return tensors


def _header_entry(path: Path, name: str, entry: object, start: int) -> TensorInfo:
    dtype, shape = (entry.get("dtype"), entry.get("shape")) if isinstance(entry, dict) else (0, 0)
    if (
        not isinstance(dtype, str)
        or dtype not in DTYPE_BYTES
        or not isinstance(shape, list)
        or len(shape) > MAX_DIMS
        or not all(type(v) is int and 0 <= v < 1 << 40 for v in shape)
    ):
        raise CheckpointError(f"{path.name}: entry {shown(name)} is damaged; fetch it again")
    end = start + math.prod(shape) * DTYPE_BYTES[dtype]
    return TensorInfo(name, dtype, tuple(shape), path, start, end)


def from_folder(folder: Path) -> Inventory:
    """Inventory of a model folder, from config.json and the headers. Raises CheckpointError."""
    return from_headers(parse_glm5_next(load_config(folder)), scan_folder(folder))


def drafter_from_config(config: DFlash2Config, bits: float) -> DrafterInventory:
    """A drafter at a rate; 16 for the published bf16 one."""
    return DrafterInventory(
        config=config, part=_part("drafter", params.drafter(config), bits), source="config"
    )


def drafter_from_folder(folder: Path) -> DrafterInventory:
    """A drafter's config and headers. Raises CheckpointError."""
    config = parse_dflash2(load_config(folder))
    stored = sum(info.nbytes for info in scan_folder(folder).values())
    like = params.drafter(config)
    return DrafterInventory(
        config=config,
        part=Part(kind="drafter", packed_bytes=stored, values=like.total),
        source="headers",
    )


def total_packed(parts: Iterable[Part | None]) -> int:
    """Stored bytes of the parts that exist."""
    return sum(part.packed_bytes for part in parts if part is not None)
