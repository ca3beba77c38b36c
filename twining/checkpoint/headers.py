"""Safetensors headers, read defensively: where every tensor of a checkpoint folder lies.

Layout of a file: 8 bytes little-endian header length, a JSON header, the data. The header maps
names to {dtype, shape, data_offsets}; offsets count from the end of the header. Files come from
strangers: every length is bounded before it is trusted, and each fault is a CheckpointError of one
line. No torch, so that the planner and the recipe tools can use it.
"""

import json
import math
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from twining.checkpoint.config_fields import shown
from twining.errors import CheckpointError

INDEX_NAME: Final = "model.safetensors.index.json"
MAX_HEADER_BYTES: Final = 100 << 20
MAX_DIMS: Final = 16
# A header of a million tensors stays below these; they bound what parsing may allocate.
_MAX_COMMAS: Final = 12_000_000
_MAX_LISTS: Final = 3_000_000

DTYPE_BYTES: Final[Mapping[str, int]] = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One stored tensor; start and end are absolute byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        return self.end - self.start

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class _DuplicateKey(ValueError):
    pass


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        name = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise _DuplicateKey(name)
    return result


def _damaged(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"{path.name}: {what}; damaged file or incomplete download, fetch it again"
    )


def _read_raw_header(path: Path) -> tuple[bytes, int]:
    """The header's bytes and the size of the file."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # opening a pipe would wait for ever
            raise CheckpointError(f"{path.name}: not a regular file; remove it from the folder")
        size = status.st_size
        with open(path, "rb") as file:
            head = file.read(8)
            if len(head) < 8:
                raise _damaged(path, f"{size} bytes is too short for a safetensors file")
            length = int.from_bytes(head, "little")
            if length > MAX_HEADER_BYTES or length > size - 8:
                raise _damaged(path, f"header length {length} does not fit (file has {size} bytes)")
            raw = file.read(length)
    except OSError as err:
        raise CheckpointError(
            f"{path.name}: cannot be read ({err.strerror}); check the folder"
        ) from None
    if len(raw) < length:
        raise _damaged(path, f"header ends after {len(raw)} of {length} bytes")
    return raw, size


def _parse_json(path: Path, raw: bytes) -> dict[str, Any]:
    if raw.count(b",") > _MAX_COMMAS or raw.count(b"[") + raw.count(b"{") > _MAX_LISTS:
        raise _damaged(path, "header has more entries than any checkpoint")
    try:
        parsed = json.loads(raw.decode("utf-8"), object_pairs_hook=_unique)
    except _DuplicateKey as err:
        raise _damaged(path, f"header lists {shown(str(err))} twice") from None
    except (ValueError, RecursionError):
        raise _damaged(path, "header is not valid JSON") from None
    if not isinstance(parsed, dict):
        raise _damaged(path, "header is not an object")
    return parsed


def _is_count(value: object, limit: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= limit


def _entry(path: Path, name: str, entry: object, base: int, size: int) -> TensorInfo:
    label = shown(name)
    if not name or not name.isprintable():
        raise _damaged(path, f"tensor name {label} is empty or not printable")
    if not isinstance(entry, dict):
        raise _damaged(path, f"entry of {label} is not an object")
    dtype, shape, span = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise CheckpointError(
            f"{path.name}: {label} has dtype {shown(dtype)}; this engine reads"
            f" {', '.join(DTYPE_BYTES)}"
        )
    # An empty tensor may have any other dimension: bound the product of the rest, for strides.
    if (
        not isinstance(shape, list)
        or len(shape) > MAX_DIMS
        or not all(_is_count(v, 1 << 48) for v in shape)
        or math.prod(max(v, 1) for v in shape) > 1 << 56
    ):
        raise _damaged(path, f"{label} has shape {shown(shape)}")
    if (
        not isinstance(span, list)
        or len(span) != 2
        or not all(_is_count(v, size) for v in span)
        or not span[0] <= span[1] <= size - base
    ):
        raise _damaged(path, f"{label} lies at {shown(span)}, data has {size - base} bytes")
    need = math.prod(shape) * DTYPE_BYTES[dtype]
    if need != span[1] - span[0]:
        have = span[1] - span[0]
        raise _damaged(path, f"{label}: {dtype} {shown(shape)} needs {need} bytes, has {have}")
    return TensorInfo(name, dtype, tuple(shape), path, base + span[0], base + span[1])


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Every tensor of one safetensors file. Raises CheckpointError on any damage.

    Gaps between tensors are accepted, overlaps are not.
    """
    raw, size = _read_raw_header(path)
    parsed = _parse_json(path, raw)
    metadata = parsed.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())
    ):
        raise _damaged(path, "__metadata__ is not a map of strings")
    base = 8 + len(raw)
    tensors = {name: _entry(path, name, entry, base, size) for name, entry in parsed.items()}
    _check_overlaps(path, tensors.values())
    return tensors


def _check_overlaps(path: Path, tensors: Iterable[TensorInfo]) -> None:
    placed = sorted((t for t in tensors if t.nbytes), key=lambda t: t.start)
    for before, after in pairwise(placed):
        if after.start < before.end:
            raise _damaged(path, f"{shown(before.name)} and {shown(after.name)} overlap")


def scan_folder(folder: Path) -> dict[str, TensorInfo]:
    """Every tensor of all *.safetensors files of a folder (not of folders inside it).

    The index file, when there is one, must name only files and tensors that exist; files and
    tensors it does not name are accepted (an MTP block often sits in a file of its own). A tensor
    found in two files is an error. Raises CheckpointError.
    """
    try:
        names = sorted(
            n for n in os.listdir(folder) if n.endswith(".safetensors") and not n.startswith(".")
        )
    except OSError as err:
        raise CheckpointError(f"{folder}: {err.strerror}; point to a model folder") from None
    index = _read_index(folder)
    missing = sorted(set(index.values()) - set(names))
    if missing:
        total = len(set(index.values()))
        raise CheckpointError(
            f"{folder}: {len(missing)} of {total} files that {INDEX_NAME} names are missing, first"
            f" {shown(missing[0])}; incomplete download, fetch the rest"
        )
    if not names:
        raise CheckpointError(f"{folder}: no *.safetensors file; point to a model folder")
    tensors: dict[str, TensorInfo] = {}
    for file_name in names:
        for name, info in read_header(folder / file_name).items():
            if name in tensors:
                raise CheckpointError(
                    f"{folder}: {shown(name)} is in both {tensors[name].path.name} and {file_name};"
                    " remove the file that does not belong"
                )
            tensors[name] = info
    absent = [name for name in index if name not in tensors]
    if absent:
        raise CheckpointError(
            f"{folder}: {len(absent)} tensors that {INDEX_NAME} names are in no file, first"
            f" {shown(absent[0])}; fetch the checkpoint again"
        )
    return tensors


def _read_index(folder: Path) -> dict[str, str]:
    """weight_map of the index file: tensor name to file name; empty without an index."""
    path = folder / INDEX_NAME
    if not path.exists():
        return {}
    try:
        if not path.is_file() or path.stat().st_size > MAX_HEADER_BYTES:
            raise _damaged(path, "not a regular file of at most 100 MiB")
        raw = path.read_bytes()
    except OSError as err:
        raise CheckpointError(
            f"{path.name}: cannot be read ({err.strerror}); check the folder"
        ) from None
    weight_map = _parse_json(path, raw).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(file, str) and file == os.path.basename(file) for file in weight_map.values()
    ):
        raise _damaged(path, "weight_map does not map tensor names to file names")
    return weight_map
