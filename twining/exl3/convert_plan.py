"""What becomes of every tensor of a source model when it is converted to EXL3. Names only.

Source: spec/exl3.md 4.5 (GLM-5.3-Flash packs), 4.6 and spec/dflash2.md H (drafters).
A linear job writes one module, quantised or in 16 bit, from one or more parts that are joined along
the outputs; a keep job writes one tensor as it is. Everything that no rule names is kept.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, field
from fnmatch import fnmatchcase

from twining.checkpoint.headers import TensorInfo
from twining.checkpoint.hf_config import Glm5NextConfig
from twining.checkpoint.naming import TensorNames
from twining.errors import CheckpointError, ConfigError

PLAIN = 16.0  # the "rate" of a module that is not quantised
_TEXT, _VISUAL = "model.language_model.", "model.visual."


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of a source linear. index: position in a stack of experts; rows: start, stop."""

    source: str
    index: int | None = None
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, slots=True)
class LinearJob:
    """One linear module of the pack.

    group: whose bits apply (text, head, mtp, vision, drafter, or plain: never quantised).
    plain_dtype: how an unquantised module is stored; None keeps the source's type.
    pad_outputs: an unquantised module gets zero rows up to a multiple of 128.
    """

    module: str
    parts: tuple[Part, ...]
    group: str
    plain_dtype: str | None = "F16"
    pad_outputs: bool = False


@dataclass(frozen=True, slots=True)
class KeepJob:
    """One tensor of the pack, copied; several sources are joined along dimension 0."""

    name: str
    sources: tuple[str, ...]
    dtype: str | None = None


@dataclass(slots=True)
class Plan:
    """All jobs, and the source tensors they account for."""

    linears: list[LinearJob] = field(default_factory=list)
    keeps: list[KeepJob] = field(default_factory=list)
    taken: set[str] = field(default_factory=set)

    def linear(
        self,
        module: str,
        group: str,
        *parts: Part,
        plain_dtype: str | None = "F16",
        pad_outputs: bool = False,
    ) -> None:
        self.linears.append(LinearJob(module, parts, group, plain_dtype, pad_outputs))
        for part in parts:
            suffixes = ("", ".weight", ".bias", ".weight_scale_inv")
            self.taken.update(part.source + suffix for suffix in suffixes)

    def keep(self, name: str, *sources: str, dtype: str | None = None) -> None:
        self.keeps.append(KeepJob(name, sources, dtype))
        self.taken.update(sources)


def assign_bits(
    plan: Plan, groups: Mapping[str, float], bits_for: tuple[tuple[str, float], ...]
) -> dict[str, float]:
    """Rate of every linear module: its group's, or that of the last pattern that matches it.

    Raises ConfigError for a pattern that matches no module that can be quantised.
    """
    rates = {job.module: groups.get(job.group, PLAIN) for job in plan.linears}
    eligible = [job.module for job in plan.linears if job.group != "plain"]
    for pattern, bits in bits_for:
        matched = [module for module in eligible if fnmatchcase(module, pattern)]
        if not matched:
            example = eligible[0] if eligible else "(none)"
            raise ConfigError(
                f"bits_for pattern {pattern!r} matches no module that can be quantised;"
                f" module names look like {example}"
            )
        rates.update(dict.fromkeys(matched, bits))
    return rates


def plan_glm5_next(tensors: Mapping[str, TensorInfo], config: Glm5NextConfig) -> Plan:
    """Jobs for a GLM-5.3-Flash checkpoint in the original or the library-saved naming.

    Raises CheckpointError when the source is already quantised or lacks a tensor.
    """
    _refuse_packs(tensors)
    walk = _Glm5Walk(tensors, config)
    walk.run()
    return _finish(walk.plan, tensors, walk.renamed)


def plan_dflash2(tensors: Mapping[str, TensorInfo]) -> Plan:
    """Jobs for a DFlash2 drafter; k_proj and v_proj stay in 16 bit unless a pattern names them.

    They feed the context K/V of every accepted token as one fused dense matrix, so quantising them
    saves little and costs both accuracy and a rotation per token.
    """
    _refuse_packs(tensors)
    plan = Plan()
    quantised = re.compile(
        r"fc|layers\.\d+\.(self_attn\.[qkvo]_proj|mlp\.(gate|up|down)_proj"
        r"|(attention|mlp)_conv\.kernel_projection)"
    )
    for name in sorted(tensors):
        module = name.removeprefix("model.").removesuffix(".weight")
        if not name.endswith(".weight"):
            continue
        part = Part(name.removesuffix(".weight"))
        if quantised.fullmatch(module):
            is_context = module.endswith(("k_proj", "v_proj"))
            group, dtype = ("drafter_kv", None) if is_context else ("drafter", "F16")
            plan.linear(module, group, part, plain_dtype=dtype)
        elif module == "candidate_selector.hidden_projection":
            plan.linear(module, "plain", part, pad_outputs=True)
        elif module.endswith("_codebook"):
            plan.keep(module, name)
    return _finish(plan, tensors, lambda name: name.removeprefix("model."))


def keep_vision(plan: Plan, tensors: Mapping[str, TensorInfo]) -> None:
    """Turn the vision linears back into plain copies under their source names (no vision bits)."""
    for job in [job for job in plan.linears if job.group == "vision"]:
        plan.linears.remove(job)
        for part in job.parts:
            for suffix in (".weight", ".bias"):
                name = f"{part.source}{suffix}"
                if name in tensors and not any(name in k.sources for k in plan.keeps):
                    plan.keep(_VISUAL + name.partition("visual.")[2], name)


def _refuse_packs(tensors: Mapping[str, TensorInfo]) -> None:
    packed = next((name for name in tensors if name.endswith(".trellis")), None)
    if packed:
        raise CheckpointError(f"{packed} is already EXL3; convert from the original checkpoint")


def _finish(plan: Plan, tensors: Mapping[str, TensorInfo], rename: Callable[[str], str]) -> Plan:
    """Keep what is left, and check that every planned source exists."""
    for name in sorted(tensors):
        if name not in plan.taken and not name.endswith("_scale_inv"):
            plan.keep(rename(name), name)
    missing = [s for job in plan.keeps for s in job.sources if s not in tensors]
    for job in plan.linears:
        for part in job.parts:
            name = part.source if part.index is not None else f"{part.source}.weight"
            if name not in tensors:
                missing.append(name)
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of the model are missing: {', '.join(missing[:4])};"
            " incomplete download, or a checkpoint of another model"
        )
    return plan


class _Glm5Walk:
    """Walks the layers and files each module under its name in the pack."""

    def __init__(self, tensors: Mapping[str, TensorInfo], config: Glm5NextConfig) -> None:
        self.tensors = tensors
        self.config = config
        self.names = TensorNames.find(tensors)
        self.canon = TensorNames((), _TEXT, _VISUAL)
        self.plan = Plan()

    def run(self) -> None:
        config = self.config
        for i in range(config.num_layers):
            self._hyper(i)
            if config.layer_types[i] == "kda":
                self._kda(i)
            else:
                self._mla(i, "text", config.indexer_types[i] == "full")
            self._mlp(i, "text", config.mlp_types[i] == "sparse")
        for i in range(config.num_layers, config.num_layers + config.num_mtp_layers):
            if self.names.has_layer(i):
                source, target = self.names.mtp(i), self.canon.mtp(i)
                self.plan.linear(target.eh_proj, "mtp", Part(source.eh_proj))
                self._mla(i, "mtp", True)
                self._mlp(i, "mtp", True)
        head = self.names.lm_head
        is_stored = self.names.has_module(head)
        if not is_stored and not config.tie_word_embeddings:
            head = "lm_head"  # reported as missing
        elif not is_stored:
            head = self.names.embed.removesuffix(".weight")
        self.plan.linear("lm_head", "head", Part(head))
        self.plan.keep(self.canon.embed, self.names.embed)
        if config.vision is not None and self.names.visual is not None:
            self._vision(config.vision.depth, self.names.visual)

    def renamed(self, name: str) -> str:
        """Name in the pack of a tensor without a rule of its own."""
        visual = self.names.visual
        if visual is not None and name.startswith(visual):
            return _VISUAL + name.removeprefix(visual)
        text = self.names.text
        if name.startswith(text) and not name.startswith("lm_head"):
            return _TEXT + name.removeprefix(text)
        return name

    def _plain(self, target: str, source: str) -> None:
        self.plan.linear(target, "plain", Part(source))

    def _hyper(self, i: int) -> None:
        for site in ("attn", "ffn"):
            target, source = self.canon.hyper(i, site), self.names.hyper(i, site)
            for part in ("fn", "base", "scale"):
                self.plan.keep(getattr(target, part), getattr(source, part), dtype="F32")

    def _kda(self, i: int) -> None:
        source, target = self.names.kda(i), self.canon.kda(i)
        attn = f"{self.canon.layer(i)}self_attn."
        self.plan.linear(f"{attn}qkv_proj", "text", *map(Part, source.qkv))
        self.plan.keep(f"{attn}conv1d.weight", *source.conv)
        self.plan.linear(target.o, "text", Part(source.o))
        for name in ("b", "f_a", "f_b", "g_a", "g_b"):
            self._plain(getattr(target, name), getattr(source, name))
        for name in ("a_log", "dt_bias", "o_norm"):
            self.plan.keep(getattr(target, name), getattr(source, name))

    def _mla(self, i: int, group: str, has_indexer: bool) -> None:
        source, target = self.names.mla(i), self.canon.mla(i)
        for name in ("q_a", "q_b", "kv_a", "o"):
            self.plan.linear(getattr(target, name), group, Part(getattr(source, name)))
        self._plain(target.kv_b, source.kv_b)
        if not has_indexer:
            return
        indexer, to = self.names.indexer(i), self.canon.indexer(i)
        self.plan.linear(to.wq_b, group, Part(indexer.wq_b))
        self._plain(to.wk, indexer.wk)
        self._plain(to.weights, indexer.weights)
        self.plan.keep(to.pool_gate, indexer.pool_gate, dtype="F16")
        self.plan.keep(to.pool_ape, indexer.pool_ape, dtype="F32")

    def _mlp(self, i: int, group: str, is_sparse: bool) -> None:
        if not is_sparse:
            self._swiglu(astuple(self.canon.mlp(i)), astuple(self.names.mlp(i)), group)
            return
        num = self.config.num_experts
        source, target = self.names.moe(i, num), self.canon.moe(i, num)
        self._plain(target.router, source.router)
        if self.config.num_shared_experts:
            self._swiglu(astuple(target.shared), astuple(source.shared), group)
        if source.stacked_gate_up is None or source.stacked_down is None:
            for to, expert in zip(target.experts, source.experts, strict=True):
                self._swiglu(astuple(to), astuple(expert), group)
            return
        width = self.config.moe_intermediate_size
        for e, to in enumerate(target.experts):
            gate_up, down = source.stacked_gate_up, source.stacked_down
            self.plan.linear(to.gate, group, Part(gate_up, e, (0, width)))
            self.plan.linear(to.up, group, Part(gate_up, e, (width, 2 * width)))
            self.plan.linear(to.down, group, Part(down, e))

    def _swiglu(self, target: tuple[str, ...], source: tuple[str, ...], group: str) -> None:
        for to, name in zip(target, source, strict=True):
            self.plan.linear(to, group, Part(name))

    def _vision(self, depth: int, prefix: str) -> None:
        """The tower's linears; the fused qkv of each block becomes three modules."""
        for i in range(depth):
            block, source = f"{_VISUAL}blocks.{i}.", f"{prefix}blocks.{i}."
            fused = f"{source}attn.qkv"
            if self.names.has_module(fused):
                size = self.tensors[f"{fused}.weight"].shape[0] // 3
                for j, name in enumerate("qkv"):
                    rows = (j * size, (j + 1) * size)
                    self.plan.linear(f"{block}attn.{name}_proj", "vision", Part(fused, rows=rows))
            modules = ["attn.proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
            if not self.names.has_module(fused):
                modules += [f"attn.{name}_proj" for name in "qkv"]
            for name in modules:
                self.plan.linear(block + name, "vision", Part(source + name))
        for name in ("proj", "gate_proj", "up_proj", "down_proj"):
            module = f"merger.{name}"
            self.plan.linear(_VISUAL + module, "vision", Part(prefix + module))
