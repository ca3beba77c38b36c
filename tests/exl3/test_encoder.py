"""The trellis search: valid rings, errors near the known ones, and independence of batching."""

import pytest
import torch

from twining.exl3.codec import Codebook, pack_states, trellis_states
from twining.exl3.encoder import TileEncoder

# Normalised error on Gaussian data at the best global scale (spec/exl3.md 5.9).
EXPECTED = {1.5: (0.83, 0.137), 2: (0.80, 0.0686), 3: (0.76, 0.0172), 4: (0.75, 0.00441)}


def gaussian(num: int, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randn(num, 256, generator=gen) * 1.24371088


@pytest.mark.parametrize("bits", EXPECTED)
def test_error_on_gaussian_tiles(bits: float) -> None:
    scale, expected = EXPECTED[bits]
    tiles = gaussian(16, seed=11)
    encoder = TileEncoder(bits, Codebook.MUL1)
    states = encoder.encode(tiles * scale)
    pack_states(states, bits)  # raises unless every tile is a valid ring
    error = (encoder.values(states) / scale - tiles).square().sum() / tiles.square().sum()
    assert 0.9 * expected < float(error) < 1.06 * expected


@pytest.mark.parametrize("bits", [1, 2.5, 5, 6, 7, 8])
def test_values_on_the_trellis_are_found_again(bits: float) -> None:
    """A tile that some ring decodes to exactly must be coded without error."""
    gen = torch.Generator().manual_seed(5)
    words = torch.randint(-32768, 32768, (1, 1, int(16 * bits)), generator=gen)
    states = trellis_states(words.to(torch.int16))[0]
    encoder = TileEncoder(bits, Codebook.MUL1)
    found = encoder.encode(encoder.values(states))
    pack_states(found, bits)
    assert torch.equal(encoder.values(found), encoder.values(states))


def test_result_does_not_depend_on_batching() -> None:
    tiles = gaussian(7, seed=3)
    whole = TileEncoder(4, Codebook.MCG).encode(tiles)
    small = TileEncoder(4, Codebook.MCG, memory=1)
    assert small.max_tiles == 1
    assert torch.equal(small.encode(tiles), whole)
    assert torch.equal(small.encode(tiles[2:3]), whole[2:3])
    assert TileEncoder(4, Codebook.MCG).encode(tiles[:0]).shape == (0, 256)


def test_impossible_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="no rate"):
        TileEncoder(2.5, Codebook.MCG)
