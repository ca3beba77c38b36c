"""Writing safetensors checkpoints: shards of bounded size and an index, one pass, little memory.

Shards are written under temporary names and renamed when the number of shards is known, so an
interrupted run leaves no file that a reader would take for a checkpoint.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Final

import torch
from torch import Tensor

from twining.checkpoint.headers import INDEX_NAME
from twining.checkpoint.reader import TORCH_DTYPES
from twining.errors import CheckpointError

_NAMES: Final = {dtype: name for name, dtype in TORCH_DTYPES.items()}
_ALIGN: Final = 8


class ShardWriter:
    """Context manager: add() tensors in any order; leaving it normally completes the checkpoint."""

    def __init__(
        self, folder: Path, *, max_shard_bytes: int, metadata: Mapping[str, str] | None = None
    ) -> None:
        """Raises CheckpointError when the folder already holds safetensors files."""
        if max_shard_bytes < 1:
            raise CheckpointError(f"max_shard_bytes={max_shard_bytes} must be at least 1")
        folder.mkdir(parents=True, exist_ok=True)
        old = sorted(p.name for p in folder.glob("*.safetensors"))
        if old:
            raise CheckpointError(f"{folder}: already holds {old[0]}; write to an empty folder")
        self._folder = folder
        self._limit = max_shard_bytes
        self._metadata = {"format": "pt"} | dict(metadata or {})
        self._pending: dict[str, Tensor] = {}
        self._pending_bytes = 0
        self._total_bytes = 0
        self._shards: list[tuple[Path, list[str]]] = []
        self._names: set[str] = set()

    def add(self, name: str, tensor: Tensor) -> None:
        """Queue one tensor; writes the current shard out when it would grow past the limit."""
        if name in self._names:
            raise CheckpointError(f"{name}: added twice; a checkpoint holds each name once")
        if tensor.dtype not in _NAMES:
            raise CheckpointError(f"{name}: dtype {tensor.dtype} cannot be stored in safetensors")
        self._names.add(name)
        if self._pending and self._pending_bytes + tensor.nbytes > self._limit:
            self._flush()
        self._pending[name] = tensor.detach()
        self._pending_bytes += tensor.nbytes
        self._total_bytes += tensor.nbytes

    def _flush(self) -> None:
        path = self._folder / f"shard-{len(self._shards) + 1:05d}.partial"
        self._shards.append((path, list(self._pending)))
        _write_file(path, self._pending, self._metadata)
        self._pending = {}
        self._pending_bytes = 0

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None:
            for path, _ in self._shards:
                path.unlink(missing_ok=True)
            return
        if self._pending or not self._shards:
            self._flush()
        self._finish()

    def _finish(self) -> None:
        count = len(self._shards)
        if count == 1:
            os.replace(self._shards[0][0], self._folder / "model.safetensors")
            (self._folder / INDEX_NAME).unlink(missing_ok=True)
            return
        weight_map = {}
        for i, (path, names) in enumerate(self._shards, start=1):
            file_name = f"model-{i:05d}-of-{count:05d}.safetensors"
            os.replace(path, self._folder / file_name)
            weight_map.update(dict.fromkeys(names, file_name))
        index = {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map}
        (self._folder / INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")


def write_safetensors(
    folder: Path,
    tensors: Mapping[str, Tensor],
    *,
    max_shard_bytes: int = 8 << 30,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a whole checkpoint: model.safetensors, or numbered shards and an index.

    Raises CheckpointError on a folder that already holds one, or an unknown dtype.
    """
    with ShardWriter(folder, max_shard_bytes=max_shard_bytes, metadata=metadata) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)


def _write_file(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """One file. Widest element types first keeps every tensor aligned without gaps."""
    ordered = sorted(tensors.items(), key=lambda item: -item[1].element_size())
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, tensor in ordered:
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + tensor.nbytes],
        }
        offset += tensor.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGN)
    with open(path, "wb") as file:
        file.write(len(raw).to_bytes(8, "little"))
        file.write(raw)
        for _, tensor in ordered:
            data = tensor.cpu().contiguous().reshape(-1).view(torch.uint8)
            file.write(data.numpy().data)
