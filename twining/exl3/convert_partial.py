"""Finished modules of a conversion under way: one small safetensors file each, so it can resume.

A file counts as finished when its header is sound and its stamp says that it was made from the same
source tensors with the same settings; anything else is made again.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from twining.checkpoint.headers import TensorInfo, read_header
from twining.errors import CheckpointError
from twining.exl3.codec import MARKERS
from twining.exl3.linear import Exl3Tensor, padded

_STAMP = "twining.stamp"


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """How the quantisation of one module went.

    shape: true [out, in]. mse: |W - Q|^2 / |W|^2. output_error: the same on calibration inputs,
    None when uncalibrated. resumed: taken over from an earlier, interrupted run.
    """

    module: str
    bits: float
    shape: tuple[int, int]
    mse: float
    output_error: float | None
    seconds: float
    resumed: bool = False


def stamp(settings: str, sources: Iterable[TensorInfo], hessian: Tensor | None) -> str:
    """Digest of everything a module's tensors depend on, bar the bytes of the source weights."""
    digest = hashlib.sha256(settings.encode())
    for info in sources:
        status = info.path.stat()
        place = (info.name, info.dtype, info.shape, info.path.name, info.start)
        digest.update(repr((*place, status.st_size, status.st_mtime_ns)).encode())
    if hessian is not None:
        digest.update(hessian.detach().cpu().double().contiguous().numpy().tobytes())
    return digest.hexdigest()


def module_tensors(module: str, packed: Exl3Tensor) -> dict[str, Tensor]:
    """The stored tensors of a quantised module, on the CPU (spec/exl3.md 4.1)."""
    tensors = {
        f"{module}.trellis": packed.trellis.cpu(),
        f"{module}.suh": packed.suh.cpu(),
        f"{module}.svh": packed.svh.cpu(),
    }
    if packed.codebook in MARKERS:
        value = MARKERS[packed.codebook]
        tensors[f"{module}.{packed.codebook}"] = torch.tensor(value - (1 << 32), dtype=torch.int32)
    if packed.bias is not None:
        tensors[f"{module}.bias"] = packed.bias.cpu().half()
    return tensors


class PartialStore:
    """The folder `.partial` of an output folder."""

    def __init__(self, out_dir: Path, *, resume: bool) -> None:
        """Raises CheckpointError when the folder cannot be made. resume: False starts afresh."""
        self.folder = out_dir / ".partial"
        try:
            if not resume:
                self.remove()
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as err:
            raise CheckpointError(f"{self.folder}: {err.strerror}; choose another folder") from None

    def path(self, module: str) -> Path:
        return self.folder / f"{module}.safetensors"

    def finished(self, module: str, stamped: str, bits: float) -> ModuleReport | None:
        """The report of a module that an earlier run finished with the same stamp, or None."""
        path = self.path(module)
        if not path.is_file():
            return None
        try:
            header = read_header(path)
            with open(path, "rb") as file:
                raw = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            note = json.loads(raw["__metadata__"][_STAMP])
            if note.pop("stamp") != stamped:
                return None
            note["shape"] = tuple(note["shape"])
            report = ModuleReport(**(note | {"resumed": True}))
        except (CheckpointError, OSError, ValueError, KeyError, TypeError):
            return None
        out, inp = report.shape
        words = (padded(inp) // 16, padded(out) // 16, int(16 * bits))
        trellis = header.get(f"{module}.trellis")
        is_whole = trellis is not None and trellis.shape == words
        return report if is_whole and f"{module}.svh" in header else None

    def save(self, report: ModuleReport, packed: Exl3Tensor, stamped: str) -> None:
        """Write a finished module; the file appears under its name only when it is complete."""
        path = self.path(report.module)
        temporary = path.with_suffix(".writing")
        note = json.dumps(asdict(report) | {"stamp": stamped})
        try:
            save_file(module_tensors(report.module, packed), temporary, {_STAMP: note})
            os.replace(temporary, path)
        except OSError as err:
            raise CheckpointError(f"{path}: {err.strerror}; is the disk full?") from None

    def load(self, module: str) -> dict[str, Tensor]:
        """The stored tensors of a finished module."""
        return load_file(self.path(module))

    def remove(self) -> None:
        """Delete the folder and what is in it."""
        if self.folder.is_dir():
            shutil.rmtree(self.folder)
