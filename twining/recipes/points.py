"""Rows of a recipe as measurements: what was measured, at which real length, by whom.

Source: spec/recipes.md section 3 ("context_len is not always a context length"), R8; bench.md 9.
Battery cells carry a marker instead of a length, because rows must be unique; a marker never
becomes a length here. No torch.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median_low
from typing import Final, Literal

from twining.recipes.schema import PerfPoint

Kind = Literal["decode", "prefill", "ttft"]

BATTERIES: Final = ("structured", "code", "json", "prose")
MARKERS: Final = {1024 + 10240 * k: name for k, name in enumerate(BATTERIES)}
_WARM = re.compile(r"\b(?:cached|reuse|reused|warm|repeat|repeated)\b|prefix-KV", re.IGNORECASE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """One quantity. value: tokens/s, or ms for ttft. context_tokens None: a battery cell."""

    kind: Kind
    value: float
    claimed_by: str
    concurrency: int | None
    battery: str | None = None
    context_tokens: int | None = None
    is_limit: bool = False  # filed at the service's own limit: a claim, not a length (X5)
    is_warm: bool = False  # first token with a reused prefix (X4)


def marker_battery(point: PerfPoint) -> str | None:
    """The battery that a row's context_len stands for, or None for a real length."""
    if point.decode_tok_s is None or point.concurrency is None:
        return None
    return MARKERS.get(point.context_len)


def measurements(
    points: Iterable[PerfPoint], *, limits: Iterable[int | None] = ()
) -> tuple[Measurement, ...]:
    """Every quantity of every row. limits: context lengths that the document claims as limits."""
    claimed = {limit for limit in limits if limit is not None}
    found = []
    for point in points:
        battery = marker_battery(point)
        for kind in ("decode", "prefill", "ttft"):
            value = getattr(point, "ttft_ms" if kind == "ttft" else f"{kind}_tok_s")
            if value is None:
                continue
            found.append(
                Measurement(
                    kind=kind,
                    value=value,
                    claimed_by=point.claimed_by,
                    concurrency=point.concurrency,
                    battery=battery,
                    context_tokens=None if battery else point.context_len,
                    is_limit=kind == "decode" and point.context_len in claimed,
                    is_warm=kind == "ttft" and _WARM.search(point.notes or "") is not None,
                )
            )
    return tuple(found)


def by_context(rows: Iterable[Measurement], kind: Kind) -> list[tuple[int, float]]:
    """(tokens, value) of single-stream rows at a real length, for a chart; never a marker, never a
    limit, never a warm first token."""
    return sorted(
        (row.context_tokens, row.value)
        for row in rows
        if row.kind == kind
        and row.context_tokens is not None
        and not row.is_limit
        and not row.is_warm
        and row.concurrency in (None, 1)
    )


def headline(points: Iterable[PerfPoint]) -> tuple[float, float]:
    """(decode, prefill) of `speeds` by rule R8: lower medians, one decimal, 0 for none."""
    rows = list(points)
    decode = [p.decode_tok_s for p in rows if p.decode_tok_s is not None and p.concurrency == 1]
    prefill = [p.prefill_tok_s for p in rows if p.prefill_tok_s is not None]
    return (
        round(median_low(decode), 1) if decode else 0.0,
        round(median_low(prefill), 1) if prefill else 0.0,
    )
