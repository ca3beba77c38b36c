"""The trellis codec against a decoder written bit by bit from the format's text."""

import hashlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twining.exl3.codec import (
    Codebook,
    codebook_values,
    decode_trellis,
    element_of_ring,
    from_tiles,
    is_rate,
    new_bits,
    pack_states,
    ring_of_element,
    to_tiles,
    trellis_bits,
    trellis_states,
)

RATES = (1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8)

# Published vectors: states 0, 1, 2, 255; sha of the states; sha of the tile for 3inst, mcg, mul1.
VECTORS = {
    float(row.split()[0]): (" ".join(row.split()[1:5]), *row.split()[5:])
    for row in """
1 ae77 5cef b9de d73b 2a096bdf9ed48bdb c852f360145b9c12 c356c6b1b26dad71 1f53d45fc89fc298
2 eaaf aabc aaf3 baab 3e992d72fbc6ffc4 e4a1ca57b6b40355 7bd477b88cd7db6d 1aed401fc5748090
3 f0de 86f3 379c 9e1b f73d703bd04f7a88 d63e8314946d753c 900d9266df06f2fc 978c70dbcfbadcbe
4 18bc 8bce bce7 818b d0a98d083a9aa0c8 1c20722904ffa645 5aec05f71e92beb4 fe3af5cd34a61ec0
5 9f79 ef39 e738 64fb b6d1b8488f76de2f aaaadfeba1d15f49 a89fd79630ea012a 88d06cc6816bedc0
6 1af3 bce7 39c0 486b 0813abdb185830e6 18ae871289fbabc5 cdefd7d6af7ca0fa b7a16dfe22cfe0aa
7 ede7 f39c ce06 2bdb a65192a7ba5719d8 75b38886137b97a9 fdb02fe9ca0fb622 94e4001ed572cf2a
8 4bce ce70 7030 0f4b d83a8c1c59aea459 33aee21e94be5c9d e55b022e843a371a 890469f3dfc1bc50
1.5 91e7 479e 8f3c c8f3 ec27a3d4a2d0ad2a - - 94bbe836cee63bdc
2.5 b18f 8c79 31e7 ac63 41fab0fe02268e89 - - d1b72645fe7876ee
3.5 7e9e e9e7 4f39 8fd3 050c65d2fea7ed44 - - 1cdca31a9c04f6bf
""".strip().splitlines()
}


def sha(values: torch.Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()[:16]


def random_trellis(shape: tuple[int, int], bits: float, seed: int) -> torch.Tensor:
    gen = torch.Generator().manual_seed(seed)
    return torch.randint(-32768, 32768, (*shape, int(16 * bits)), generator=gen).to(torch.int16)


def slow_states(words: list[int], bits: float) -> list[int]:
    """States of one tile, reading the stream one bit at a time."""
    stream = ""
    for j in range(len(words) // 2):
        stream += f"{(words[2 * j] & 0xFFFF) | (words[2 * j + 1] & 0xFFFF) << 16:032b}"
    states, end = [], 0
    for delta in new_bits(bits):
        end += delta
        states.append(int("".join(stream[b % len(stream)] for b in range(end - 16, end)), 2))
    return states


@pytest.mark.parametrize("bits", VECTORS)
def test_published_vectors(bits: float) -> None:
    words = (40503 * torch.arange(int(16 * bits)) + 12345) % 65536
    trellis = words.to(torch.int32).to(torch.int16)[None, None]
    states = trellis_states(trellis)[0, 0]
    first, state_sha, *tile_shas = VECTORS[bits]
    assert " ".join(f"{int(states[i]):04x}" for i in (0, 1, 2, 255)) == first
    assert sha(states.to(torch.int16)) == state_sha
    for codebook, want in zip(Codebook, tile_shas, strict=True):
        if want != "-":
            assert sha(decode_trellis(trellis, codebook)) == want


@settings(max_examples=25, deadline=None)
@given(bits=st.sampled_from(RATES), seed=st.integers(0, 2**32))
def test_states_match_bit_by_bit_reading_and_pack_back(bits: float, seed: int) -> None:
    trellis = random_trellis((1, 2), bits, seed)
    states = trellis_states(trellis)
    assert states[0, 1].tolist() == slow_states(trellis[0, 1].tolist(), bits)
    assert torch.equal(pack_states(states, bits), trellis)
    assert trellis_bits(trellis) == bits


def test_tiles_are_placed_in_tensor_core_order() -> None:
    trellis = random_trellis((3, 5), 3, seed=7)
    values = codebook_values(Codebook.MCG)
    states = trellis_states(trellis)
    dense = decode_trellis(trellis, Codebook.MCG)
    for i in (0, 1, 7, 100, 255):
        t, j = divmod(i, 8)
        row = 2 * (t & 3) + (j & 1) + 8 * ((j >> 1) & 1)
        col = (t >> 2) + 8 * ((j >> 2) & 1)
        assert ring_of_element()[row * 16 + col] == i
        assert element_of_ring()[i] == row * 16 + col
        assert torch.equal(dense[row::16, col::16], values[states[:, :, i].long()])
    column0 = ring_of_element().view(16, 16)[:, 0].tolist()
    assert column0 == [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27]


def test_tile_reordering_round_trip() -> None:
    weight = torch.randn(48, 80)
    tiles = to_tiles(weight)
    assert torch.equal(from_tiles(tiles), weight)
    assert tiles[1, 2, 255] == weight[16 + 15, 32 + 15]


def test_broken_ring_is_refused() -> None:
    states = trellis_states(random_trellis((1, 1), 4, seed=1))
    states[0, 0, 30] ^= 0x10
    with pytest.raises(ValueError, match="no ring"):
        pack_states(states, 4)


@pytest.mark.parametrize("shape", [(1, 1, 12), (1, 1, 72), (1, 1, 144), (1, 48), (1, 1, 0)])
def test_impossible_trellis_shapes_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        trellis_states(torch.zeros(shape, dtype=torch.int16))


def test_rates() -> None:
    assert is_rate(3.5, Codebook.MUL1) and not is_rate(3.5, Codebook.MCG)
    assert is_rate(8, Codebook.MCG) and not is_rate(9, Codebook.MUL1)
    assert not is_rate(4.5, Codebook.MUL1) and not is_rate(0, Codebook.MUL1)


def test_public_codebook_is_a_copy() -> None:
    codebook_values(Codebook.MUL1).zero_()
    assert codebook_values(Codebook.MUL1).abs().sum() > 0
