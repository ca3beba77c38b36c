"""A plan as plain data for JSON, as lines of text, and as one HTML page with the memory map drawn.

The page is self-contained: no script, no address outside itself. Every foreign text is escaped.
"""

import html
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from twining.planner.plan import DevicePlan, Plan
from twining.planner.roofline import Floors
from twining.planner.sizes import Item
from twining.planner.units import GIB, MIB, gib

COLORS: Final = (
    "#3f6fb5",
    "#5b9a68",
    "#b5653f",
    "#8a63b0",
    "#2f8f9d",
    "#b08d2e",
    "#a34a6b",
    "#6b7a8f",
    "#7fa650",
    "#c47f5a",
    "#1f3d66",
    "#a9a9a9",
    "#d98cb3",
    "#5fc2b0",
    "#e0b84c",
    "#4a4a4a",
)
_WIDTH: Final = 900
_ROW: Final = 50
_LEFT: Final = 120  # of a row, for its labels


@dataclass(frozen=True, slots=True)
class Speed:
    """Floors of a verify step and a bound of prefill, per machine; None: not asked for."""

    machine: str
    rows: int
    floors: Floors
    stages: int
    prefill_tok_s: float


def plan_data(plan: Plan, speed: Speed | None = None) -> dict[str, Any]:
    """Plain data: bytes as integers, nothing rounded."""
    request = plan.request
    data: dict[str, Any] = {
        "fits": plan.fits,
        "reason": plan.reason or None,
        "remedies": list(plan.remedies),
        "context": request.context,
        "sequences": request.sequences,
        "latent_format": request.latent_format,
        "index_format": request.index_format,
        "largest_context": plan.largest_context,
        "margin_bytes": plan.margin_bytes,
        "weights_from": request.inventory.source,
        "disk_bytes": plan.disk_bytes,
        "host": [_item_data(item) for item in plan.host],
        "devices": [
            {
                "name": device.device.name,
                "kind": device.device.kind,
                "total_bytes": device.device.total_bytes,
                "budget_bytes": device.device.budget_bytes,
                "used_bytes": device.used_bytes,
                "left_bytes": device.left_bytes,
                "layers": list(device.layers),
                "items": [_item_data(item) for item in device.items],
            }
            for device in plan.devices
        ],
    }
    if speed is not None:
        data["floors"] = {
            "machine": speed.machine,
            "rows": speed.rows,
            "gigabytes": speed.floors.gigabytes,
            "memory_ms": speed.floors.memory_ms,
            "decode_ms": list(speed.floors.decode_ms),
            "prefill_tok_s": speed.prefill_tok_s,
        }
    return data


def _item_data(item: Item) -> dict[str, Any]:
    return {"name": item.name, "bytes": item.num_bytes, "is_estimate": item.is_estimate}


def headline(plan: Plan) -> str:
    """The answer in one line."""
    request = plan.request
    what = (
        f"{request.context} tokens x {request.sequences} at {request.latent_format}"
        if request.sequences > 1
        else f"{request.context} tokens at {request.latent_format}"
    )
    if plan.fits:
        return f"fits: {what}; the tightest device keeps {gib(plan.margin_bytes)} unused"
    return f"does not fit: {what}; {plan.reason}"


def scale_of(plan: Plan) -> tuple[int, str]:
    """Unit of the tables: MiB for a plan in which GiB would show zeros."""
    large = any(device.used_bytes >= 4 * GIB for device in plan.devices)
    return (GIB, "GiB") if large else (MIB, "MiB")


def text_bar(device: DevicePlan, width: int = 60) -> list[tuple[str, int]]:
    """(component, columns) of a bar `width` wide for the budget; a component gets at least one
    column while there is room."""
    budget = max(device.device.budget_bytes, device.used_bytes, 1)
    bar, done, spent = [], 0, 0
    for item in sorted(device.items, key=lambda item: -item.num_bytes):
        spent += item.num_bytes
        columns = max(round(spent / budget * width) - done, 0)
        if columns:
            bar.append((item.name, columns))
        done += columns
    return bar


def html_report(plan: Plan, title: str, notes: Sequence[str] = ()) -> str:
    """One self-contained page."""
    names = _names(plan)
    parts = [
        "<!doctype html><html lang=en><meta charset=utf-8>",
        f"<title>{html.escape(title)}</title>",
        "<style>body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:960px;"
        "padding:0 1rem;color:#222;background:#fff}table{border-collapse:collapse}"
        "td,th{padding:.15rem .8rem .15rem 0;text-align:left}td.n{text-align:right;"
        "font-variant-numeric:tabular-nums}.no{color:#a3262a}.yes{color:#2c7a3f}"
        "svg{width:100%;height:auto}.devices{display:flex;flex-wrap:wrap;gap:0 3rem}"
        "h1{font-size:1.5rem}h2{font-size:1.1rem}tr.sum>*{border-top:1px solid #999}</style>",
        f"<h1>{html.escape(title)}</h1>",
        f"<p class={'yes' if plan.fits else 'no'}><strong>{html.escape(headline(plan))}</strong>",
        f"<p>{_longest(plan)} On disk: {gib(plan.disk_bytes)}.",
        f"Weights taken from {plan.request.inventory.source}.",
        _svg(plan, names),
    ]
    if plan.remedies:
        changes = "".join(f"<li>{html.escape(text)}" for text in plan.remedies)
        parts.append(f"<h2>Any one of these makes it fit</h2><ul>{changes}</ul>")
    tables = "".join(_table(device, *scale_of(plan)) for device in plan.devices)
    parts.append(f"<div class=devices>{tables}</div>")
    host = "; ".join(f"{i.name} {gib(i.num_bytes)}" for i in plan.host)
    parts.append(f"<p>Host memory: {html.escape(host)}.")
    parts += [f"<p>{html.escape(note)}" for note in notes]
    exact = "the others are exact"
    if plan.request.inventory.source == "config":
        exact = "weights follow from the config and the pack's bit rates; cache planes are exact"
    parts.append(f"<p>Entries marked ~ are estimates; {exact}.</html>\n")
    return "\n".join(parts)


def _longest(plan: Plan) -> str:
    if not plan.largest_context:
        return "No context fits with these formats."
    return f"Largest context with these formats: {plan.largest_context} tokens."


def _names(plan: Plan) -> list[str]:
    """Component names over all devices, layers as one."""
    found: dict[str, None] = {}
    for device in plan.devices:
        for item in device.items:
            found.setdefault(_group(item.name), None)
    return list(found)


def _group(name: str) -> str:
    return "layers" if name.startswith("layers") else name


def _color(name: str, names: Sequence[str]) -> str:
    return COLORS[names.index(_group(name)) % len(COLORS)]


def _svg(plan: Plan, names: Sequence[str]) -> str:
    """A bar per device to one scale, the budget as a line, and a legend."""
    scale = max(max(d.used_bytes, d.device.budget_bytes) for d in plan.devices) / (
        _WIDTH - _LEFT - 10
    )
    legend_rows = -(-len(names) // 4)
    height = len(plan.devices) * _ROW + legend_rows * 22 + 20
    out = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="memory map">']
    for row, device in enumerate(plan.devices):
        y, x = row * _ROW + 6, float(_LEFT)
        label = f"{device.device.name}, layers {device.layers[0]}-{device.layers[1] - 1}"
        out.append(f'<text x="0" y="{y + 13}" font-size="12">{html.escape(label)}</text>')
        used = f"{gib(device.used_bytes)} of {gib(device.device.budget_bytes)}"
        out.append(f'<text x="0" y="{y + 27}" font-size="10">{used}</text>')
        for item in device.items:
            width = item.num_bytes / scale
            edge = min(0.8, width / 4)  # thin parts keep their colour
            words = f"{html.escape(item.name)} {gib(item.num_bytes)}"
            out.append(
                f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="30" stroke="#fff"'
                f' stroke-width="{edge:.2f}" fill="{_color(item.name, names)}">'
                f"<title>{words}</title></rect>"
            )
            x += width
        end = _LEFT + device.device.budget_bytes / scale
        out.append(
            f'<line x1="{end:.2f}" x2="{end:.2f}" y1="{y - 4}" y2="{y + 34}" stroke="#222"/>'
        )
    top = len(plan.devices) * _ROW + 16
    for i, name in enumerate(names):
        x, y = _LEFT + (i % 4) * 190, top + (i // 4) * 22
        out.append(
            f'<rect x="{x}" y="{y}" width="12" height="12" fill="{_color(name, names)}"/>'
            f'<text x="{x + 18}" y="{y + 11}" font-size="12">{html.escape(name)}</text>'
        )
    return "\n".join([*out, "</svg>"])


def _table(device: DevicePlan, unit: int, word: str) -> str:
    rows = "".join(
        f"<tr><td>{'~ ' if i.is_estimate else ''}{html.escape(i.name)}"
        f"<td class=n>{i.num_bytes / unit:.3f}<td class=n>{i.num_bytes:,}"
        for i in device.items
    )
    return (
        f"<div><h2>{html.escape(device.device.name)}: layers {device.layers[0]}"
        f" to {device.layers[1] - 1}</h2><table><tr><th>component<th>{word}<th>bytes{rows}"
        f"<tr class=sum><th>used<td class=n>{device.used_bytes / unit:.3f}"
        f"<td class=n>{device.used_bytes:,}"
        f"<tr><th>left<td class=n>{device.left_bytes / unit:.3f}<td class=n>{device.left_bytes:,}"
        "</table></div>"
    )
