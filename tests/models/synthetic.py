"""Small random models of the architecture, written as checkpoints in the original spelling."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twining.checkpoint.hf_config import parse_glm5_next
from twining.checkpoint.reader import Checkpoint
from twining.checkpoint.writer import write_safetensors
from twining.models.glm5_next.model import Glm5Next

PREFIX = "model.language_model."
# Widths are odd multiples where the architecture allows it; the indexer is sparse from 35 tokens.
SMALL: dict[str, Any] = {
    "hidden_size": 96,
    "vocab_size": 203,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-4,
    "intermediate_size": 80,
    "moe_intermediate_size": 48,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "swiglu_limit": 2.0,
    "layer_types": "KMKMM",
    "mlp_layer_types": "DSSSS",
    "indexer_types": "FFFSF",
    "kda_heads": 3,
    "kda_head_dim": 32,
    "num_attention_heads": 3,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "v_head_dim": 40,
    "index_n_heads": 3,
    "index_head_dim": 32,
    "index_topk": 32,
    "index_kpool": 4,
    "hc_mult": 4,
    "hc_eps": 1e-5,
    "hc_sinkhorn_iters": 6,
    "num_nextn_predict_layers": 1,
}
# The shape of the bundled demo model, for speed measurements.
DEMO: dict[str, Any] = SMALL | {
    "hidden_size": 256, "vocab_size": 8192, "intermediate_size": 768, "moe_intermediate_size": 256,
    "n_routed_experts": 16, "layer_types": "KKKMKKKM", "mlp_layer_types": "DSSSSSSS",
    "indexer_types": "FFFFFFFF", "kda_heads": 4, "kda_head_dim": 64, "num_attention_heads": 4,
    "q_lora_rank": 128, "kv_lora_rank": 64, "qk_nope_head_dim": 64, "v_head_dim": 64,
    "index_n_heads": 4, "index_head_dim": 64, "index_topk": 256, "hc_sinkhorn_iters": 20,
}  # fmt: skip


def config_dict(sizes: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a size table."""
    text = dict(sizes)
    num = len(sizes["layer_types"])
    words = {"K": "linear_attention", "M": "deepseek_sparse_attention"}
    text["layer_types"] = [words[c] for c in sizes["layer_types"]]
    text["mlp_layer_types"] = [{"D": "dense", "S": "sparse"}[c] for c in sizes["mlp_layer_types"]]
    text["indexer_types"] = [{"F": "full", "S": "shared"}[c] for c in sizes["indexer_types"]]
    text["linear_attn_config"] = {
        "num_heads": text.pop("kda_heads"),
        "head_dim": text.pop("kda_head_dim"),
        "short_conv_kernel_size": 4,
        "gate_lower_bound": -5.0,
    }
    text |= {
        "model_type": "glm5_next_text",
        "hidden_act": "silu",
        "num_hidden_layers": num,
        "num_key_value_heads": sizes["num_attention_heads"],
        "qk_rope_head_dim": 0,
        "qk_head_dim": sizes["qk_nope_head_dim"],
        "mla_use_nope": True,
        "attention_bias": False,
        "index_kpool_compress": True,
        "index_kpool_always_select_tail": True,
        "mhc": True,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_router_dtype": "float32",
        "tie_word_embeddings": False,
        "eos_token_id": [1],
        "pad_token_id": 0,
    }
    return {
        "architectures": ["Glm5NextForConditionalGeneration"],
        "model_type": "glm5_next",
        "text_config": text,
    }


class _Random:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.out: dict[str, Tensor] = {}

    def add(self, name: str, *shape: int, scale: float = 1.0, shift: float = 0.0) -> None:
        value = torch.randn(shape, generator=self.generator) * scale + shift
        self.out[name] = value

    def linear(self, name: str, out: int, inp: int, gain: float = 1.0) -> None:
        self.add(f"{name}.weight", out, inp, scale=gain * inp**-0.5)


def random_tensors(sizes: dict[str, Any], seed: int) -> dict[str, Tensor]:
    """All text tensors, fan-in scaled so that activations and logits stay of order one."""
    r = _Random(seed)
    H, V = sizes["hidden_size"], sizes["vocab_size"]
    r.add(f"{PREFIX}embed_tokens.weight", V, H)
    r.linear("lm_head", V, H, 2.0)
    r.add(f"{PREFIX}norm.weight", H, scale=0.1, shift=1.0)
    num = len(sizes["layer_types"])
    for i in range(num + sizes["num_nextn_predict_layers"]):
        layer, mtp = f"{PREFIX}layers.{i}.", i >= num
        for norm in ("input_layernorm", "post_attention_layernorm"):
            r.add(f"{layer}{norm}.weight", H, scale=0.1, shift=1.0)
        if mtp:
            for norm in ("enorm", "hnorm", "shared_head.norm"):
                r.add(f"{layer}{norm}.weight", H, scale=0.1, shift=1.0)
            r.linear(f"{layer}eh_proj", H, 2 * H)
        else:
            _hyper(r, layer, sizes)
        if not mtp and sizes["layer_types"][i] == "K":
            _kda(r, f"{layer}self_attn.", sizes)
        else:
            _mla(r, f"{layer}self_attn.", sizes, mtp or sizes["indexer_types"][i] == "F")
        _mlp(r, f"{layer}mlp.", sizes, mtp or sizes["mlp_layer_types"][i] == "S")
    return r.out


def _hyper(r: _Random, layer: str, sizes: dict[str, Any]) -> None:
    N = sizes["hc_mult"]
    for site in ("attn", "ffn"):
        num = N * (N + 2)
        r.add(f"{layer}hc_{site}_fn", num, N * sizes["hidden_size"], scale=0.03)
        r.add(f"{layer}hc_{site}_base", num)
        r.add(f"{layer}hc_{site}_scale", 3, scale=0.2, shift=1.0)


def _kda(r: _Random, attn: str, sizes: dict[str, Any]) -> None:
    H, A, D = sizes["hidden_size"], sizes["kda_heads"], sizes["kda_head_dim"]
    for x in "qkv":
        r.linear(f"{attn}{x}_proj", A * D, H)
        r.add(f"{attn}{x}_conv1d.weight", A * D, 1, 4, scale=0.5)
    for x in "fg":
        r.linear(f"{attn}{x}_a_proj", D, H)
        r.linear(f"{attn}{x}_b_proj", A * D, D)
    r.linear(f"{attn}b_proj", A, H)
    r.add(f"{attn}A_log", A, scale=0.3)
    r.add(f"{attn}dt_bias", A * D, shift=-1.0)
    r.add(f"{attn}o_norm.weight", D, scale=0.1, shift=1.0)
    r.linear(f"{attn}o_proj", H, A * D)


def _mla(r: _Random, attn: str, sizes: dict[str, Any], indexer: bool) -> None:
    H, A = sizes["hidden_size"], sizes["num_attention_heads"]
    rank, width = sizes["q_lora_rank"], sizes["kv_lora_rank"]
    dn, dv = sizes["qk_nope_head_dim"], sizes["v_head_dim"]
    r.linear(f"{attn}q_a_proj", rank, H)
    r.add(f"{attn}q_a_layernorm.weight", rank, scale=0.1, shift=1.0)
    r.linear(f"{attn}q_b_proj", A * dn, rank, 2.0)
    r.linear(f"{attn}kv_a_proj_with_mqa", width, H)
    r.add(f"{attn}kv_a_layernorm.weight", width, scale=0.1, shift=1.0)
    r.linear(f"{attn}kv_b_proj", A * (dn + dv), width)
    r.linear(f"{attn}o_proj", H, A * dv)
    if indexer:
        heads, dim = sizes["index_n_heads"], sizes["index_head_dim"]
        r.linear(f"{attn}indexer.wq_b", heads * dim, rank)
        r.linear(f"{attn}indexer.wk", dim, H)
        r.add(f"{attn}indexer.k_norm.weight", dim, scale=0.1, shift=1.0)
        r.add(f"{attn}indexer.k_norm.bias", dim, scale=0.1)
        r.linear(f"{attn}indexer.weights_proj", heads, H)
        r.add(f"{attn}indexer.index_kpool_compress_gate", dim, H, scale=H**-0.5)
        r.add(f"{attn}indexer.index_kpool_compress_ape", sizes["index_kpool"], dim)


def _mlp(r: _Random, mlp: str, sizes: dict[str, Any], sparse: bool) -> None:
    H = sizes["hidden_size"]

    def swiglu(prefix: str, width: int) -> None:
        r.linear(f"{prefix}gate_proj", width, H, 2.0)
        r.linear(f"{prefix}up_proj", width, H, 2.0)
        r.linear(f"{prefix}down_proj", H, width)

    if not sparse:
        swiglu(mlp, sizes["intermediate_size"])
        return
    num, width = sizes["n_routed_experts"], sizes["moe_intermediate_size"]
    r.linear(f"{mlp}gate", num, H)
    r.add(f"{mlp}gate.e_score_correction_bias", num, scale=0.2)
    for e in range(num):
        swiglu(f"{mlp}experts.{e}.", width)
    swiglu(f"{mlp}shared_experts.", width)


def write_model(folder: Path, sizes: dict[str, Any], tensors: dict[str, Tensor]) -> Checkpoint:
    """Write config and tensors; open the folder."""
    import json

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_dict(sizes)))
    write_safetensors(folder, tensors)
    return Checkpoint.open(folder)


def make_model(
    folder: Path, sizes: dict[str, Any] = SMALL, *, seed: int = 0, taps: tuple[int, ...] = ()
) -> Glm5Next:
    """A random model loaded through a checkpoint on disk."""
    ckpt = write_model(folder, sizes, random_tensors(sizes, seed))
    return Glm5Next.load(ckpt, parse_glm5_next(ckpt.config), tap_layers=taps)
