"""The parts of a recipe document that are used, as strict pydantic models.

Source: spec/recipes.md section 2. Each part is validated on its own: a damaged part is a finding
and reads as absent, the other parts stay usable. Keys that a model does not name are kept. Null and
absent are the same. No torch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from twining.errors import ConfigError
from twining.recipes.document import parse_json, plain

MAX_ROWS: Final = 10_000
MAX_TOKENS: Final = 1 << 31

Level = Literal["must", "should", "note"]
Text = Annotated[str, Field(max_length=1 << 18)]
Word = Annotated[str, Field(max_length=1024)]
Count = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
Rate = Annotated[float, Field(allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to say about a document. rule: R1 … R14, X1 … X12, or "form"."""

    rule: str
    level: Level
    is_ok: bool
    message: str


class Part(BaseModel):
    """Base: strict types, unknown keys kept, immutable."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class EngineSource(Part):
    """engine_source; base_engine selects the table of flags."""

    base_engine: Word
    type: Word | None = None
    base_version: Word | None = None
    git_url: Word | None = None
    pinned_commit: Word | None = None


class Runtime(Part):
    """config.runtime; prose, from which only variables are taken."""

    env: Text | None = None
    notes: Text | None = None


class Storage(Part):
    nvme_gb: Annotated[float, Field(gt=0, le=1e6)] | None = None
    note: Text | None = None


class LaunchConfig(Part):
    """config; launch is an argv or a list of shell lines (launch.py)."""

    launch: Annotated[
        list[Annotated[str, Field(max_length=1 << 14)]], Field(max_length=1000, fail_fast=True)
    ]
    runtime: Runtime | None = None
    max_context_len: Count | None = None
    layouts: Annotated[list[Word], Field(max_length=100, fail_fast=True)] | None = None
    storage_requirements: Storage | None = None


class ModelEntry(Part):
    slug: Word | None = None
    name: Word | None = None
    hf_repo: Word | None = None
    quant: Word | None = None


class HardwareEntry(Part):
    """vram_gb is per card, in GiB as vendors print it."""

    vram_gb: Annotated[float, Field(gt=0, le=1e5)]
    device_count: Annotated[int, Field(ge=1, le=4096)]
    slug: Word | None = None
    vendor: Word | None = None
    card: Word | None = None
    card_family: Word | None = None


class Artifact(Part):
    kind: Word
    pointer: Word | None = None
    pointer_type: Word | None = None
    pin: Text | None = None


class PerfPoint(Part):
    """One row; all figures as published."""

    context_len: Count
    claimed_by: Word
    concurrency: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    prefill_tok_s: Rate | None = None
    decode_tok_s: Rate | None = None
    ttft_ms: Rate | None = None
    notes: Text | None = None


class MetricPoint(Part):
    """One element of metrics.points."""

    context_len: Count
    concurrency: Annotated[int, Field(ge=1, le=1 << 20)] | None = None
    prefill_tok_s: Rate | None = None
    decode_tok_s: Rate | None = None
    ttft_ms: Rate | None = None
    notes: Text | None = None


class Metrics(Part):
    """performance[].metrics, decoded from its string."""

    tok_s: Rate | None = None
    context_len: Count | None = None
    notes: Text | None = None
    points: Annotated[list[MetricPoint], Field(max_length=MAX_ROWS, fail_fast=True)] | None = None


class Claim(Part):
    claimed_by: Word
    metrics: Annotated[str, Field(max_length=1 << 20)] | None = None


class Speeds(Part):
    decode_tok_s: Rate | None = None
    prefill_tok_s: Rate | None = None


class Credit(Part):
    name: Word
    url: Word | None = None


class Links(Part):
    self: Word | None = None
    alternate: Word | None = None
    describedby: Word | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A document and the parts of it that could be used."""

    raw: Mapping[str, Any]
    slug: str | None
    title: str | None
    engine: EngineSource | None
    config: LaunchConfig | None
    models: tuple[ModelEntry, ...]
    hardware: tuple[HardwareEntry, ...]
    artifacts: tuple[Artifact, ...]
    credit: tuple[Credit, ...]
    points: tuple[PerfPoint, ...]
    claims: tuple[tuple[str, Metrics], ...]  # (claimed_by, metrics)
    speeds: Speeds | None
    links: Links | None
    findings: tuple[Finding, ...] = field(default=())  # damaged parts

    @property
    def model(self) -> ModelEntry | None:
        return self.models[0] if self.models else None

    @property
    def label(self) -> str:
        return plain(self.slug or "(no slug)", 120)


_T = TypeVar("_T")


def _rows(kind: type[_T]) -> TypeAdapter[list[_T]]:
    bounded: Any = Annotated[list[kind], Field(max_length=MAX_ROWS, fail_fast=True)]  # type: ignore[valid-type]
    return TypeAdapter(bounded)


_MODELS: Final = _rows(ModelEntry)
_HARDWARE: Final = _rows(HardwareEntry)
_ARTIFACTS: Final = _rows(Artifact)
_CREDIT: Final = _rows(Credit)
_POINTS: Final = _rows(PerfPoint)
_CLAIMS: Final = _rows(Claim)
_ENGINE: Final = TypeAdapter(EngineSource)
_CONFIG: Final = TypeAdapter(LaunchConfig)
_SPEEDS: Final = TypeAdapter(Speeds)
_LINKS: Final = TypeAdapter(Links)
_METRICS: Final = TypeAdapter(Metrics)


def _first_fault(where: str, err: ValidationError) -> str:
    first = err.errors(include_url=False, include_context=False)[0]
    path = where + "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"])
    return (
        f"{plain(path, 120)}: {plain(first['msg'], 120)}, found {plain(repr(first['input']), 40)}"
    )


class _Reader:
    """Validates parts one by one and keeps what went wrong."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.findings: list[Finding] = []

    def fault(self, message: str, level: Level = "must") -> None:
        self.findings.append(Finding("form", level, False, message))

    def part(self, key: str, adapter: TypeAdapter[_T]) -> _T | None:
        value = self.raw.get(key)
        if value is None:
            return None
        return self.checked(key, value, adapter)

    def checked(self, where: str, value: object, adapter: TypeAdapter[_T]) -> _T | None:
        try:
            return adapter.validate_python(value)
        except ValidationError as err:
            self.fault(_first_fault(where, err))
            return None

    def text(self, key: str) -> str | None:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, str):
            self.fault(f"{key}: text is needed, found {plain(repr(value), 40)}", "should")
            return None
        return value

    def rows(self, key: str, adapter: TypeAdapter[list[_T]]) -> tuple[_T, ...]:
        found: list[_T] | None = self.part(key, adapter)
        return tuple(found or ())

    def metrics(self) -> tuple[tuple[str, Metrics], ...]:
        """Decode each claim's string of JSON; a damaged one is a finding."""
        found: list[tuple[str, Metrics]] = []
        for i, claim in enumerate(self.rows("performance", _CLAIMS)[:100]):
            if claim.metrics is None:
                continue
            where = f"performance[{i}].metrics"
            try:
                decoded = parse_json(claim.metrics, where)
            except ConfigError as err:
                self.fault(str(err))
                continue
            metrics = self.checked(where, decoded, _METRICS)
            if metrics is not None:
                found.append((claim.claimed_by, metrics))
        return tuple(found)


def view(raw: Mapping[str, Any]) -> Recipe:
    """The used parts of a document. Never raises: faults are in Recipe.findings."""
    reader = _Reader(raw)
    parts: dict[str, Any] = {
        "slug": reader.text("slug"),
        "title": reader.text("title"),
        "engine": reader.part("engine_source", _ENGINE),
        "config": reader.part("config", _CONFIG),
        "models": reader.rows("models", _MODELS),
        "hardware": reader.rows("hardware", _HARDWARE),
        "artifacts": reader.rows("artifacts", _ARTIFACTS),
        "credit": reader.rows("credit", _CREDIT),
        "points": reader.rows("perf_points", _POINTS),
        "claims": reader.metrics(),
        "speeds": reader.part("speeds", _SPEEDS),
        "links": reader.part("links", _LINKS),
    }
    return Recipe(raw=raw, findings=tuple(reader.findings), **parts)
