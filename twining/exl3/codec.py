"""The trellis code: 16-bit states packed in a ring of bits, and codebooks of fp16 values.

Source: the EXL3 format (spec/exl3.md sections 2 and 3).
Letters: k padded in_features, n padded out_features, bits = rate per weight (1..8, 1.5, 2.5, 3.5).
A tile covers 16 inputs x 16 outputs and holds 256 states; ring position i owns D(i) new bits.
Everything is integer arithmetic or a table look-up, so the results are bit-exact on every device.
"""

from enum import StrEnum
from functools import lru_cache

import torch
from torch import Tensor

TILE = 16  # edge of a tile
RING = 256  # ring positions per tile
HALF_RATES = (1.5, 2.5, 3.5)


class Codebook(StrEnum):
    """How a state becomes a value; named by the marker tensor beside `trellis` (none: 3INST)."""

    THREE_INST = "3inst"
    MCG = "mcg"
    MUL1 = "mul1"


MARKERS = {Codebook.MCG: 0xCBAC1FED, Codebook.MUL1: 0x83DCD12D}  # uint32 value of the marker scalar


def is_rate(bits: float, codebook: Codebook) -> bool:
    """Whether the format has this rate with this codebook (half rates exist for mul1 only)."""
    if bits in HALF_RATES:
        return codebook is Codebook.MUL1
    return bits in range(1, 9)


def _as_half(bits16: Tensor) -> Tensor:
    """fp32 values of the binary16 numbers whose bit patterns are given as integers 0..65535."""
    signed = torch.where(bits16 >= 32768, bits16 - 65536, bits16)
    return signed.to(torch.int16).view(torch.float16).float()


@lru_cache(maxsize=16)
def _codebook_table(codebook: Codebook, device: str) -> Tensor:
    state = torch.arange(65536, dtype=torch.int64)
    if codebook is Codebook.MUL1:
        x = (state * MARKERS[Codebook.MUL1]) & 0xFFFFFFFF
        byte_sum = (x & 255) + ((x >> 8) & 255) + ((x >> 16) & 255) + (x >> 24)
        # fp32 multiply and add followed by one rounding equals the fused fp16 multiply-add.
        scale, shift = 0.00676727294921875, -10.3828125
        value = (byte_sum + 1024).float() * scale + shift
    else:
        if codebook is Codebook.MCG:
            x = (state * MARKERS[Codebook.MCG]) & 0xFFFFFFFF
        else:
            x = (state * 89226354 + 64248484) & 0xFFFFFFFF
        x = (x & 0x8FFF8FFF) ^ 0x3B603B60
        value = _as_half(x & 0xFFFF) + _as_half(x >> 16)
    return value.half().to(device)


def codebook_values(codebook: Codebook, device: torch.device | str = "cpu") -> Tensor:
    """fp16 [65536]: the value of every state."""
    return _codebook_table(codebook, str(device)).clone()


def new_bits(bits: float) -> list[int]:
    """D(i) for the 256 ring positions: bits each position adds to the stream."""
    if bits == int(bits):
        return [int(bits)] * RING
    low = int(bits)
    return [low, low + 1] * (RING // 2)


@lru_cache(maxsize=64)
def _window_ends(bits: float, device: str) -> tuple[Tensor, Tensor]:
    """(D, E), int32 [256]: new bits of each position and the exclusive end of its 16-bit window."""
    delta = torch.tensor(new_bits(bits), dtype=torch.int32)
    return delta.to(device), delta.cumsum(0).to(torch.int32).to(device)


@lru_cache(maxsize=16)
def ring_of_element(device: str = "cpu") -> Tensor:
    """int64 [256]: ring position of element row * 16 + col (row = input, col = output)."""
    row = torch.arange(TILE)[:, None]
    col = torch.arange(TILE)[None, :]
    lane = 4 * (col & 7) + ((row & 7) >> 1)
    register = (row & 1) + 2 * (row >> 3) + 4 * (col >> 3)
    return (8 * lane + register).reshape(RING).to(device)


@lru_cache(maxsize=16)
def element_of_ring(device: str = "cpu") -> Tensor:
    """int64 [256]: element row * 16 + col at every ring position; inverse of `ring_of_element`."""
    return torch.argsort(ring_of_element("cpu")).to(device)


def trellis_bits(trellis: Tensor) -> float:
    """Rate of an int16 [k/16, n/16, words] trellis. Raises ValueError for any other tensor."""
    if trellis.dtype != torch.int16 or trellis.ndim != 3:
        raise ValueError(
            f"trellis is {trellis.dtype} {tuple(trellis.shape)}; expected int16 with 3 dimensions"
        )
    return bits_of_words(trellis.shape[2])


def bits_of_words(num_words: int) -> float:
    """Rate of a tile of `num_words` 16-bit words. Raises ValueError if there is no such rate."""
    bits = num_words / 16
    if bits not in HALF_RATES and bits not in range(1, 9):
        raise ValueError(f"{num_words} words per tile is no rate of 1..8, 1.5, 2.5 or 3.5 bits")
    return bits


def _states_at(trellis: Tensor, position: Tensor) -> Tensor:
    """States at the given ring positions, int32 [k/16, n/16, len(position)]."""
    bits = trellis_bits(trellis)
    num_words = trellis.shape[2]
    device = str(trellis.device)
    # The stream is uint32 words with the most significant bit first: 16-bit words 1, 0, 3, 2, ...
    word = torch.arange(num_words, device=trellis.device)
    stream = trellis[..., word ^ 1].to(torch.int32)
    pair = (stream << 16) | (stream.roll(-1, 2) & 0xFFFF)  # 32 bits starting at each word
    start = (_window_ends(bits, device)[1][position] - 16) % (16 * num_words)
    # Arithmetic shift by 1..16: the copied sign bits stay above the 16 bits that are kept.
    return (pair[..., start >> 4] >> (16 - (start & 15))) & 0xFFFF


def trellis_states(trellis: Tensor) -> Tensor:
    """int32 [k/16, n/16, 256]: the states 0..65535 of every tile in ring order.

    trellis: int16 [k/16, n/16, 16 * bits]. Raises ValueError for another dtype, rank or width.
    """
    return _states_at(trellis, torch.arange(RING, device=trellis.device))


def pack_states(states: Tensor, bits: float) -> Tensor:
    """int16 [..., 16 * bits] from integer states [..., 256] in ring order; inverse of unpacking.

    Raises ValueError when neighbouring states disagree on the bits they share.
    """
    if states.shape[-1] != RING:
        raise ValueError(f"states have {states.shape[-1]} positions per tile; a tile has {RING}")
    device = str(states.device)
    delta, end = _window_ends(bits, device)
    states = states.to(torch.int32)
    before = states.roll(1, -1)
    if not torch.equal((before << delta) & 0xFFFF | (states & ((1 << delta) - 1)), states):
        raise ValueError("states are no ring: neighbours disagree on their shared bits")
    num_words = int(16 * bits)
    word_end = 16 * torch.arange(1, num_words + 1, device=states.device, dtype=torch.int32)
    # Word w ends inside the new bits of position i; states i - 1 and i together hold all of it.
    i = torch.searchsorted(end, word_end)
    both = (before[..., i] << delta[i]) | (states[..., i] & ((1 << delta[i]) - 1))
    stream = (both >> (end[i] - word_end)) & 0xFFFF
    stream = torch.where(stream >= 32768, stream - 65536, stream).to(torch.int16)
    return stream[..., torch.arange(num_words, device=states.device) ^ 1]


def decode_trellis(trellis: Tensor, codebook: Codebook) -> Tensor:
    """fp16 [k, n]: the inner weight D in the rotated basis, inputs x outputs, bit-exact.

    trellis: int16 [k/16, n/16, 16 * bits]. Raises ValueError as `trellis_states` does.
    """
    device = str(trellis.device)
    rows, cols = trellis.shape[0], trellis.shape[1]
    states = _states_at(trellis, ring_of_element(device))
    values = _codebook_table(codebook, device).index_select(0, states.view(-1))
    tiles = values.view(rows, cols, TILE, TILE)
    return tiles.transpose(1, 2).reshape(rows * TILE, cols * TILE)


def to_tiles(weight: Tensor) -> Tensor:
    """[k/16, n/16, 256] in ring order from a matrix [k, n] of any dtype."""
    rows, cols = weight.shape[0] // TILE, weight.shape[1] // TILE
    tiles = weight.view(rows, TILE, cols, TILE).transpose(1, 2).reshape(rows, cols, RING)
    return tiles[..., element_of_ring(str(weight.device))]


def from_tiles(tiles: Tensor) -> Tensor:
    """Matrix [k, n] from [k/16, n/16, 256] in ring order; inverse of `to_tiles`."""
    rows, cols = tiles.shape[0], tiles.shape[1]
    ordered = tiles[..., ring_of_element(str(tiles.device))]
    return ordered.view(rows, cols, TILE, TILE).transpose(1, 2).reshape(rows * TILE, cols * TILE)
