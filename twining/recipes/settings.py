"""Neutral settings of a recipe, the verdict on each, and what the engine of this version can do.

Source: spec/recipes.md section 4. A handler of a flag table takes a value and returns the outcome;
`Settings` collects the values in neutral names, whichever engine the recipe was written for.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from twining.config import PAGE_SIZE
from twining.recipes.document import plain

MODEL_LIMIT: Final = 1_048_576  # max_position_embeddings of the published model


class Verdict(StrEnum):
    """What happens to a setting; only the last two keep the engine from starting."""

    EXACT = "exact"
    EQUIVALENT = "equivalent"
    INERT = "inert"
    APPROXIMATE = "approximate"  # starts only when the user allows it
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Line:
    """One setting of the recipe. given: flag and value; setting: neutral form, "" if none."""

    given: str
    setting: str
    verdict: Verdict
    reason: str

    def message(self, label: str) -> str:
        """The line of spec 4.0, for a recipe called `label`."""
        arrow = f" -> {self.setting}" if self.setting else ""
        head = f"recipe {label}: {self.given}{arrow}: {self.verdict}"
        if not self.reason:
            return head
        if self.verdict is Verdict.EXACT:
            return f"{head} ({self.reason})"
        return f"{head}, {self.reason}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """The engine that is to run the recipe. The defaults describe this version."""

    num_devices: int = 1
    max_stages: int = 64
    activations: str = "float32"
    has_step_graphs: bool = False
    has_prefix_reuse: bool = True
    max_draft: int = 15
    cache_formats: tuple[str, ...] = ("fp32", "bf16", "fp16", "q8", "q6", "q4")
    device_kind: str = "cpu"
    model_limit: int = MODEL_LIMIT


@dataclass(slots=True, kw_only=True)
class Settings:
    """Values in neutral names; None: the recipe does not say. Sizes in tokens unless named."""

    base_engine: str = ""
    model_dir: str | None = None
    cache_tokens: int | None = None  # all sequences together
    max_seq_len: int | None = None
    cache_format: str | None = None
    device_budgets_gib: tuple[float, ...] = ()
    device_memory_fraction: float | None = None
    devices: tuple[int, ...] = ()
    staging_tile_tokens: int | None = None
    workspace_batch: int | None = None
    append_rows: int | None = None
    head_device: int | None = None
    draft_device: int | None = None
    draft_method: str = "none"  # none, dflash2, mtp
    draft_dir: str | None = None
    draft_weights: str | None = None
    draft_tap: str | None = None
    draft_cache_format: str | None = None
    num_draft_tokens: int | None = None
    prefix_reuse: str = "off"  # off, previous_request
    own_reuse: str | None = None  # our own engine's mode: exact, fast, off
    prefill_chunk: int | None = None
    prefill_chunk_when_decoding: int | None = None
    token_budget: int | None = None
    max_running: int | None = None
    page_size: int = PAGE_SIZE
    margin_mib: int | None = None
    pipeline_stages: int = 1
    tensor_ranks: int = 1
    layers_per_stage: tuple[int, ...] = ()
    draft_stage: int | None = None
    spread_decodes: bool | None = None
    mixed_steps: bool | None = None
    host: str = "127.0.0.1"  # never widened by a recipe
    port: int | None = None
    served_name: str | None = None
    dtype: str | None = None
    weights_format: str | None = None
    tool_format: str | None = None
    reasoning_format: str | None = None
    report_cached_tokens: bool | None = None
    graph_mode: str | None = None
    vision_parallel: str | None = None
    build_arch: str | None = None
    models_dir: str | None = None
    compile_cache_dir: str | None = None

    @property
    def pages_per_sequence(self) -> int:
        """Cache pages that one sequence of max_seq_len needs, at 256 tokens each."""
        return -(-(self.max_seq_len or 0) // PAGE_SIZE)


class BadValue(ValueError):
    """A value that does not parse; the text says what is needed."""


@dataclass(frozen=True, slots=True)
class Given:
    """One flag or variable as the recipe gives it."""

    name: str
    value: str | None

    @property
    def shown(self) -> str:
        if self.value is None:
            return self.name
        joint = "=" if self.name.isupper() or self.name[0].isupper() else " "
        return f"{self.name}{joint}{plain(self.value, 80)}"


@dataclass(slots=True)
class Context:
    """What handlers see: the settings so far, the engine, and every word of the launch."""

    settings: Settings
    can: Capabilities
    given: Mapping[str, str | None]


Handler = Callable[[Given, Context], Line]


@dataclass(frozen=True, slots=True)
class Flag:
    """A row of a flag table. takes_value: the next word belongs to it."""

    handler: Handler
    takes_value: bool = True


def whole(value: str | None, low: int, high: int) -> int:
    """A whole number in low..high. Raises BadValue."""
    text = (value or "").strip()
    if not re.fullmatch(r"[0-9]{1,12}", text) or not low <= int(text) <= high:
        raise BadValue(f"a whole number in {low}..{high} is needed")
    return int(text)


def number(value: str | None, low: float, high: float) -> float:
    """A plain decimal in low..high. Raises BadValue."""
    text = (value or "").strip()
    if not re.fullmatch(r"[0-9]{1,9}(\.[0-9]{1,9})?", text) or not low <= float(text) <= high:
        raise BadValue(f"a number in {low:g}..{high:g} is needed")
    return float(text)


def whole_list(value: str | None, low: int, high: int) -> tuple[int, ...]:
    """Whole numbers separated by commas, at most 64. Raises BadValue."""
    parts = (value or "").split(",")
    if len(parts) > 64:
        raise BadValue("at most 64 numbers are read")
    return tuple(whole(part, low, high) for part in parts)


def number_list(value: str | None, low: float, high: float) -> tuple[float, ...]:
    """Decimals separated by commas, at most 64. Raises BadValue."""
    parts = (value or "").split(",")
    if len(parts) > 64:
        raise BadValue("at most 64 numbers are read")
    return tuple(number(part, low, high) for part in parts)


def line(given: Given, setting: str, verdict: Verdict, reason: str = "") -> Line:
    return Line(given.shown, setting, verdict, reason)


def exact(given: Given, setting: str, reason: str = "") -> Line:
    return line(given, setting, Verdict.EXACT, reason)


def equivalent(given: Given, setting: str, reason: str) -> Line:
    return line(given, setting, Verdict.EQUIVALENT, reason)


def inert(given: Given, setting: str, reason: str) -> Line:
    return line(given, setting, Verdict.INERT, reason)


def approximate(given: Given, setting: str, reason: str) -> Line:
    return line(given, setting, Verdict.APPROXIMATE, reason)


def refused(given: Given, reason: str, setting: str = "") -> Line:
    return line(given, setting, Verdict.REFUSED, reason)


def assigned(settings: Settings, **values: Any) -> str:
    """Set neutral values; returns them as `name=value` text for the line."""
    parts = []
    for name, value in values.items():
        setattr(settings, name, value)
        listed = f"[{','.join(f'{v:g}' for v in value)}]" if isinstance(value, tuple) else value
        if isinstance(value, bool):
            listed = str(value).lower()
        parts.append(f"{name}={plain(listed, 80)}")
    return ", ".join(parts)
