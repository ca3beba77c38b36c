"""Builders of miniature source checkpoints (original naming) for conversion tests."""

import json
from pathlib import Path
from typing import Any

import torch

from twining.checkpoint.writer import write_safetensors

H, HEADS, HEAD_DIM, VOCAB = 64, 2, 32, 96
KDA = HEADS * HEAD_DIM


def config(**changes: Any) -> dict[str, Any]:
    """Two trunk layers (KDA + dense, MLA + sparse with 2 experts), an MTP block, no vision."""
    text = {
        "model_type": "glm5_next_text",
        "attention_bias": False,
        "eos_token_id": [1],
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 4,
        "head_dim": 0,
        "hidden_act": "silu",
        "hidden_size": H,
        "index_head_dim": 32,
        "index_kpool": 4,
        "index_kpool_always_select_tail": True,
        "index_kpool_compress": True,
        "index_n_heads": 2,
        "index_topk": 8,
        "indexer_types": ["full", "full"],
        "intermediate_size": 100,
        "kv_lora_rank": 32,
        "layer_types": ["linear_attention", "deepseek_sparse_attention"],
        "linear_attn_config": {
            "gate_lower_bound": -5.0,
            "head_dim": HEAD_DIM,
            "num_heads": HEADS,
            "short_conv_kernel_size": 4,
        },
        "max_position_embeddings": 512,
        "mhc": True,
        "mla_use_nope": True,
        "mlp_layer_types": ["dense", "sparse"],
        "moe_intermediate_size": 48,
        "n_group": 1,
        "n_routed_experts": 2,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 2,
        "num_experts_per_tok": 1,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_nextn_predict_layers": 1,
        "pad_token_id": 0,
        "q_lora_rank": 40,
        "qk_head_dim": 32,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 0,
        "rms_norm_eps": 1e-5,
        "routed_scaling_factor": 2.5,
        "scoring_func": "sigmoid",
        "swiglu_limit": 10.0,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "v_head_dim": 32,
        "vocab_size": VOCAB,
    }
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": text | changes,
        "tie_word_embeddings": False,
    }


def _mla(t: dict[str, tuple[int, ...]], layer: str) -> None:
    attn = f"{layer}self_attn."
    t |= {
        f"{attn}q_a_proj.weight": (40, H),
        f"{attn}q_a_layernorm.weight": (40,),
        f"{attn}q_b_proj.weight": (64, 40),
        f"{attn}kv_a_proj_with_mqa.weight": (32, H),
        f"{attn}kv_a_layernorm.weight": (32,),
        f"{attn}kv_b_proj.weight": (128, 32),
        f"{attn}o_proj.weight": (H, 64),
        f"{attn}indexer.wq_b.weight": (64, 40),
        f"{attn}indexer.wk.weight": (32, H),
        f"{attn}indexer.k_norm.weight": (32,),
        f"{attn}indexer.k_norm.bias": (32,),
        f"{attn}indexer.weights_proj.weight": (2, H),
        f"{attn}indexer.index_kpool_compress_gate": (32, H),
        f"{attn}indexer.index_kpool_compress_ape": (4, 32),
    }


def _moe(t: dict[str, tuple[int, ...]], layer: str) -> None:
    mlp = f"{layer}mlp."
    t |= {f"{mlp}gate.weight": (2, H), f"{mlp}gate.e_score_correction_bias": (2,)}
    for expert in ("experts.0.", "experts.1.", "shared_experts."):
        _swiglu(t, mlp + expert, 48)


def _swiglu(t: dict[str, tuple[int, ...]], prefix: str, width: int) -> None:
    t |= {
        f"{prefix}gate_proj.weight": (width, H),
        f"{prefix}up_proj.weight": (width, H),
        f"{prefix}down_proj.weight": (H, width),
    }


def shapes() -> dict[str, tuple[int, ...]]:
    text = "model.language_model."
    t: dict[str, tuple[int, ...]] = {
        f"{text}embed_tokens.weight": (VOCAB, H),
        f"{text}norm.weight": (H,),
        "lm_head.weight": (VOCAB, H),
    }
    for i in range(3):
        layer = f"{text}layers.{i}."
        t |= {f"{layer}{n}_layernorm.weight": (H,) for n in ("input", "post_attention")}
        for site in ("attn", "ffn") if i < 2 else ():
            t |= {
                f"{layer}hc_{site}_fn": (24, 4 * H),
                f"{layer}hc_{site}_base": (24,),
                f"{layer}hc_{site}_scale": (3,),
            }
        if i > 0:
            _mla(t, layer)
            _moe(t, layer)
    attn = f"{text}layers.0.self_attn."
    for x in "qkv":
        t |= {f"{attn}{x}_proj.weight": (KDA, H), f"{attn}{x}_conv1d.weight": (KDA, 1, 4)}
    t |= {
        f"{attn}f_a_proj.weight": (HEAD_DIM, H),
        f"{attn}f_b_proj.weight": (KDA, HEAD_DIM),
        f"{attn}g_a_proj.weight": (HEAD_DIM, H),
        f"{attn}g_b_proj.weight": (KDA, HEAD_DIM),
        f"{attn}b_proj.weight": (HEADS, H),
        f"{attn}A_log": (HEADS,),
        f"{attn}dt_bias": (KDA,),
        f"{attn}o_norm.weight": (HEAD_DIM,),
        f"{attn}o_proj.weight": (H, KDA),
    }
    _swiglu(t, f"{text}layers.0.mlp.", 100)
    mtp = f"{text}layers.2."
    t |= {f"{mtp}{n}.weight": (H,) for n in ("enorm", "hnorm", "shared_head.norm")}
    return t | {f"{mtp}eh_proj.weight": (H, 2 * H)}


def model_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    fp32 = ("A_log", "dt_bias", "_base", "_scale", "correction_bias")
    return {
        name: (torch.randn(shape, generator=gen) * 0.05).to(
            torch.float32 if name.endswith(fp32) else torch.bfloat16
        )
        for name, shape in shapes().items()
    }


def write_source(folder: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    write_safetensors(folder, tensors, max_shard_bytes=100_000, metadata={})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "notes.bin").write_bytes(b"not copied")
    return folder
