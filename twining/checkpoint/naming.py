"""Names of the model's tensors in every spelling a checkpoint may use. Pure logic on names.

Source: spec/glm5_next.md sections 3.1 (original), 3.3 (library-saved), 3.4, and spec/exl3.md 4.5,
4.7 (EXL3 packs). Spellings are recognised per item from the names present, because packs mix them;
where an item is absent the original spelling is returned, so that the "missing" message names it.

Two kinds of names: a *module* ("...q_proj") is read as a linear layer, its tensors being
module.weight or module.trellis and so on; a *tensor* ("...norm.weight") is a complete name.
"""

import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from twining.checkpoint.config_fields import shown
from twining.errors import CheckpointError

_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
_VISUAL_PREFIXES = ("model.visual.", "visual.")
_UNSUPPORTED = re.compile(r"\.rank\d+\.|\.shared_h\.|\.slice\.\d+\.")


@dataclass(frozen=True, slots=True)
class HyperNames:
    """One mHC site; three tensors."""

    fn: str
    base: str
    scale: str


@dataclass(frozen=True, slots=True)
class KdaNames:
    """One KDA mixer. qkv: modules, one fused (order q, k, v) or three; conv: tensors, likewise."""

    qkv: tuple[str, ...]
    conv: tuple[str, ...]
    f_a: str  # module
    f_b: str  # module
    g_a: str  # module
    g_b: str  # module
    b: str  # module
    o: str  # module
    a_log: str
    dt_bias: str
    o_norm: str


@dataclass(frozen=True, slots=True)
class MlaNames:
    """One MLA mixer without its indexer."""

    q_a: str  # module
    q_b: str  # module
    kv_a: str  # module
    kv_b: str  # module
    o: str  # module
    q_a_norm: str
    kv_a_norm: str


@dataclass(frozen=True, slots=True)
class IndexerNames:
    """The indexer of a `full` MLA layer. pool_gate and pool_ape are bare tensors."""

    wq_b: str  # module
    wk: str  # module
    weights: str  # module
    k_norm_weight: str
    k_norm_bias: str
    pool_gate: str
    pool_ape: str


@dataclass(frozen=True, slots=True)
class MlpNames:
    """A SwiGLU MLP: three modules."""

    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True)
class MoeNames:
    """A sparse MLP. Experts are modules of their own, or two stacked tensors, never both.

    stacked_gate_up [experts, 2 * width, hidden] (gate rows first), stacked_down [experts, hidden,
    width]; None when the experts are split.
    """

    router: str  # module
    correction_bias: str
    experts: tuple[MlpNames, ...]
    stacked_gate_up: str | None
    stacked_down: str | None
    shared: MlpNames


@dataclass(frozen=True, slots=True)
class MtpNames:
    """What the MTP block has besides an MLA layer's norms, mixer and MLP."""

    enorm: str
    hnorm: str
    eh_proj: str  # module
    head_norm: str


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Finds the names of each part among the names present."""

    present: Collection[str]  # a mapping or a set: membership must be cheap
    text: str  # prefix of text tensors, with its dot
    visual: str | None  # prefix of vision tensors, with its dot; None without a tower

    @classmethod
    def find(cls, present: Collection[str]) -> "TensorNames":
        """Raises CheckpointError when no text model is found, or its layout is not supported."""
        for name in present:
            if _UNSUPPORTED.search(name):
                raise CheckpointError(
                    f"{shown(name)}: rank-sliced or sliced EXL3 tensors are not supported;"
                    " use a pack with whole matrices"
                )
        for prefix in _TEXT_PREFIXES:
            key = f"{prefix}embed_tokens"
            if f"{key}.weight" in present or f"{key}.trellis" in present:
                break
        else:
            raise CheckpointError(
                f"no embedding among {len(present)} tensors (expected"
                " model.language_model.embed_tokens.weight); incomplete or of another model"
            )
        visual = next(
            (v for v in _VISUAL_PREFIXES if any(name.startswith(v) for name in present)), None
        )
        return cls(present, prefix, visual)

    def has_module(self, module: str) -> bool:
        """Whether a linear layer of that name is stored, quantised or not."""
        return f"{module}.trellis" in self.present or f"{module}.weight" in self.present

    def _module(self, *spellings: str) -> str:
        return next((name for name in spellings if self.has_module(name)), spellings[0])

    def _tensor(self, *spellings: str) -> str:
        return next((name for name in spellings if name in self.present), spellings[0])

    @property
    def embed(self) -> str:
        return f"{self.text}embed_tokens.weight"

    @property
    def final_norm(self) -> str:
        return f"{self.text}norm.weight"

    @property
    def lm_head(self) -> str:
        """Module; absent from checkpoints with tied embeddings (see has_module)."""
        return self._module("lm_head", f"{self.text}lm_head", "language_model.lm_head")

    def layer(self, index: int) -> str:
        """Prefix of a layer, with its dot; the MTP block has index num_layers."""
        return f"{self.text}layers.{index}."

    def norms(self, index: int) -> tuple[str, str]:
        """Tensors: the norms before the mixer and before the MLP."""
        layer = self.layer(index)
        return f"{layer}input_layernorm.weight", f"{layer}post_attention_layernorm.weight"

    def hyper(self, index: int, site: str) -> HyperNames:
        """mHC of site "attn" or "ffn"."""
        layer = self.layer(index)
        parts = ("fn", "base", "scale")
        return HyperNames(
            *(self._tensor(f"{layer}hc_{site}_{p}", f"{layer}{site}_hc.{p}") for p in parts)
        )

    def kda(self, index: int) -> KdaNames:
        attn = f"{self.layer(index)}self_attn."
        fused_qkv, fused_conv = f"{attn}qkv_proj", f"{attn}conv1d.weight"
        split_qkv = tuple(f"{attn}{x}_proj" for x in "qkv")
        split_conv = tuple(f"{attn}{x}_conv1d.weight" for x in "qkv")

        def forget(name: str, suffix: str = "") -> str:
            plain, saved = f"{attn}{name}", f"{attn}forget_gate.{name}"
            return saved if f"{saved}{suffix}" in self.present else plain

        return KdaNames(
            qkv=(fused_qkv,) if self.has_module(fused_qkv) else split_qkv,
            conv=(fused_conv,) if fused_conv in self.present else split_conv,
            f_a=forget("f_a_proj", ".weight"),
            f_b=forget("f_b_proj", ".weight"),
            g_a=f"{attn}g_a_proj",
            g_b=f"{attn}g_b_proj",
            b=f"{attn}b_proj",
            o=f"{attn}o_proj",
            a_log=forget("A_log"),
            dt_bias=forget("dt_bias"),
            o_norm=f"{attn}o_norm.weight",
        )

    def mla(self, index: int) -> MlaNames:
        attn = f"{self.layer(index)}self_attn."
        return MlaNames(
            q_a=f"{attn}q_a_proj",
            q_b=f"{attn}q_b_proj",
            kv_a=self._module(f"{attn}kv_a_proj_with_mqa", f"{attn}kv_a_proj"),
            kv_b=f"{attn}kv_b_proj",
            o=f"{attn}o_proj",
            q_a_norm=f"{attn}q_a_layernorm.weight",
            kv_a_norm=f"{attn}kv_a_layernorm.weight",
        )

    def indexer(self, index: int) -> IndexerNames:
        indexer = f"{self.layer(index)}self_attn.indexer."
        gate, ape = (f"{indexer}index_kpool_compress_{part}" for part in ("gate", "ape"))
        return IndexerNames(
            wq_b=f"{indexer}wq_b",
            wk=f"{indexer}wk",
            weights=f"{indexer}weights_proj",
            k_norm_weight=f"{indexer}k_norm.weight",
            k_norm_bias=f"{indexer}k_norm.bias",
            pool_gate=self._tensor(gate, f"{gate}.weight"),
            pool_ape=self._tensor(ape, f"{ape}.weight"),
        )

    def mlp(self, index: int) -> MlpNames:
        """The dense MLP of a layer."""
        return _mlp(f"{self.layer(index)}mlp.")

    def moe(self, index: int, num_experts: int) -> MoeNames:
        mlp = f"{self.layer(index)}mlp."
        gate_up = self._tensor(f"{mlp}experts.gate_up_proj", f"{mlp}experts.gate_up_proj.weight")
        down = self._tensor(f"{mlp}experts.down_proj", f"{mlp}experts.down_proj.weight")
        stacked = gate_up in self.present
        split = () if stacked else tuple(_mlp(f"{mlp}experts.{e}.") for e in range(num_experts))
        return MoeNames(
            router=f"{mlp}gate",
            correction_bias=f"{mlp}gate.e_score_correction_bias",
            experts=split,
            stacked_gate_up=gate_up if stacked else None,
            stacked_down=down if stacked else None,
            shared=_mlp(f"{mlp}shared_experts."),
        )

    def mtp(self, index: int) -> MtpNames:
        """The MTP block's own parts; index is num_layers (+ block number)."""
        layer = self.layer(index)
        return MtpNames(
            enorm=f"{layer}enorm.weight",
            hnorm=f"{layer}hnorm.weight",
            eh_proj=f"{layer}eh_proj",
            head_norm=f"{layer}shared_head.norm.weight",
        )

    def has_layer(self, index: int) -> bool:
        """Whether any tensor of that layer is present (a pack may lack the MTP block)."""
        return any(True for _ in self.under(self.layer(index)))

    def under(self, prefix: str) -> Iterator[str]:
        """All names that begin with a prefix."""
        return (name for name in self.present if name.startswith(prefix))


def _mlp(prefix: str) -> MlpNames:
    return MlpNames(f"{prefix}gate_proj", f"{prefix}up_proj", f"{prefix}down_proj")
