"""Bytes of every cache plane, as the caches allocate them, and of ExLlamaV3's layout beside it.

Source: twining/cache; spec/recipes.md 5.2, spec/glm5_next.md 16.4, spec/dflash2.md C.1.
Per layer, so that a split can add up its own layers; sums equal CachePool.nbytes() to the byte.
Letters: A heads, D head dimension, Q = A D. Sizes in bytes. No torch.
"""

from dataclasses import dataclass
from typing import Final

from twining.checkpoint.dflash2_config import DFlash2Config
from twining.checkpoint.hf_config import Glm5NextConfig
from twining.config import PAGE_SIZE, PREFILL_BLOCK
from twining.errors import ConfigError

_PLAIN_BYTES: Final = {"fp32": 4, "bf16": 2, "fp16": 2}
_GROUP_BITS: Final = {"q8": 8, "q6": 6, "q4": 4}
_GROUP: Final = 32  # values that share one 2-byte scale
LATENT_FORMATS: Final = (*_PLAIN_BYTES, *_GROUP_BITS)
INDEX_FORMATS: Final = ("fp32", "fp16")
EXLLAMA_INDEX_BYTES: Final = 2 * 128 * 2 + 64  # raw key and gate, pooled key; per token and layer


def latent_row_bytes(width: int, fmt: str) -> int:
    """One token's latent in one layer. Raises ConfigError for an unknown format."""
    if fmt in _PLAIN_BYTES:
        return width * _PLAIN_BYTES[fmt]
    if fmt not in _GROUP_BITS:
        raise ConfigError(f"latent_format={fmt!r} is unknown; use {', '.join(LATENT_FORMATS)}")
    if width % _GROUP:
        raise ConfigError(
            f"latent_format={fmt!r} needs a width in groups of {_GROUP}, it is {width}; use fp16"
        )
    return width // _GROUP * (4 * _GROUP_BITS[fmt] + 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What sizes the planes. num_pages: of 256 tokens, shared; max_draft: drafts per verify."""

    num_pages: int
    max_seqs: int
    max_draft: int
    latent_format: str = "fp32"
    index_format: str = "fp32"

    def __post_init__(self) -> None:
        if self.index_format not in INDEX_FORMATS:
            raise ConfigError(
                f"index_format={self.index_format!r} is unknown; use {', '.join(INDEX_FORMATS)}"
            )
        if self.num_pages < 1 or self.max_seqs < 1 or not 0 <= self.max_draft <= 15:
            raise ConfigError(
                f"cache of {self.num_pages} pages, {self.max_seqs} sequences and"
                f" {self.max_draft} drafts: at least 1, at least 1, and 0..15 are needed"
            )

    @property
    def window(self) -> int:
        """Rows of one verify."""
        return self.max_draft + 1


@dataclass(frozen=True, slots=True)
class PlaneBytes:
    """Planes of one layer or of a sum of layers."""

    latent: int = 0
    index_keys: int = 0
    index_slots: int = 0
    kda: int = 0

    def __add__(self, other: "PlaneBytes") -> "PlaneBytes":
        return PlaneBytes(
            self.latent + other.latent,
            self.index_keys + other.index_keys,
            self.index_slots + other.index_slots,
            self.kda + other.kda,
        )

    @property
    def total(self) -> int:
        return self.latent + self.index_keys + self.index_slots + self.kda


def attention_layer(config: Glm5NextConfig, shape: CacheShape, *, has_index: bool) -> PlaneBytes:
    """Planes of one MLA layer; has_index: the layer scores with keys of its own."""
    row = latent_row_bytes(config.kv_lora_rank, shape.latent_format)
    latent = (shape.num_pages * PAGE_SIZE + 1) * row  # one zero row for absent positions
    if not has_index:
        return PlaneBytes(latent=latent)
    dim, pool = config.index_head_dim, config.index_pool
    key = dim * _PLAIN_BYTES[shape.index_format]
    keys = shape.num_pages * (PAGE_SIZE // pool) * key
    ring = PREFILL_BLOCK + pool + shape.window
    candidates = -(-shape.window // pool)
    slots = shape.max_seqs * (ring * 2 * dim * 4 + candidates * key)
    return PlaneBytes(latent=latent, index_keys=keys, index_slots=slots)


def kda_layer(config: Glm5NextConfig, shape: CacheShape) -> PlaneBytes:
    """State, window log and convolution inputs of one KDA layer; float32."""
    A, D, Q = config.kda_heads, config.kda_head_dim, config.kda_width
    base = A * D * D
    log = shape.window * (3 * Q + A)
    conv = (config.conv_kernel - 1 + shape.window) * 3 * Q
    return PlaneBytes(kda=shape.max_seqs * (base + log + conv) * 4)


def trunk_layer(config: Glm5NextConfig, shape: CacheShape, index: int) -> PlaneBytes:
    """Planes of one trunk layer."""
    if config.layer_types[index] == "kda":
        return kda_layer(config, shape)
    return attention_layer(config, shape, has_index=config.indexer_types[index] == "full")


def all_planes(config: Glm5NextConfig, shape: CacheShape, *, has_mtp: bool) -> PlaneBytes:
    """Planes of the whole model; equals CachePool.nbytes() name by name."""
    total = PlaneBytes()
    for index in range(config.num_layers):
        total += trunk_layer(config, shape, index)
    if has_mtp:
        total += attention_layer(config, shape, has_index=True)
    return total


def token_bytes(config: Glm5NextConfig, latent_format: str, index_format: str) -> int:
    """Paged bytes that one more token costs in the trunk, all layers."""
    row = latent_row_bytes(config.kv_lora_rank, latent_format)
    key = config.index_head_dim * _PLAIN_BYTES[index_format] // config.index_pool
    full = sum(config.indexer_types[i] == "full" for i in config.mla_layers)
    return len(config.mla_layers) * row + full * key


def state_bytes(config: Glm5NextConfig, shape: CacheShape) -> int:
    """What one sequence holds whatever its length: a snapshot of it, in host memory."""
    A, D, Q = config.kda_heads, config.kda_head_dim, config.kda_width
    conv = (config.conv_kernel - 1 + shape.window) * 3 * Q
    kda = len(config.kda_layers) * (A * D * D + conv) * 4
    full = sum(config.indexer_types[i] == "full" for i in config.mla_layers)
    ring = PREFILL_BLOCK + config.index_pool + shape.window
    return kda + full * ring * 2 * config.index_head_dim * 4


def ring_rows(config: DFlash2Config, max_chunk: int) -> int:
    """Rows of a drafter's ring: window, longest write and block, in whole pages."""
    need = (config.sliding_window or 0) - 1 + max_chunk + config.block_size
    return -(-need // PAGE_SIZE) * PAGE_SIZE


def draft_token_values(config: DFlash2Config) -> int:
    """Key and value numbers that a drafter keeps per token, all layers."""
    return 2 * config.num_layers * config.num_kv_heads * config.head_dim


def ring_bytes(
    config: DFlash2Config, *, max_seqs: int, max_chunk: int, value_bytes: int = 4
) -> int:
    """Both planes of RingCache."""
    rows = ring_rows(config, max_chunk)
    return max_seqs * rows * draft_token_values(config) * value_bytes


def draft_q8_bytes(values: int) -> int:
    """Draft keys and values in 8 bits with one 2-byte scale per 32."""
    return values + values // _GROUP * 2


def exllama_token_bytes(fmt: str) -> int:
    """ExLlamaV3's cache bytes per token and attention layer (spec/recipes.md 5.2)."""
    return latent_row_bytes(512, fmt) + EXLLAMA_INDEX_BYTES


def exllama_cache_bytes(tokens: int, fmt: str, *, num_layers: int = 11) -> int:
    """ExLlamaV3's latent and index cache, which keeps every raw index key."""
    return tokens * exllama_token_bytes(fmt) * num_layers
