"""Floors of step time and prefill from bytes and operations: what no kernel can beat.

Source: spec/performance.md section 1 (constants, tables 1.2 to 1.9). Estimates from the config and
the rates of a pack; they bound speed from above and promise nothing. Units: GB = 10^9 bytes, ms.
Letters: R rows of a step, D distinct experts per layer, r decoded weights per clock and SM. Pure.
"""

from dataclasses import dataclass
from typing import Final

from twining.checkpoint.hf_config import Glm5NextConfig
from twining.planner import params
from twining.planner.known import Rates
from twining.planner.units import GB

DECODE_RATES: Final = (7.5, 12.0, 20.0, 31.0)  # measured today, ..., hard limit of issue slots


@dataclass(frozen=True, slots=True)
class Machine:
    """A kind of card. bytes_per_s: usable; macs_per_s: dense 16-bit products."""

    name: str
    num_sms: int
    clock_hz: float
    bytes_per_s: float
    macs_per_s: float


MACHINES: Final = {
    "h200": Machine("H200", 132, 1.80e9, 4.3e12, 395e12),
    "cmp-170hx": Machine("CMP 170HX", 70, 1.45e9, 1.30e12, 38e12),
    "a100": Machine("A100-80G", 108, 1.41e9, 1.75e12, 125e12),
}


def distinct_experts(config: Glm5NextConfig, rows: float) -> float:
    """Experts of a layer that independent rows touch: E (1 - (1 - k/E)^R)."""
    E, k = config.num_experts, config.num_experts_per_tok
    return float(E * (1 - (1 - k / E) ** rows))


def window_experts(config: Glm5NextConfig, rows: float) -> float:
    """The same for consecutive rows of one text, fitted to published probes: k R^0.755."""
    return float(min(config.num_experts, config.num_experts_per_tok * rows**0.755))


def batch_experts(config: Glm5NextConfig, sequences: int, rows: int) -> float:
    """Sequences of `rows` consecutive rows each: alike inside, independent of each other."""
    E = config.num_experts
    return E * (1 - (1 - window_experts(config, rows) / E) ** sequences)


@dataclass(frozen=True, slots=True)
class Term:
    """One line of a step: bytes moved, weights decoded from trellis form, GB and 10^9."""

    name: str
    gigabytes: float
    decoded: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A verify step: rows in total over all sequences, D distinct experts, context in tokens."""

    rows: int
    experts: float
    sequences: int = 1
    context: int = 32768


def step_terms(config: Glm5NextConfig, rates: Rates, step: Step) -> list[Term]:
    """What one step reads and writes, by component (table 1.4)."""
    kda_layers, mla_layers = len(config.kda_layers), len(config.mla_layers)
    full = sum(config.indexer_types[i] == "full" for i in config.mla_layers)
    sparse = sum(kind == "sparse" for kind in config.mlp_types)
    dense = config.num_layers - sparse
    expert = params.swiglu(config.hidden_size, config.moe_intermediate_size)
    packed = [
        _packed("KDA projections", params.kda(config).packed * kda_layers, rates.kda),
        _packed(
            "MLA and indexer projections",
            params.mla(config).packed * mla_layers + params.indexer(config).packed * full,
            rates.mla,
        ),
        _packed("shared experts", expert.packed * config.num_shared_experts * sparse, rates.shared),
        _packed("dense MLP", _dense(config) * dense, rates.dense),
        _packed("head", params.head(config).packed, rates.head),
    ]
    touched = step.experts * sparse
    routed = expert.packed * touched * rates.experts / 8 + expert.edges * touched * 2
    plain = (
        params.mla(config).half * mla_layers * 2
        + params.kda(config).half * kda_layers * 2
        + params.router(config).half * sparse * 4
        + params.hyper(config).single * config.num_layers * 2
        + params.indexer(config).half * full * 2
    )
    return [
        *packed,
        Term("routed experts", routed / GB, expert.packed * touched / GB),
        Term("16- and 32-bit weights", plain / GB),
        Term("KDA state", _state_gb(config) * step.sequences),
        Term("latents", _latent_gb(config, step)),
        Term("index scan", _scan_gb(config, step)),
        Term("streams, norms, rest", 0.04 if step.rows == 1 else 0.015 + 0.023 * step.rows),
    ]


def _packed(name: str, weights: float, bits: float) -> Term:
    return Term(name, weights * bits / 8 / GB, weights / GB if bits < 16 else 0.0)


def _dense(config: Glm5NextConfig) -> int:
    return params.swiglu(config.hidden_size, config.intermediate_size).packed


def _state_gb(config: Glm5NextConfig) -> float:
    """Float32 state of all KDA layers, read and written."""
    values = config.kda_heads * config.kda_head_dim**2
    return 2 * len(config.kda_layers) * values * 4 / GB


def _latent_gb(config: Glm5NextConfig, step: Step) -> float:
    seen = min(step.context, config.index_topk + config.index_pool - 1)
    row = seen * config.kv_lora_rank * 2
    return row * len(config.mla_layers) * step.rows / GB


def _scan_gb(config: Glm5NextConfig, step: Step) -> float:
    key = config.index_head_dim * 2 / config.index_pool
    return step.context * key * len(config.mla_layers) * step.sequences / GB


@dataclass(frozen=True, slots=True)
class Floors:
    """Milliseconds that a step needs at least on one card's worth of silicon."""

    gigabytes: float
    decoded: float  # 10^9 weights
    memory_ms: float
    decode_ms: tuple[float, ...]  # at DECODE_RATES

    @property
    def step_ms(self) -> float:
        """The larger of the two at 20 decoded weights per clock and SM."""
        return max(self.memory_ms, self.decode_ms[2])


def floors(config: Glm5NextConfig, rates: Rates, step: Step, machine: Machine) -> Floors:
    """Both floors of a step (tables 1.5, 1.7)."""
    terms = step_terms(config, rates, step)
    gigabytes = sum(term.gigabytes for term in terms)
    decoded = sum(term.decoded for term in terms)
    per_s = machine.num_sms * machine.clock_hz
    return Floors(
        gigabytes,
        decoded,
        gigabytes * GB / machine.bytes_per_s * 1e3,
        tuple(decoded * GB / (per_s * r) * 1e3 for r in DECODE_RATES),
    )


def prefill_rate(config: Glm5NextConfig, rates: Rates, machine: Machine, chunk: int) -> float:
    """Most prompt tokens per second of one card's worth of silicon: products and trellis decoding
    perfectly overlapped, r = 20 (table 1.9)."""
    step = Step(rows=1, experts=distinct_experts(config, chunk))
    terms = step_terms(config, rates, step)
    decode_s = sum(t.decoded for t in terms) * GB / (machine.num_sms * machine.clock_hz * 20)
    memory_s = sum(t.gigabytes for t in terms) * GB / machine.bytes_per_s
    products_s = chunk * active_weights(config) / machine.macs_per_s
    return chunk / max(decode_s, memory_s, products_s)


def active_weights(config: Glm5NextConfig) -> int:
    """Weights that one token multiplies with: trunk, its experts and the head."""
    total = params.head(config).total + config.hidden_size
    unused = config.num_experts - config.num_experts_per_tok
    expert = params.swiglu(config.hidden_size, config.moe_intermediate_size).total
    for index in range(config.num_layers):
        total += sum(part.total for part in params.layer(config, index).values())
        if config.mlp_types[index] == "sparse":
            total -= unused * expert
    return total
