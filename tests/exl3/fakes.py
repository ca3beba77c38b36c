"""A checkpoint that lives in memory, for tests of the EXL3 reader."""

from dataclasses import dataclass
from pathlib import Path

import torch

DTYPES = {
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
}


@dataclass
class FakeInfo:
    dtype: str
    shape: tuple[int, ...]


class FakeCheckpoint:
    """The part of `checkpoint.reader.Checkpoint` that the linear reader uses."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self.data = tensors
        self.folder = Path("memory")
        self.tensors = {k: FakeInfo(DTYPES[v.dtype], tuple(v.shape)) for k, v in tensors.items()}

    def __contains__(self, name: str) -> bool:
        return name in self.data

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        value = self.data[name].clone()
        return value if dtype is None else value.to(dtype)


def random_exl3(
    module: str, k: int, n: int, bits: float, codebook: str, seed: int
) -> dict[str, torch.Tensor]:
    """Random tensors of one quantised module (k inputs, n outputs, both multiples of 128)."""
    gen = torch.Generator().manual_seed(seed)
    words = int(16 * bits)
    trellis = torch.randint(-32768, 32768, (k // 16, n // 16, words), generator=gen)
    out = {
        f"{module}.trellis": trellis.to(torch.int16),
        f"{module}.suh": (torch.randn(k, generator=gen) * 0.05).half(),
        f"{module}.svh": torch.randn(n, generator=gen).half(),
    }
    marker = {"mcg": 0xCBAC1FED - (1 << 32), "mul1": 0x83DCD12D - (1 << 32)}.get(codebook)
    if marker is not None:
        out[f"{module}.{codebook}"] = torch.tensor(marker, dtype=torch.int32)
    return out
