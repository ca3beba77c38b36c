"""Configs of the published model and drafter, and the rates of known packs.

Source: spec/glm5_next.md 2.1, 2.2; spec/dflash2.md A.1; spec/performance.md 1.2. They let a
recipe be planned before anything is downloaded; a folder's own config and headers take precedence.
"""

from dataclasses import dataclass
from typing import Any, Final

from twining.checkpoint.dflash2_config import DFlash2Config, parse_dflash2
from twining.checkpoint.hf_config import Glm5NextConfig, parse_glm5_next

_TEXT: Final[dict[str, Any]] = {
    "model_type": "glm5_next_text",
    "hidden_size": 4096,
    "num_hidden_layers": 45,
    "vocab_size": 154880,
    "max_position_embeddings": 1048576,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "intermediate_size": 12288,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 288,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "swiglu_limit": 10.0,
    "layer_types": [
        "deepseek_sparse_attention" if i % 4 == 3 else "linear_attention" for i in range(45)
    ],
    "linear_attn_config": {
        "num_heads": 64,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
    },
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 256,
    "qk_rope_head_dim": 0,
    "qk_head_dim": 256,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "index_kpool": 4,
    "hc_mult": 4,
    "hc_eps": 1e-6,
    "hc_sinkhorn_iters": 20,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
    "eos_token_id": [154820, 154827, 154829],
    "pad_token_id": 154820,
}
_VISION: Final[dict[str, Any]] = {
    "depth": 24,
    "hidden_size": 1024,
    "num_heads": 16,
    "intermediate_size": 4096,
    "out_hidden_size": 4096,
    "projection_intermediate_size": 10240,
    "patch_size": 14,
    "temporal_patch_size": 2,
    "spatial_merge_size": 2,
    "in_channels": 3,
    "swiglu_limit": 10.0,
    "rms_norm_eps": 1e-5,
}
_DRAFTER: Final[dict[str, Any]] = {
    "architectures": ["DFlash2DraftModel"],
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
    "use_sliding_window": True,
    "is_causal": False,
    "vocab_size": 154880,
    "max_position_embeddings": 1048576,
    "num_target_layers": 45,
    "dflash_config": {
        "block_size": 8,
        "mask_token_id": 154856,
        "target_layer_ids": [5, 14, 24, 33, 42],
        "conv_kernel_size": 2,
        "conv_group_size": 16,
        "selector_rank": 256,
        "selector_top_k": 16,
    },
}


def glm_5_3_flash() -> Glm5NextConfig:
    """The published 320B model."""
    return parse_glm5_next(
        {
            "architectures": ["Glm5NextForConditionalGeneration"],
            "image_token_id": 154854,
            "text_config": _TEXT,
            "vision_config": _VISION,
        }
    )


def glm_5_3_flash_drafter() -> DFlash2Config:
    """Its published DFlash2 drafter."""
    return parse_dflash2(_DRAFTER)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Bits per weight by component; 16: not quantised."""

    kda: float
    mla: float
    dense: float
    experts: float
    shared: float
    head: float = 6.0
    mtp: float = 4.0
    vision: float = 6.0
    drafter: float = 16.0

    def of(self, component: str) -> float:
        """The rate of a component of params.layer; the indexer's matrix goes with its mixer."""
        rates = {
            "kda": self.kda,
            "mla": self.mla,
            "indexer": self.mla,
            "dense": self.dense,
            "experts": self.experts,
            "shared": self.shared,
        }
        return rates.get(component, 16.0)


_PACKS: Final = {
    3.05: Rates(kda=5, mla=5, dense=4, experts=3, shared=5),
    2.6: Rates(kda=4, mla=4, dense=3.5, experts=2.55, shared=4),
    16.0: Rates(kda=16, mla=16, dense=16, experts=16, shared=16, head=16, mtp=16, vision=16),
}


def rates_of(bits: float) -> Rates:
    """Rates of a known pack, or one rate for everything but the head."""
    found = _PACKS.get(round(bits, 2))
    if found is not None:
        return found
    return Rates(kda=bits, mla=bits, dense=bits, experts=bits, shared=bits, mtp=min(bits, 4.0))
