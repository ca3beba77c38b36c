"""The model's config.json as frozen dataclasses: GLM-5.3-Flash text and vision, DFlash2 drafters.

Source: spec/glm5_next.md section 2, spec/dflash2.md A.1. Both forms of a config are read: as
released (nested text_config, linear_attn_config) and as re-saved by the model library (flat
linear_* fields, other layer names). No value is taken from a library's class defaults; what is
missing or unknown is refused with a CheckpointError naming key, value and need. No torch.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, cast

from twining.checkpoint.config_fields import MAX_LAYERS, Fields, shown
from twining.checkpoint.dflash2_config import DFLASH2_ARCHITECTURE, DFlash2Config, parse_dflash2
from twining.errors import CheckpointError

__all__ = [
    "DFLASH2_ARCHITECTURE",
    "DFlash2Config",
    "Glm5NextConfig",
    "VisionConfig",
    "architecture_of",
    "load_config",
    "parse_dflash2",
    "parse_glm5_next",
]

LayerType = Literal["kda", "mla"]
MlpType = Literal["dense", "sparse"]
IndexerType = Literal["full", "shared"]

GLM5_NEXT_ARCHITECTURE = "Glm5NextForConditionalGeneration"
_GLM5_NEXT_NAMES = ("Glm5NextForConditionalGeneration", "Glm5NextForCausalLM")
_GLM5_NEXT_TYPES = ("glm5_next", "glm5_next_text")
_MAX_CONFIG_BYTES = 16 << 20

_LAYER_TYPES = {
    "linear_attention": "kda",
    "deepseek_sparse_attention": "mla",
    "indexed_attention": "mla",
    "full_attention": "mla",
}
_MLP_TYPES = {"dense": "dense", "sparse": "sparse"}
_INDEXER_TYPES = {"full": "full", "shared": "shared"}
_PATTERN_LETTERS = {"F": "full", "S": "shared"}

# (depth, hidden_size, num_heads, intermediate_size, out_hidden_size) of the published tower.
_RELEASED_TOWER = (24, 1024, 16, 4096, 4096)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The vision tower (spec section 2.2). Widths in values, image sizes in pixels."""

    depth: int
    hidden_size: int
    num_heads: int
    intermediate_size: int
    out_hidden_size: int
    projection_intermediate_size: int
    patch_size: int
    temporal_patch_size: int
    spatial_merge_size: int
    in_channels: int
    swiglu_limit: float
    rms_norm_eps: float  # q_norm, k_norm, post_layernorm
    block_norm_eps: float  # norm1 and norm2; see _vision

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Values per patch row of pixel_values: channels x frames x rows x columns."""
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Glm5NextConfig:
    """The text model (spec section 2.1) and what the outer config adds to it."""

    hidden_size: int
    num_layers: int  # trunk layers; the MTP block is layer num_layers in tensor names
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    intermediate_size: int
    moe_intermediate_size: int
    num_experts: int
    num_experts_per_tok: int
    num_shared_experts: int
    mlp_types: tuple[MlpType, ...]
    routed_scaling_factor: float
    norm_topk_prob: bool
    swiglu_limit: float
    layer_types: tuple[LayerType, ...]
    indexer_types: tuple[IndexerType, ...]  # meaningful for MLA layers only
    kda_heads: int
    kda_head_dim: int
    conv_kernel: int
    gate_lower_bound: float | None  # None: the softplus gate
    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_head_dim: int
    v_head_dim: int
    index_heads: int
    index_head_dim: int
    index_topk: int  # tokens
    index_pool: int  # tokens per pool
    hc_mult: int
    hc_eps: float
    hc_iters: int
    num_mtp_layers: int
    tie_word_embeddings: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    image_token_id: int | None
    image_start_token_id: int | None
    image_end_token_id: int | None
    video_token_id: int | None
    video_start_token_id: int | None
    video_end_token_id: int | None
    vision: VisionConfig | None
    quantization: dict[str, Any] | None

    @property
    def kda_layers(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.layer_types) if t == "kda")

    @property
    def mla_layers(self) -> tuple[int, ...]:
        return tuple(i for i, t in enumerate(self.layer_types) if t == "mla")

    @property
    def kda_width(self) -> int:
        """Width of each of q, k and v in a KDA layer."""
        return self.kda_heads * self.kda_head_dim


def architecture_of(config: Mapping[str, object]) -> str:
    """The architecture name a config declares, or its model_type, or '(none)'."""
    names = config.get("architectures")
    if isinstance(names, list) and names and isinstance(names[0], str):
        return names[0]
    kind = config.get("model_type")
    return kind if isinstance(kind, str) else "(none)"


def load_config(folder: Path) -> dict[str, Any]:
    """Read folder/config.json. Raises CheckpointError when absent, too large or not an object."""
    return load_json(folder / "config.json")


def load_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of at most 16 MiB from a model folder. Raises CheckpointError."""
    try:
        size = path.stat().st_size
        if size > _MAX_CONFIG_BYTES or not path.is_file():
            raise CheckpointError(f"{path}: not a file of at most 16 MiB; check the folder")
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path.parent}: no {path.name}; point to a model folder") from None
    except OSError as err:
        raise CheckpointError(f"{path}: {err.strerror}; check the folder's permissions") from None
    except (ValueError, RecursionError):
        raise CheckpointError(f"{path}: not valid JSON; download it again") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: {shown(config)} is not an object; download it again")
    return config


def parse_glm5_next(config: Mapping[str, Any]) -> Glm5NextConfig:
    """Parse a GLM-5.3-Flash-class config. Raises CheckpointError as spec section 2.3 asks."""
    outer = Fields(config)
    name = architecture_of(config)
    if name not in _GLM5_NEXT_NAMES and config.get("model_type") not in _GLM5_NEXT_TYPES:
        raise CheckpointError(
            f"config.json: architecture {shown(name)} is not supported; this engine runs"
            f" {GLM5_NEXT_ARCHITECTURE} with {DFLASH2_ARCHITECTURE} drafters"
        )
    text = outer.nested("text_config") or outer
    _refuse_unsupported(text)
    hidden = text.integer("hidden_size")
    vocab = text.integer("vocab_size")
    num_layers = text.integer("num_hidden_layers", high=MAX_LAYERS)
    layer_types = text.words("layer_types", _LAYER_TYPES, num_layers)
    num_heads = text.integer("num_attention_heads", high=4096)
    text.only("num_key_value_heads", num_heads)
    num_experts = text.integer("n_routed_experts", high=65536)
    shared_tie = text.boolean("tie_word_embeddings", default=False)
    return Glm5NextConfig(
        hidden_size=hidden,
        num_layers=num_layers,
        vocab_size=vocab,
        max_position_embeddings=text.integer("max_position_embeddings", high=1 << 30),
        rms_norm_eps=text.number("rms_norm_eps", high=1.0),
        intermediate_size=text.integer("intermediate_size"),
        moe_intermediate_size=text.integer("moe_intermediate_size"),
        num_experts=num_experts,
        num_experts_per_tok=text.integer("num_experts_per_tok", high=num_experts),
        num_shared_experts=text.integer("n_shared_experts", low=0, high=64),
        mlp_types=_mlp_types(text, num_layers),
        routed_scaling_factor=text.number("routed_scaling_factor"),
        norm_topk_prob=text.boolean("norm_topk_prob"),
        swiglu_limit=text.number("swiglu_limit"),
        layer_types=cast(tuple[LayerType, ...], layer_types),
        indexer_types=_indexer_types(text, layer_types),
        **_kda(text),
        num_heads=num_heads,
        q_lora_rank=text.integer("q_lora_rank"),
        kv_lora_rank=text.integer("kv_lora_rank"),
        qk_head_dim=_qk_head_dim(text),
        v_head_dim=text.integer("v_head_dim"),
        **_indexer(text),
        hc_mult=text.integer("hc_mult", high=64),
        hc_eps=text.number("hc_eps", high=1.0),
        hc_iters=text.integer("hc_sinkhorn_iters", high=1000),
        num_mtp_layers=text.integer("num_nextn_predict_layers", low=0, high=16, default=0),
        # A converter that unties the head says so at the top level only.
        tie_word_embeddings=outer.boolean("tie_word_embeddings", default=shared_tie),
        **_token_ids(outer, text, vocab),
        vision=_vision(outer, hidden),
        quantization=_quantization(outer, text),
    )


def _refuse_unsupported(text: Fields) -> None:
    """Values that would change the arithmetic in ways this engine does not implement."""
    text.only("qk_rope_head_dim", 0)
    text.only("hidden_act", "silu")
    text.only("attention_bias", False)
    text.only("mla_use_nope", True)
    text.only("mhc", True)
    text.only("index_kpool_compress", True)
    text.only("index_kpool_always_select_tail", True)
    text.only("n_group", 1)
    text.only("topk_group", 1)
    text.only("scoring_func", "sigmoid")
    text.only("topk_method", "noaux_tc")
    text.only("moe_router_dtype", "float32")


def _mlp_types(text: Fields, num_layers: int) -> tuple[MlpType, ...]:
    if "mlp_layer_types" in text:
        words = text.words("mlp_layer_types", _MLP_TYPES, num_layers)
    else:
        dense = text.integer("first_k_dense_replace", low=0, high=MAX_LAYERS, default=3)
        words = tuple("dense" if i < dense else "sparse" for i in range(num_layers))
    return cast(tuple[MlpType, ...], words)


def _indexer_types(text: Fields, layer_types: tuple[str, ...]) -> tuple[IndexerType, ...]:
    """Section 2.3 rule 4. The first MLA layer must be full: there is nothing before it to share."""
    key = "indexer_types"
    if key in text:
        words = text.words(key, _INDEXER_TYPES, len(layer_types))
    elif "index_topk_pattern" in text:
        key = "index_topk_pattern"
        letters = list(text.string(key))
        words = Fields({key: letters}, text.where).words(key, _PATTERN_LETTERS, len(layer_types))
    elif "index_topk_freq" in text and text.integer("index_topk_freq") != 1:
        raise text.refuse("index_topk_freq", "give indexer_types, one of full or shared per layer")
    else:
        words = ("full",) * len(layer_types)
    first = next((i for i, kind in enumerate(layer_types) if kind == "mla"), None)
    if first is not None and words[first] != "full":
        raise CheckpointError(
            f"config.json: {text.path(key)}[{first}] is shared, but no full layer precedes it;"
            " the first attention layer must be full"
        )
    return cast(tuple[IndexerType, ...], words)


def _kda(text: Fields) -> dict[str, Any]:
    """KDA sizes, from linear_attn_config or the flat fields (section 2.3 rule 2)."""
    nested = text.nested("linear_attn_config")
    names = ("num_heads", "head_dim", "short_conv_kernel_size", "gate_lower_bound")
    if nested is None:
        nested = text
        names = (
            "linear_num_heads",
            "linear_head_dim",
            "linear_conv_kernel_dim",
            "linear_lower_bound",
        )
    heads, dim, kernel, bound = names
    lower: float | None = None
    if bound in nested:
        lower = nested.number(bound, low=-100.0, high=-1e-6)
    elif nested.boolean("safe_gate", default=False):
        raise nested.refuse(bound, "safe_gate is set, so a negative bound is needed")
    return {
        "kda_heads": nested.integer(heads, high=4096),
        "kda_head_dim": nested.integer(dim, high=65536),
        "conv_kernel": nested.integer(kernel, low=2, high=64),
        "gate_lower_bound": lower,
    }


def _qk_head_dim(text: Fields) -> int:
    nope = text.integer("qk_nope_head_dim", high=65536)
    text.only("qk_head_dim", nope)
    return nope


def _indexer(text: Fields) -> dict[str, Any]:
    pool = text.integer("index_kpool", high=64)
    topk = text.integer("index_topk", high=1 << 20)
    if topk % pool:
        raise text.refuse("index_topk", f"a multiple of index_kpool={pool} is needed")
    return {
        "index_heads": text.integer("index_n_heads", high=4096),
        "index_head_dim": text.integer("index_head_dim", high=65536),
        "index_topk": topk,
        "index_pool": pool,
    }


def _token_ids(outer: Fields, text: Fields, vocab: int) -> dict[str, Any]:
    """Special token ids; each must be a row of the embedding."""
    last = vocab - 1
    holder = text if "eos_token_id" in text else outer
    pad = text if "pad_token_id" in text else outer
    ids: dict[str, Any] = {
        "eos_token_ids": holder.integers("eos_token_id", high=last),
        "pad_token_id": pad.optional_integer("pad_token_id", high=last),
    }
    for kind in ("image", "video"):
        for part in ("", "_start", "_end"):
            key = f"{kind}{part}_token_id"
            ids[key] = outer.optional_integer(key, high=last)
    if "vision_config" in outer:
        outer.integer("image_token_id", low=0, high=last)
    return ids


def _vision(outer: Fields, hidden: int) -> VisionConfig | None:
    vision = outer.nested("vision_config")
    if vision is None:
        return None
    for key, value in (
        ("hidden_act", "silu"),
        ("attention_bias", True),
        ("spatial_merge_size", 2),
        ("temporal_patch_size", 2),
        ("in_channels", 3),
        ("out_hidden_size", hidden),
    ):
        vision.only(key, value)
    eps = vision.number("rms_norm_eps", high=1.0)
    config = VisionConfig(
        depth=vision.integer("depth", high=MAX_LAYERS),
        hidden_size=vision.integer("hidden_size"),
        num_heads=vision.integer("num_heads", high=4096),
        intermediate_size=vision.integer("intermediate_size"),
        out_hidden_size=vision.integer("out_hidden_size"),
        projection_intermediate_size=vision.integer("projection_intermediate_size"),
        patch_size=vision.integer("patch_size", high=256),
        temporal_patch_size=vision.integer("temporal_patch_size"),
        spatial_merge_size=vision.integer("spatial_merge_size"),
        in_channels=vision.integer("in_channels"),
        swiglu_limit=vision.number("swiglu_limit"),
        rms_norm_eps=eps,
        block_norm_eps=eps,
    )
    if config.hidden_size % (4 * config.num_heads):
        raise vision.refuse(
            "num_heads", f"it must cut hidden_size={config.hidden_size} into multiples of 4"
        )
    tower = (
        config.depth,
        config.hidden_size,
        config.num_heads,
        config.intermediate_size,
        config.out_hidden_size,
    )
    if tower != _RELEASED_TOWER:
        return config
    # The published tower was trained with 1e-6 in its block norms although its config says 1e-5
    # (spec section 12.6); any other tower keeps what its config says.
    return replace(config, block_norm_eps=1e-6)


def _quantization(outer: Fields, text: Fields) -> dict[str, Any] | None:
    """The quantization_config as given. Tensors decide the format per module; this is advisory,
    but a method whose tensors this engine cannot read is refused here, by name."""
    holder = outer if "quantization_config" in outer else text
    found = holder.nested("quantization_config")
    if found is None:
        return None
    method = found.data.get("quant_method")
    if method not in ("exl3", "fp8"):
        raise found.refuse("quant_method", "use an exl3 pack, an fp8 or an unquantised checkpoint")
    return dict(found.data)
