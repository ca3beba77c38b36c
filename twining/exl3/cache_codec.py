"""The 2..8 bit code of cached latents: groups of 32 rotated values, one fp16 scale, bit planes.

Source: spec/exl3.md section 6. Letters: G groups of 32 values in a row, bits = 2..8 per value.
Each row is coded on its own (elementwise work inside a group), so the batch never matters.
"""

import torch
from torch import Tensor

GROUP = 32
_INV_SQRT = 0.17677669529663688  # 1 / sqrt(32)


def row_words(width: int, bits: int) -> int:
    """int32 words that a row of `width` values takes at this rate."""
    return width // GROUP * bits


def _split(x: Tensor, size: int) -> Tensor:
    """[..., m * size] seen as [..., m, size]."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _butterfly32(x: Tensor) -> Tensor:
    """Unnormalised 32-point Hadamard transform of the last dimension, distances 1, 2, 4, 8, 16."""
    shape = x.shape
    for distance in (1, 2, 4, 8, 16):
        low, high = x.reshape(*shape[:-1], -1, 2, distance).unbind(-2)
        x = torch.stack((low + high, low - high), -2)
    return x.reshape(shape)


def rotate32(x: Tensor) -> Tensor:
    """fp32 [..., n]: orthonormal 32-point rotation of every group; its own inverse."""
    return (_butterfly32(_split(x.float(), GROUP)) * _INV_SQRT).flatten(-2)


def _planes(bits: int) -> list[tuple[int, int, int]]:
    """(width, bits below it, first word) of every bit plane, most significant first."""
    planes, below, base = [], bits, 0
    for width in (8, 4, 2, 1):
        if bits & width:
            below -= width
            planes.append((width, below, base))
            base += width
    return planes


def _check(bits: int, width: int) -> None:
    if bits not in range(2, 9):
        raise ValueError(f"cache bits={bits}; use 2..8")
    if width % GROUP:
        raise ValueError(f"cache rows of {width} values; need a multiple of {GROUP}")


def quantize(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """(words int32 [..., n / 32 * bits], scales fp16 [..., n / 32]) of x fp16 [..., n].

    Raises ValueError for bits outside 2..8 or n that is no multiple of 32.
    """
    _check(bits, x.shape[-1])
    rotated = _split(rotate32(x), GROUP)
    scale = rotated.abs().amax(-1, keepdim=True) + 1e-10
    middle = float(1 << (bits - 1))
    # `middle` is a power of two: product and sum round once, as a fused multiply-add does.
    level = torch.floor(rotated * (1.0 / scale) * middle + middle)
    level = level.clamp(0, 2 * middle - 1).to(torch.int32)
    words = []
    for width, below, _ in _planes(bits):
        per_word = 32 // width
        part = _split((level >> below) & ((1 << width) - 1), per_word)
        shift = torch.arange(0, 32, width, dtype=torch.int32, device=x.device)
        words.append((part << shift).sum(-1, dtype=torch.int32))
    return torch.cat(words, -1).flatten(-2), scale.squeeze(-1).half()


def _levels(words: Tensor, bits: int) -> Tensor:
    """int32 [..., G, 32] levels 0 .. 2**bits - 1 from words [..., G, bits]."""
    level = torch.zeros((), dtype=torch.int32, device=words.device)
    for width, below, base in _planes(bits):
        shift = torch.arange(0, 32, width, dtype=torch.int32, device=words.device)
        part = (words[..., base : base + width, None] >> shift) & ((1 << width) - 1)
        level = level | (part.flatten(-2) << below)
    return level


def dequantize_rotated(words: Tensor, scales: Tensor, bits: int) -> Tensor:
    """fp32 [..., n]: the coded values left in the rotated basis (spec/exl3.md 6.4), unrounded."""
    _check(bits, GROUP)
    level = _levels(_split(words, bits), bits)
    middle = float(1 << (bits - 1))
    step = scales.float() * (1.0 / middle)
    return ((level.float() - (middle - 0.5)) * step[..., None]).flatten(-2)


def dequantize(words: Tensor, scales: Tensor, bits: int) -> Tensor:
    """fp16 [..., n] from words int32 [..., n / 32 * bits] and scales fp16 [..., n / 32].

    Raises ValueError for bits outside 2..8 or a number of words that does not fit the scales.
    """
    _check(bits, GROUP)
    if words.shape[-1] != scales.shape[-1] * bits:
        raise ValueError(
            f"{words.shape[-1]} words for {scales.shape[-1]} groups of {bits} bits;"
            f" expected {scales.shape[-1] * bits}"
        )
    level = _levels(_split(words, bits), bits)
    middle = float(1 << (bits - 1))
    step = (scales.float() * _INV_SQRT) * (1.0 / middle)
    value = (level.float() - (middle - 0.5)) * step[..., None]
    return _butterfly32(value).half().flatten(-2)
