"""The 128-point Hadamard rotation that EXL3 applies on both sides of a weight.

Source: spec/exl3.md 1.1. Natural (Sylvester) order, orthonormal, block-diagonal on longer vectors,
symmetric and its own inverse. Letters: b = 128-wide blocks along the rotated dimension.
"""

from functools import lru_cache

import torch
from torch import Tensor

BLOCK = 128
SCALE = 0.088388347648  # 1 / sqrt(128) as the format's kernels write it (fp32)


@lru_cache(maxsize=64)
def sign_matrix(size: int, dtype: torch.dtype, device: str) -> Tensor:
    """[size, size] of +1 and -1: (-1) ** popcount(i & j); size = power of two. Do not modify."""
    signs = torch.ones(1, 1, dtype=dtype)
    while len(signs) < size:
        signs = torch.cat([torch.cat([signs, signs], 1), torch.cat([signs, -signs], 1)])
    return signs.to(device)


def hadamard_matrix(device: torch.device | str = "cpu") -> Tensor:
    """fp32 [128, 128]: the orthonormal matrix."""
    return sign_matrix(BLOCK, torch.float32, str(device)) * SCALE


def rotate_signs(x: Tensor, dim: int = -1) -> Tensor:
    """Unscaled block transform (entries +1, -1) along `dim`, in the dtype of `x`.

    With float64 input of fp16 values every partial sum is exact, whatever the order of addition.
    Raises ValueError unless the size along `dim` is a multiple of 128.
    """
    size = x.shape[dim]
    if size % BLOCK:
        raise ValueError(f"hadamard: {size} values along dimension {dim}; need a multiple of 128")
    signs = sign_matrix(BLOCK, x.dtype, str(x.device))
    if dim in (-1, x.ndim - 1):
        return (x.reshape(-1, BLOCK) @ signs).view(x.shape)
    if x.ndim == 2:
        return torch.matmul(signs, x.reshape(size // BLOCK, BLOCK, -1)).view(x.shape)
    return rotate_signs(x.transpose(dim, -1)).transpose(dim, -1)


def hadamard128(x: Tensor, dim: int = -1) -> Tensor:
    """x times blockdiag(H128) along `dim`; fp32 arithmetic for fp16 and bf16, result in x.dtype.

    Raises ValueError unless the size along `dim` is a multiple of 128.
    """
    work = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return (rotate_signs(work, dim) * SCALE).to(x.dtype)
