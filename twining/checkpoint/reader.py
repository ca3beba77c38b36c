"""Reading tensors of a checkpoint folder into CPU memory.

Plain positioned reads into fresh memory: no memory maps (a file that shrinks under a map kills the
process) and no second copy. Data is little-endian, as on every machine this engine supports.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from twining.checkpoint.headers import TensorInfo, scan_folder
from twining.checkpoint.hf_config import load_config
from twining.errors import CheckpointError

TORCH_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
}


class Checkpoint:
    """An opened checkpoint folder: its config, its tensor table, and reads that are accounted for.

    Every read marks its tensor as used, so that a loader can report what it did not understand.
    """

    __slots__ = ("_used", "config", "folder", "tensors")

    def __init__(
        self, folder: Path, config: dict[str, Any], tensors: dict[str, TensorInfo]
    ) -> None:
        self.folder = folder
        self.config = config
        self.tensors = tensors
        self._used: set[str] = set()

    @classmethod
    def open(cls, folder: Path) -> "Checkpoint":
        """Read config.json and all headers. Raises CheckpointError."""
        return cls(folder, load_config(folder), scan_folder(folder))

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def info(self, name: str) -> TensorInfo:
        """The table entry. Raises CheckpointError when the tensor does not exist."""
        if name not in self.tensors:
            self.require([name])
        return self.tensors[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self.info(name).shape

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A fresh CPU copy, converted to dtype when given. Raises CheckpointError."""
        info = self.info(name)
        self._used.add(name)
        buffer = torch.empty(info.nbytes, dtype=torch.uint8)
        try:
            with open(info.path, "rb", buffering=0) as file:
                file.seek(info.start)
                # The kernel returns at most about 2 GiB per call.
                view, done = buffer.numpy().data, 0
                while done < info.nbytes and (count := file.readinto(view[done:])):
                    done += count
        except OSError as err:
            raise CheckpointError(
                f"{info.path.name}: reading {name} failed ({err.strerror}); check the disk"
            ) from None
        if done < info.nbytes:
            raise CheckpointError(
                f"{info.path.name}: {name} ends after {done} of {info.nbytes} bytes;"
                " the file changed while it was open, start again"
            )
        # A byte other than 0 or 1 in a torch.bool is undefined behaviour, so compare.
        is_bool = info.dtype == "BOOL"
        tensor = buffer != 0 if is_bool else buffer.view(TORCH_DTYPES[info.dtype])
        tensor = tensor.reshape(info.shape)
        return tensor if dtype is None else tensor.to(dtype)

    def ignore(self, names: Iterable[str]) -> None:
        """Mark tensors as known but not needed (redundant copies)."""
        self._used.update(names)

    def unused(self, prefixes: tuple[str, ...] = ()) -> list[str]:
        """Names never read, in file order, leaving out those that start with one of `prefixes`."""
        return [n for n in self.tensors if n not in self._used and not n.startswith(prefixes)]

    def require(self, names: Iterable[str]) -> None:
        """Raise one CheckpointError for all missing tensors: the first few names, and how many."""
        missing = [name for name in dict.fromkeys(names) if name not in self.tensors]
        if not missing:
            return
        listed = ", ".join(missing[:4]) + (", ..." if len(missing) > 4 else "")
        raise CheckpointError(
            f"{self.folder}: {len(missing)} tensors are missing: {listed};"
            " incomplete download, or a checkpoint of another model"
        )
