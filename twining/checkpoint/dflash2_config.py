"""config.json of a DFlash2 drafter as a frozen dataclass.

Source: spec/dflash2.md A.1 (values, resolution rules) and A.3 (what other drafters say). Keys of
the method live in dflash_config; a few may also stand at the top level. Nothing is guessed: block
size and tap layers have no default. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from twining.checkpoint.config_fields import MAX_LAYERS, Fields, shown
from twining.errors import CheckpointError

DFLASH2_ARCHITECTURE = "DFlash2DraftModel"

DraftLayerType = Literal["sliding", "full"]
_LAYER_TYPES = {"sliding_attention": "sliding", "full_attention": "full"}


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Config:
    """Sizes in values, window in tokens, layer ids zero-based."""

    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    sliding_window: int | None  # None only when no layer slides
    layer_types: tuple[DraftLayerType, ...]
    is_causal: tuple[bool, ...]  # per layer: do block rows see only earlier block rows
    vocab_size: int
    max_position_embeddings: int
    block_size: int  # anchor + drafts
    mask_token_id: int  # a row of the target's embedding
    target_layer_ids: tuple[int, ...]  # tap = state after that layer, in this order
    num_target_layers: int | None
    conv_kernel: int
    conv_group: int
    selector_rank: int
    selector_top_k: int
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float  # 0 = off


def parse_dflash2(config: Mapping[str, Any]) -> DFlash2Config:
    """Parse a DFlash2 drafter's config. Raises CheckpointError naming key, value and need."""
    top = Fields(config)
    names = config.get("architectures")
    if not isinstance(names, list) or DFLASH2_ARCHITECTURE not in names:
        raise CheckpointError(
            f"config.json: architectures is {shown(names)};"
            f" a drafter must be {DFLASH2_ARCHITECTURE}"
        )
    method = top.nested("dflash_config")
    if method is None:
        raise top.refuse("dflash_config", "it holds block size, mask id and tap layers")
    _refuse_unsupported(top, method)
    hidden = top.integer("hidden_size")
    vocab = top.integer("vocab_size")
    num_layers = top.integer("num_hidden_layers", high=MAX_LAYERS)
    num_heads = top.integer("num_attention_heads", high=4096)
    num_kv_heads = top.integer("num_key_value_heads", high=4096)
    head_dim = top.integer("head_dim", low=2, high=65536)
    if num_heads % num_kv_heads:
        raise top.refuse("num_key_value_heads", f"it must divide num_attention_heads={num_heads}")
    if head_dim % 2:
        raise top.refuse("head_dim", "an even number is needed for the rotation")
    group = method.integer("conv_group_size")
    if hidden % group:
        raise method.refuse("conv_group_size", f"it must divide hidden_size={hidden}")
    layer_types = _layer_types(top, num_layers)
    num_target_layers = top.optional_integer("num_target_layers", low=1, high=MAX_LAYERS)
    last_tap = (num_target_layers or MAX_LAYERS) - 1
    return DFlash2Config(
        hidden_size=hidden,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=top.integer("intermediate_size"),
        rms_norm_eps=top.number("rms_norm_eps", high=1.0),
        rope_theta=_rope_theta(top),
        sliding_window=_sliding_window(top, layer_types),
        layer_types=layer_types,
        is_causal=_causality(top, method, layer_types),
        vocab_size=vocab,
        max_position_embeddings=top.integer(
            "max_position_embeddings", high=1 << 30, default=1 << 20
        ),
        block_size=_either(method, top, "block_size").integer("block_size", low=2, high=256),
        mask_token_id=method.integer("mask_token_id", low=0, high=vocab - 1),
        target_layer_ids=method.integers("target_layer_ids", high=last_tap),
        num_target_layers=num_target_layers,
        conv_kernel=method.integer("conv_kernel_size", high=64),
        conv_group=group,
        selector_rank=method.integer("selector_rank", high=65536),
        selector_top_k=method.integer("selector_top_k", high=min(vocab, 4096)),
        input_embedding_scale=_scale(method, top, "input_embedding_scale", 1.0),
        output_multiplier=_scale(method, top, "output_multiplier", 1.0),
        final_logit_softcapping=_scale(method, top, "final_logit_softcapping", 0.0),
    )


def _either(first: Fields, second: Fields, key: str) -> Fields:
    """The object that holds the key: the first one that does, else the first."""
    return second if key not in first and key in second else first


def _scale(method: Fields, top: Fields, key: str, default: float) -> float:
    return _either(method, top, key).number(key, low=0.0, default=default)


def _refuse_unsupported(top: Fields, method: Fields) -> None:
    """Options of other drafters of the family that this engine does not run."""
    top.only("hidden_act", "silu")
    top.only("attention_bias", False)
    for holder in (method, top):
        holder.only("tap_shift", 0)
        holder.only("sample_from_anchor", False)
        holder.only("attention_sink_bias", False)
        holder.only("attention_value_scale", 1, 1.0)
        holder.only("use_swa", True)


def _layer_types(top: Fields, num_layers: int) -> tuple[DraftLayerType, ...]:
    words = top.words("layer_types", _LAYER_TYPES, num_layers)
    return cast(tuple[DraftLayerType, ...], words)


def _sliding_window(top: Fields, layer_types: tuple[DraftLayerType, ...]) -> int | None:
    if "sliding" not in layer_types:
        return None
    top.only("use_sliding_window", True)
    return top.integer("sliding_window", high=1 << 30)


def _causality(
    top: Fields, method: Fields, layer_types: tuple[DraftLayerType, ...]
) -> tuple[bool, ...]:
    """Order of A.1: top-level is_causal, dflash_config's is_causal or causal, else if sliding."""
    for holder, key in ((top, "is_causal"), (method, "is_causal"), (method, "causal")):
        if key in holder:
            return (holder.boolean(key),) * len(layer_types)
    return tuple(kind == "sliding" for kind in layer_types)


def _rope_theta(top: Fields) -> float:
    """theta from rope_parameters, or the older top-level key; only the unscaled rotation."""
    rope = top.nested("rope_parameters")
    top.only("rope_scaling")
    if rope is None:
        return top.number("rope_theta", low=1.0, high=1e12)
    rope.only("rope_type", "default")
    holder = _either(rope, top, "rope_theta")
    return holder.number("rope_theta", low=1.0, high=1e12)
