"""Our own measurements as rows and as a complete recipe document that our reader accepts.

Source: spec/bench.md 9 and 10, spec/recipes.md 2, 3. A results file is read strictly: a figure that
is missing or unknown is left out, never invented. Battery cells become marker rows; a real length
equal to a marker is refused. Credits of the recipe that was followed are kept.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal

from pydantic import Field, TypeAdapter, ValidationError

from twining.errors import ConfigError
from twining.recipes.document import canonical, parse_json, plain
from twining.recipes.points import BATTERIES, MARKERS, headline
from twining.recipes.schema import Count, HardwareEntry, Part, PerfPoint, Text, Word

CLAIMED_BY: Final = "engine-bench"
RESULTS_FORMAT: Final = "engine-results/1"

_Positive = Annotated[float, Field(gt=0, le=1e12, allow_inf_nan=False)]


class DecodeCell(Part):
    """A battery at a concurrency: median of the aggregate rate of complete runs."""

    battery: Literal["structured", "code", "json", "prose"]
    concurrency: Annotated[int, Field(ge=1, le=1 << 20)]
    aggregate_tok_s: _Positive
    num_runs: Annotated[int, Field(ge=1, le=1000)] = 1


class PrefillCell(Part):
    """A cold prompt of a nominal size: tokens it really had, median rate."""

    size: Count
    prompt_tokens: Count
    tok_s: _Positive
    source: Literal["stream", "native", "vllm_metrics"] = "stream"


class DepthCell(Part):
    """Decode after a cold prompt of a nominal size, and that prompt's first-token time."""

    size: Count
    decode_tok_s: _Positive
    ttft_ms: _Positive | None = None


class ReuseCell(Part):
    """First token with a reused prefix, beside the cold one."""

    size: Count
    ttft_ms: _Positive
    cold_ttft_ms: _Positive | None = None
    cached_share: Annotated[float, Field(ge=0, le=1)] | None = None


class EngineStamp(Part):
    name: Word
    version: Word
    git_commit: Word | None = None


class Results(Part):
    """What publishing reads of results.json; everything else is kept by the bench alone."""

    format: Literal["engine-results/1"]
    engine: EngineStamp
    decode: Annotated[list[DecodeCell], Field(max_length=1000)] = Field(default_factory=list)
    prefill: Annotated[list[PrefillCell], Field(max_length=1000)] = Field(default_factory=list)
    depth: Annotated[list[DepthCell], Field(max_length=1000)] = Field(default_factory=list)
    reuse: Annotated[list[ReuseCell], Field(max_length=1000)] = Field(default_factory=list)
    prompts_sha256: Word | None = None
    notes: Text | None = None


_RESULTS: Final = TypeAdapter(Results)


def read_results(raw: bytes | str) -> Results:
    """A results file. Raises ConfigError naming the first fault."""
    try:
        return _RESULTS.validate_python(parse_json(raw, "results"))
    except ValidationError as err:
        raise ConfigError(_fault("results", err)) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row to publish."""

    context_len: int
    concurrency: int | None
    prefill_tok_s: float | None = None
    decode_tok_s: float | None = None
    ttft_ms: float | None = None
    notes: str = ""

    def data(self, row_id: int | None, claimed_by: str) -> dict[str, Any]:
        """The full form (row_id given) or the short form of metrics.points."""
        figures = {
            "prefill_tok_s": self.prefill_tok_s,
            "decode_tok_s": self.decode_tok_s,
            "ttft_ms": self.ttft_ms,
        }
        if row_id is None:
            short: dict[str, Any] = {"context_len": self.context_len, "notes": self.notes}
            if self.concurrency is not None:
                short["concurrency"] = self.concurrency
            return short | {k: v for k, v in figures.items() if v is not None}
        return {
            "id": row_id,
            "context_len": self.context_len,
            **figures,
            "concurrency": self.concurrency,
            "claimed_by": claimed_by,
            "notes": self.notes,
        }


def rows_of(results: Results) -> list[Row]:
    """Rows in the order of R7. Raises ConfigError for a length that is a marker, or a repeated
    key."""
    markers = {name: tokens for tokens, name in MARKERS.items()}
    prompts = f", prompts {results.prompts_sha256[:12]}" if results.prompts_sha256 else ""
    rows = [
        Row(
            context_len=markers[cell.battery],
            concurrency=cell.concurrency,
            decode_tok_s=round(cell.aggregate_tok_s, 3),
            notes=f"{cell.battery} battery, C{cell.concurrency} aggregate, median of"
            f" {cell.num_runs}; context_len is the marker{prompts}",
        )
        for cell in results.decode
    ]
    rows += [
        Row(
            context_len=_real(cell.size),
            concurrency=None,
            prefill_tok_s=round(cell.tok_s, 2),
            notes=f"cold prefill, {cell.prompt_tokens} prompt tokens, {cell.source} rate",
        )
        for cell in results.prefill
    ]
    rows += [
        Row(
            context_len=_real(cell.size, is_decode=True),
            concurrency=1,
            decode_tok_s=round(cell.decode_tok_s, 3),
            ttft_ms=None if cell.ttft_ms is None else round(cell.ttft_ms),
            notes="decode after a cold prompt of this size; ttft is that prompt's, cold",
        )
        for cell in results.depth
    ]
    rows += _reuse_rows(results)
    keys = [(row.context_len, row.concurrency) for row in rows]
    if len(set(keys)) < len(keys):
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ConfigError(f"results: two rows for context {twice[0]}, concurrency {twice[1]}")
    return sorted(rows, key=lambda row: (row.context_len, row.concurrency or 0))


def _reuse_rows(results: Results) -> Iterable[Row]:
    """Warm first-token rows, only in a document without depth rows (they share their keys)."""
    if results.depth:
        return
    for cell in results.reuse:
        cold = f", cold {cell.cold_ttft_ms:.0f} ms" if cell.cold_ttft_ms else ""
        share = f", {cell.cached_share:.2%} cached" if cell.cached_share is not None else ""
        yield Row(
            context_len=cell.size,
            concurrency=1,
            ttft_ms=round(cell.ttft_ms),
            notes=f"warm: prefix reused{cold}{share}",
        )


def _real(size: int, *, is_decode: bool = False) -> int:
    """A real length. 1,024 stands for a battery on decode rows only."""
    if size in MARKERS and (is_decode or MARKERS[size] != BATTERIES[0]):
        raise ConfigError(f"results: a real length of {size} tokens is a marker; measure another")
    return size


class Publication(Part):
    """What only the user knows. created_at: a time stamp as documents write it."""

    slug: Annotated[str, Field(pattern=r"^[a-z0-9]+(-[a-z0-9]+)*$", max_length=200)]
    title: Word
    license: Word
    author: Word
    created_at: Word
    launch: Annotated[list[Word], Field(min_length=1, max_length=200)]
    hardware: Annotated[list[HardwareEntry], Field(min_length=1, max_length=64)]
    max_context_len: Count
    summary: Text = ""


_ABOUT: Final = TypeAdapter(Publication)


def publication_from(document: Mapping[str, Any]) -> Publication:
    """The user's description. Raises ConfigError naming the first fault."""
    try:
        return _ABOUT.validate_python(dict(document))
    except ValidationError as err:
        raise ConfigError(_fault("about", err)) from None


def _fault(what: str, err: ValidationError) -> str:
    first = err.errors(include_url=False, include_context=False)[0]
    where = ".".join(map(str, first["loc"]))
    return f"{what}: {plain(where, 80)}: {plain(first['msg'], 100)}; correct the file"


def publish(
    results: Results, about: Publication, *, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A complete document. base: the recipe that was followed; its models, artifacts and credits
    are carried over. Raises ConfigError as rows_of."""
    rows = rows_of(results)
    points = [row.data(i, CLAIMED_BY) for i, row in enumerate(rows, 1)]
    decode, prefill = headline(PerfPoint.model_validate(point) for point in points)
    structured = [r.decode_tok_s for r in rows if r.context_len == 1024 and r.concurrency == 1]
    metrics: dict[str, Any] = {
        "notes": results.notes or "",
        "context_len": about.max_context_len,
        "points": [row.data(None, CLAIMED_BY) for row in rows],
    }
    if structured and structured[0] is not None:
        metrics["tok_s"] = structured[0]
    source = base or {}
    document: dict[str, Any] = {
        "slug": about.slug,
        "title": about.title,
        "summary": about.summary,
        "license": about.license,
        "tier": "community",
        "beta": False,
        "engine_source": {
            "type": "release",
            "base_engine": "twining",
            "base_version": results.engine.version,
            "pip_package": f"twining=={results.engine.version}",
            "pinned_commit": results.engine.git_commit,
            "image_digest": None,
        },
        "credit": _credits(source, about.author),
        "author": {"name": about.author, "isSite": False},
        "uploaded_by": about.author,
        "config": {"launch": list(about.launch), "max_context_len": about.max_context_len},
        "models": source.get("models") or [],
        "hardware": [card.model_dump(exclude_unset=True) for card in about.hardware],
        "tags": _words(source.get("tags")),
        "tasks": _words(source.get("tasks")),
        "performance": [{"claimed_by": CLAIMED_BY, "metrics": json.dumps(metrics)}],
        "perf_points": points,
        "artifacts": source.get("artifacts") or [],
        "links": {"self": f"{about.slug}.json", "alternate": about.slug},
        "created_at": about.created_at,
        "updated_at": about.created_at,
        "speeds": {"decode_tok_s": decode, "prefill_tok_s": prefill},
    }
    document["revision"] = {
        "no": 1,
        "content_hash": hashlib.sha1(canonical(document), usedforsecurity=False).hexdigest(),
        "created_at": about.created_at,
    }
    return document


def _words(value: object) -> list[str]:
    return sorted(w for w in value if isinstance(w, str)) if isinstance(value, list) else []


def _credits(base: Mapping[str, Any], author: str) -> list[Any]:
    """The followed recipe's credits, all of them, then our author."""
    listed = base.get("credit")
    kept = [c for c in listed if isinstance(c, dict)] if isinstance(listed, list) else []
    names = {c.get("name") for c in kept}
    return kept if author in names else [*kept, {"name": author, "url": None}]
