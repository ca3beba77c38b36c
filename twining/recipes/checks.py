"""Is a recipe document sound? Rules R1 … R14 and the known traps X1 … X12, each with its answer.

Source: spec/recipes.md sections 3 and 6. "must" makes the document unusable for that purpose,
"should" is a warning, "note" tells what a reader has to know. Pure. No torch.
"""

import re
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise
from typing import Final

from twining.recipes.document import plain
from twining.recipes.points import headline, marker_battery, measurements
from twining.recipes.resolve import Resolution
from twining.recipes.schema import Finding, Level, MetricPoint, PerfPoint, Recipe
from twining.recipes.settings import Verdict

MODEL_LAYERS: Final = 45
_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
_QUANT = re.compile(r"exl3-([0-9]{1,2})-([0-9]{1,2})bpw")
_COMMIT = re.compile(r"[0-9a-f]{7,40}\b")
_FINGERPRINT = re.compile(r"(?<![0-9a-f])[0-9a-f]{64}(?![0-9a-f])")
_LICENCE = re.compile(r"CC BY-NC-ND 4\.0|cc-by-nc-nd-4\.0", re.IGNORECASE)


def bits_of(quant: str | None) -> float | None:
    """Bits per weight of a quant name such as exl3-3-05bpw, or None for another form."""
    match = _QUANT.fullmatch(quant or "")
    return float(f"{match[1]}.{match[2]}") if match else None


def commit_of(pin: str | None) -> str | None:
    """The commit that a pin's prose starts with, or None: then the pin is unknown, not wrong."""
    match = _COMMIT.match(pin or "")
    return match[0] if match else None


def check(
    recipe: Recipe,
    resolution: Resolution,
    *,
    file_stem: str | None = None,
    checkpoint_bits: float | None = None,
    model_layers: int = MODEL_LAYERS,
) -> list[Finding]:
    """Every rule's answer. file_stem: name of the file without .json, None when there is none.
    checkpoint_bits: what a local checkpoint declares, None when none was given."""
    findings = list(recipe.findings)
    findings += _identity(recipe, file_stem)
    findings += _rows(recipe)
    findings += _launch(recipe, resolution, model_layers)
    findings.append(check_quant(recipe, checkpoint_bits))
    findings += _traps(recipe, resolution)
    return findings


def _finding(rule: str, level: Level, is_ok: bool, good: str, bad: str) -> Finding:
    return Finding(rule, level, is_ok, good if is_ok else bad)


def _identity(recipe: Recipe, file_stem: str | None) -> Iterator[Finding]:
    slug = recipe.slug or ""
    alternate = (recipe.links.alternate if recipe.links else None) or ""
    last = alternate.rsplit("/", 1)[-1]
    fits = bool(_SLUG.fullmatch(slug[:300])) and last == slug and file_stem in (None, slug)
    yield _finding(
        "R1",
        "must",
        fits,
        "slug, file name and address agree",
        f"slug {plain(slug, 80)!r}, file {plain(file_stem, 80)!r} and links.alternate"
        f" {plain(last, 80)!r} differ; rename the file or correct the document",
    )
    created, updated = recipe.raw.get("created_at"), recipe.raw.get("updated_at")
    if isinstance(created, str) and isinstance(updated, str) and created[:10] > updated[:10]:
        yield Finding("form", "should", False, "created_at is later than updated_at")


def _rows(recipe: Recipe) -> Iterator[Finding]:
    points = recipe.points
    keys = [(p.context_len, p.concurrency, p.claimed_by) for p in points]
    yield _finding(
        "R2",
        "must",
        len(set(keys)) == len(keys),
        f"{len(keys)} rows, each (context, concurrency, claimant) once",
        f"{len(keys) - len(set(keys))} rows repeat a (context, concurrency, claimant)",
    )
    empty = [p for p in points if not _figures(p)]
    wrong = [p for p in points if any(v <= 0 for v in _figures(p))]
    yield _finding(
        "R3",
        "must",
        not empty and not wrong,
        "every row has a positive figure",
        f"{len(empty)} rows have no figure, {len(wrong)} one that is not positive",
    )
    odd = [p for p in points if (p.concurrency is None) != (p.prefill_tok_s is not None)]
    yield _finding(
        "R4",
        "should",
        not odd,
        "concurrency is null exactly for cold prefill",
        f"{len(odd)} rows: concurrency must be null for cold prefill and a number otherwise",
    )
    mixed = [p for p in points if len(_figures(p)) > 1 and p.prefill_tok_s is not None]
    yield _finding(
        "R5", "should", not mixed, "one quantity a row", f"{len(mixed)} rows mix quantities"
    )
    yield from _points_twice(recipe)
    order = [(p.context_len, p.concurrency or 0) for p in points]
    yield _finding(
        "R7",
        "should",
        all(a <= b for a, b in pairwise(order)),
        "rows are in order",
        "rows are not ordered by context_len, then concurrency",
    )
    yield _speeds(recipe)


def _figures(point: PerfPoint) -> list[float]:
    values = (point.prefill_tok_s, point.decode_tok_s, point.ttft_ms)
    return [value for value in values if value is not None]


def _row_set(points: Sequence[PerfPoint] | Sequence[MetricPoint]) -> set[tuple[object, ...]]:
    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, 3)

    return {
        (p.context_len, p.concurrency, rounded(p.prefill_tok_s), rounded(p.decode_tok_s))
        for p in points
    }


def _points_twice(recipe: Recipe) -> Iterator[Finding]:
    for claimant, metrics in recipe.claims:
        if metrics.points is None:
            continue
        theirs = [p for p in recipe.points if p.claimed_by == claimant]
        yield _finding(
            "R6",
            "should",
            _row_set(theirs) == _row_set(metrics.points),
            f"metrics.points and perf_points hold the same {len(theirs)} rows",
            f"metrics.points ({len(metrics.points)}) and perf_points ({len(theirs)}) differ",
        )


def _speeds(recipe: Recipe) -> Finding:
    decode, prefill = headline(recipe.points)
    stated = recipe.speeds
    given = (
        round(stated.decode_tok_s or 0, 1) if stated else 0.0,
        round(stated.prefill_tok_s or 0, 1) if stated else 0.0,
    )
    return _finding(
        "R8",
        "should",
        given == (decode, prefill),
        f"speeds {decode:g} / {prefill:g} follow from the rows",
        f"speeds say {given[0]:g} / {given[1]:g}, the rows give {decode:g} / {prefill:g}",
    )


def _launch(recipe: Recipe, resolution: Resolution, model_layers: int) -> Iterator[Finding]:
    refusals = [line for line in resolution.lines if line.verdict is Verdict.REFUSED]
    first = refusals[0].message("") if refusals else next(iter(resolution.problems), "")
    yield _finding(
        "R9",
        "must",
        not refusals and not resolution.problems,
        f"{len(resolution.lines)} settings, each known and parsed",
        f"{len(refusals) + len(resolution.problems)} settings cannot be used, first:"
        f" {plain(first.removeprefix('recipe : '), 160)}",
    )
    two = any("two ways of drafting" in line.reason for line in refusals)
    method = resolution.settings.draft_method
    yield _finding(
        "R10", "must", not two, f"one way of drafting: {method}", "more than one way of drafting"
    )
    parts, stages = resolution.settings.layers_per_stage, resolution.settings.pipeline_stages
    if parts:
        split = "+".join(map(str, parts))
        yield _finding(
            "R11",
            "must",
            sum(parts) == model_layers and len(parts) == stages,
            f"{split} = {model_layers} layers in {stages} stages",
            f"{split} is {sum(parts)} layers in {len(parts)} stages; the model has"
            f" {model_layers} layers and the pipeline {stages} stages",
        )
    need = max(stages, len(resolution.settings.device_budgets_gib), 1)
    have = sum(h.device_count for h in recipe.hardware)
    yield _finding(
        "R12",
        "should",
        have >= need,
        f"{have} devices for a launch that needs {need}",
        f"the launch needs {need} devices, the document lists {have}",
    )
    total = sum(h.vram_gb * h.device_count for h in recipe.hardware)
    yield Finding(
        "R14",
        "must",
        True,
        f"{total:g} GiB over {have} devices; shown only: fit is decided per device",
    )


def check_quant(recipe: Recipe, checkpoint_bits: float | None) -> Finding:
    """R13: does a local checkpoint declare the document's rate."""
    stated = bits_of(recipe.model.quant if recipe.model else None)
    if stated is None:
        return Finding("R13", "should", True, "the document names no EXL3 rate")
    if checkpoint_bits is None:
        return Finding("R13", "should", True, f"{stated:g} bpw; no rate of a checkpoint to compare")
    return _finding(
        "R13",
        "should",
        abs(stated - checkpoint_bits) < 0.005,
        f"checkpoint and document agree on {stated:g} bpw",
        f"the document says {stated:g} bpw, the checkpoint {checkpoint_bits:g}; use the pinned one",
    )


def _traps(recipe: Recipe, resolution: Resolution) -> Iterator[Finding]:
    def note(rule: str, message: str) -> Finding:
        return Finding(rule, "note", True, message)

    s, limit = resolution.settings, recipe.config.max_context_len if recipe.config else None
    if resolution.profile == "mtp":
        yield note("X1", "this profile cannot start at the pinned commit; resolved from its table")
    if s.base_engine == "exllamav3":
        yield note("X2", "the launcher binds every interface; here only loopback")
        if limit is not None and limit == s.cache_tokens:
            yield note("X3", f"max_context_len {limit} is the cache; the limit is {s.max_seq_len}")
    rows = measurements(recipe.points, limits=[limit])
    if warm := sum(row.is_warm for row in rows):
        yield note("X4", f"{warm} first-token times are with a reused prefix; never cold times")
    if any(row.is_limit for row in rows):
        yield note("X5", f"a decode rate is filed at {limit} tokens; a claim, not a rate there")
    head = max((m.tok_s or 0.0 for _, m in recipe.claims), default=0.0)
    if recipe.speeds and 0 < (recipe.speeds.decode_tok_s or 0) < round(head, 1):
        yield note("X6", f"speeds.decode {recipe.speeds.decode_tok_s:g} is a median of mixed rows")
    for words, digest in fingerprints(recipe):
        yield note("X7", f"fingerprint {digest[:12]}…: {words}")
    if any(_LICENCE.search(a.pin or "") for a in recipe.artifacts if a.kind == "drafter") or any(
        _LICENCE.search(c.name) for c in recipe.credit
    ):
        yield note("X8", "the drafter's licence is CC BY-NC-ND 4.0, not the document's")
    if s.prefix_reuse != "off":
        yield note("X9", "prefix reuse is documented to change outputs there; here it does not")
    if s.base_engine == "exllamav3":
        yield note("X10", "its server refuses unknown request fields; ours accepts them")
    if marked := sum(marker_battery(p) is not None for p in recipe.points):
        yield note("X11", f"{marked} rows carry a marker instead of a context length")
    tags = recipe.raw.get("tags")
    if isinstance(tags, list) and "docker-build" in tags:
        yield note("X12", "the image cannot be downloaded; its settings are reproduced")


def fingerprints(recipe: Recipe) -> list[tuple[str, str]]:
    """(words before it, 64 hex digits) in revision.notes; evidence, kept as text."""
    revision = recipe.raw.get("revision")
    notes = revision.get("notes") if isinstance(revision, dict) else None
    if not isinstance(notes, str):
        return []
    text = notes[: 1 << 16]
    found = []
    for match in islice(_FINGERPRINT.finditer(text), 50):
        before = text[max(0, match.start() - 80) : match.start()].removesuffix("sha256:").split()
        found.append((plain(" ".join(before[-3:]), 80), match[0]))
    return found
