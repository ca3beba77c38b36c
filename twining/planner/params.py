"""Parameters of every part of a model, from its config alone: how many are quantised in an EXL3
pack, in how many matrices, and how many stay in 16 or 32 bits.

Source: spec/glm5_next.md 3, 16.1, 16.2; spec/exl3.md 4.1, 4.5, 4.6; spec/dflash2.md A.2.
Letters: H hidden, Q KDA width, W expert width, V vocabulary. No torch.
"""

from dataclasses import dataclass

from twining.checkpoint.dflash2_config import DFlash2Config
from twining.checkpoint.hf_config import Glm5NextConfig, VisionConfig


@dataclass(frozen=True, slots=True)
class Params:
    """packed: weights of quantisable matrices; edges: sum of their in + out; matrices: their
    number; half, single: values kept in 16 and in 32 bits."""

    packed: int = 0
    edges: int = 0
    matrices: int = 0
    half: int = 0
    single: int = 0

    def __add__(self, other: "Params") -> "Params":
        return Params(
            self.packed + other.packed,
            self.edges + other.edges,
            self.matrices + other.matrices,
            self.half + other.half,
            self.single + other.single,
        )

    def times(self, count: int) -> "Params":
        return Params(
            self.packed * count,
            self.edges * count,
            self.matrices * count,
            self.half * count,
            self.single * count,
        )

    @property
    def total(self) -> int:
        return self.packed + self.half + self.single

    def packed_bytes(self, bits: float) -> int:
        """Stored at a rate: trellis, two fp16 vectors and a marker per matrix, plain values."""
        plain = 2 * self.half + 4 * self.single
        if bits >= 16:
            return 2 * self.packed + plain
        return round(self.packed * bits / 8) + 2 * self.edges + 4 * self.matrices + plain


def matrix(inputs: int, outputs: int) -> Params:
    """One quantisable matrix."""
    return Params(packed=inputs * outputs, edges=inputs + outputs, matrices=1)


def kda(config: Glm5NextConfig) -> Params:
    """A KDA mixer."""
    H, Q, D, A = config.hidden_size, config.kda_width, config.kda_head_dim, config.kda_heads
    gates = 2 * (D * H + Q * D) + A * H
    conv = 3 * Q * config.conv_kernel
    return matrix(H, 3 * Q) + matrix(Q, H) + Params(half=gates + conv + D, single=A + Q)


def mla(config: Glm5NextConfig) -> Params:
    """An MLA mixer without its indexer."""
    H, A, rank, latent = (
        config.hidden_size,
        config.num_heads,
        config.q_lora_rank,
        config.kv_lora_rank,
    )
    up = A * (config.qk_head_dim + config.v_head_dim) * latent
    return (
        matrix(H, rank)
        + matrix(rank, A * config.qk_head_dim)
        + matrix(H, latent)
        + matrix(A * config.v_head_dim, H)
        + Params(half=up + rank + latent)
    )


def indexer(config: Glm5NextConfig) -> Params:
    """The indexer of a full layer."""
    H, X, D = config.hidden_size, config.index_heads, config.index_head_dim
    half = 2 * D * H + X * H + 2 * D  # key and gate projections, head weights, key norm
    return matrix(config.q_lora_rank, X * D) + Params(half=half, single=config.index_pool * D)


def swiglu(hidden: int, width: int) -> Params:
    """Gate, up and down of one MLP or expert."""
    return matrix(hidden, width).times(2) + matrix(width, hidden)


def router(config: Glm5NextConfig) -> Params:
    return Params(half=config.num_experts * config.hidden_size, single=config.num_experts)


def hyper(config: Glm5NextConfig) -> Params:
    """Both mHC sites of a layer; float32."""
    n = config.hc_mult
    rows = n * (n + 2)
    return Params(single=2 * (rows * n * config.hidden_size + rows + 3))


def mlp(config: Glm5NextConfig, is_sparse: bool) -> dict[str, Params]:
    """A layer's MLP by component."""
    H, W = config.hidden_size, config.moe_intermediate_size
    if not is_sparse:
        return {"dense": swiglu(H, config.intermediate_size)}
    return {
        "experts": swiglu(H, W).times(config.num_experts),
        "shared": swiglu(H, W).times(config.num_shared_experts),
        "router": router(config),
    }


def layer(config: Glm5NextConfig, index: int) -> dict[str, Params]:
    """A trunk layer by component."""
    is_kda = config.layer_types[index] == "kda"
    parts = {"kda": kda(config)} if is_kda else {"mla": mla(config)}
    if not is_kda and config.indexer_types[index] == "full":
        parts["indexer"] = indexer(config)
    parts |= mlp(config, config.mlp_types[index] == "sparse")
    parts["hyper"] = hyper(config)
    parts["norms"] = Params(half=2 * config.hidden_size)
    return parts


def embedding(config: Glm5NextConfig) -> Params:
    return Params(half=config.vocab_size * config.hidden_size)


def head(config: Glm5NextConfig) -> Params:
    """The output projection; nothing when it is the embedding."""
    if config.tie_word_embeddings:
        return Params()
    return matrix(config.hidden_size, config.vocab_size)


def mtp(config: Glm5NextConfig) -> Params:
    """One MTP block: an MLA MoE layer without mHC, and what joins it to the trunk."""
    H = config.hidden_size
    total = matrix(2 * H, H) + Params(half=5 * H) + mla(config) + indexer(config)
    for part in mlp(config, is_sparse=True).values():
        total += part
    return total


def vision(config: VisionConfig) -> Params:
    """The tower and its merger (spec/glm5_next.md 3.2)."""
    H, width = config.hidden_size, config.intermediate_size
    out, merged = config.out_hidden_size, config.projection_intermediate_size
    # q, k, v are stored apart in a pack.
    block = matrix(H, H).times(4) + matrix(H, width).times(2) + matrix(width, H)
    biases = 3 * H + H + 2 * width + H
    block += Params(half=biases + 2 * H + 2 * config.head_dim)
    patch = Params(half=H * config.patch_values + H)
    down = Params(half=out * H * config.spatial_merge_size**2 + out)
    merger = matrix(out, out) + swiglu(out, merged) + Params(half=2 * out)
    return block.times(config.depth) + patch + down + merger + Params(half=H)


def drafter(config: DFlash2Config) -> Params:
    """A DFlash2 drafter; codebooks, selector, kernels and norms stay in 16 bits."""
    H, D = config.hidden_size, config.head_dim
    q, kv, taps = config.num_heads * D, config.num_kv_heads * D, config.conv_kernel
    groups = H // config.conv_group
    one = (
        matrix(H, q)
        + matrix(H, kv).times(2)
        + matrix(q, H)
        + swiglu(H, config.intermediate_size)
        + matrix(H, 2 * taps * groups).times(2)
        + Params(half=2 * H + 2 * D + 2 * (2 * taps * H))
    )
    tables = 2 * config.vocab_size * config.selector_rank + config.selector_rank * H
    fc = matrix(len(config.target_layer_ids) * H, H)
    return one.times(config.num_layers) + fc + Params(half=tables + 2 * H)
