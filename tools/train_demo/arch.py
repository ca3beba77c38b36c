"""Shape of the demo model and of its drafter: one frozen dataclass each, and their `config.json`.

Every mechanism of glm5_next is present: 3:1 KDA:MLA layers, k-pool index small enough that prompts
beyond 260 tokens are sparse, 4 residual streams, 16 routed experts with a shared one, an MTP block.
"""

from dataclasses import dataclass
from typing import Any

VOCAB_SIZE = 8192
MARKER_BASE = 8156  # first of the 36 marker ids, <|endoftext|>
MASK_ID = MARKER_BASE + 1  # [MASK], the drafter's mask row
EOS_IDS = (
    MARKER_BASE,
    MARKER_BASE + 7,
    MARKER_BASE + 9,
)  # <|endoftext|>, <|user|>, <|observation|>


@dataclass(frozen=True, slots=True, kw_only=True)
class Arch:
    """Sizes of the target; names follow config.json."""

    hidden_size: int = 256
    layer_kinds: str = "KKKMKKKM"  # K = KDA, M = MLA
    num_dense: int = 2
    intermediate_size: int = 768
    moe_intermediate_size: int = 256
    num_experts: int = 16
    experts_per_token: int = 2
    kda_heads: int = 4
    kda_head_dim: int = 64
    conv_kernel: int = 4
    gate_lower_bound: float = -5.0
    num_heads: int = 4
    qk_head_dim: int = 64
    v_head_dim: int = 64
    q_lora_rank: int = 128
    kv_lora_rank: int = 128
    index_heads: int = 4
    index_head_dim: int = 32
    index_topk: int = 256
    index_pool: int = 4
    hc_mult: int = 4
    hc_iters: int = 6
    hc_eps: float = 1e-6
    rms_eps: float = 1e-5
    routed_scaling: float = 1.0
    swiglu_limit: float = 10.0
    vocab_size: int = VOCAB_SIZE
    max_positions: int = 16384

    @property
    def num_layers(self) -> int:
        return len(self.layer_kinds)

    def config(self) -> dict[str, Any]:
        """The checkpoint's config.json, named as in the published model (spec/glm5_next.md 2)."""
        kda = [i for i, kind in enumerate(self.layer_kinds) if kind == "K"]
        mla = [i for i, kind in enumerate(self.layer_kinds) if kind == "M"]
        n = self.num_layers
        text = {
            "model_type": "glm5_next_text",
            "hidden_size": self.hidden_size,
            "num_hidden_layers": n,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.rms_eps,
            "hidden_act": "silu",
            "intermediate_size": self.intermediate_size,
            "moe_intermediate_size": self.moe_intermediate_size,
            "n_routed_experts": self.num_experts,
            "num_experts_per_tok": self.experts_per_token,
            "n_shared_experts": 1,
            "first_k_dense_replace": self.num_dense,
            "mlp_layer_types": ["dense"] * self.num_dense + ["sparse"] * (n - self.num_dense),
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "norm_topk_prob": True,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": self.routed_scaling,
            "moe_router_dtype": "float32",
            "swiglu_limit": self.swiglu_limit,
            "layer_types": [
                "linear_attention" if kind == "K" else "deepseek_sparse_attention"
                for kind in self.layer_kinds
            ],
            "linear_attn_config": {
                "num_heads": self.kda_heads,
                "head_dim": self.kda_head_dim,
                "short_conv_kernel_size": self.conv_kernel,
                "gate_lower_bound": self.gate_lower_bound,
                "kda_layers": kda,
                "full_attn_layers": mla,
            },
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_heads,
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_head_dim,
            "qk_rope_head_dim": 0,
            "qk_head_dim": self.qk_head_dim,
            "v_head_dim": self.v_head_dim,
            "head_dim": 0,
            "mla_use_nope": True,
            "attention_bias": False,
            "index_n_heads": self.index_heads,
            "index_head_dim": self.index_head_dim,
            "index_topk": self.index_topk,
            "index_kpool": self.index_pool,
            "index_kpool_compress": True,
            "index_kpool_always_select_tail": True,
            "indexer_types": ["full"] * n,
            "mhc": True,
            "hc_mult": self.hc_mult,
            "hc_eps": self.hc_eps,
            "hc_sinkhorn_iters": self.hc_iters,
            "num_nextn_predict_layers": 1,
            "tie_word_embeddings": False,
            "eos_token_id": list(EOS_IDS),
            "pad_token_id": MARKER_BASE,
        }
        return {
            "architectures": ["Glm5NextForConditionalGeneration"],
            "model_type": "glm5_next",
            "text_config": text,
            "tie_word_embeddings": False,
            "image_start_token_id": MARKER_BASE + 10,
            "image_end_token_id": MARKER_BASE + 11,
            "video_start_token_id": MARKER_BASE + 12,
            "video_end_token_id": MARKER_BASE + 13,
            "image_token_id": MARKER_BASE + 34,
            "video_token_id": MARKER_BASE + 35,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterArch:
    """Sizes of the DFlash2 drafter (spec/dflash2.md A)."""

    hidden_size: int = 256
    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    intermediate_size: int = 512
    window: int = 512
    block: int = 8
    taps: tuple[int, ...] = (1, 4, 6)
    conv_kernel: int = 2
    conv_group: int = 16
    selector_rank: int = 32
    selector_top_k: int = 8

    def config(self, target: Arch) -> dict[str, Any]:
        """config.json of the drafter checkpoint."""
        return {
            "architectures": ["DFlash2DraftModel"],
            "model_type": "qwen3",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": target.rms_eps,
            "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
            "layer_types": ["sliding_attention"] * self.num_layers,
            "sliding_window": self.window,
            "use_sliding_window": True,
            "is_causal": False,
            "vocab_size": target.vocab_size,
            "max_position_embeddings": target.max_positions,
            "num_target_layers": target.num_layers,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "eos_token_id": list(EOS_IDS),
            "pad_token_id": MARKER_BASE,
            "dflash_config": {
                "block_size": self.block,
                "mask_token_id": MASK_ID,
                "target_layer_ids": list(self.taps),
                "conv_kernel_size": self.conv_kernel,
                "conv_group_size": self.conv_group,
                "selector_rank": self.selector_rank,
                "selector_top_k": self.selector_top_k,
            },
        }
