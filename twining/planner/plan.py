"""Does a model fit: bytes per device by component, the split, the largest context, and why not.

Source: design.md "Memory", spec/recipes.md 5.3. Fit is decided per device, from headers or a config
alone. Pure. No torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from twining.config import PAGE_SIZE
from twining.errors import ConfigError
from twining.planner.packing import largest
from twining.planner.placing import Placement, place, slack_of
from twining.planner.planes import CacheShape, PlaneBytes, state_bytes, trunk_layer
from twining.planner.sizes import (
    Item,
    PlanRequest,
    Problem,
    overhead_items,
    plane_items,
    size_up,
    weight_bytes,
)
from twining.planner.units import GIB, Device, gib


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePlan:
    """One device. layers: first and one past the last. left_bytes: of its budget, or negative."""

    device: Device
    layers: tuple[int, int]
    items: tuple[Item, ...]

    @property
    def used_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)

    @property
    def left_bytes(self) -> int:
        return self.device.budget_bytes - self.used_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer. largest_context: for these formats and sequences; 0 if not even one page fits."""

    request: PlanRequest
    fits: bool
    devices: tuple[DevicePlan, ...]
    host: tuple[Item, ...]
    disk_bytes: int
    largest_context: int
    reason: str  # why it does not fit, "" if it does
    remedies: tuple[str, ...] = field(default=())

    @property
    def margin_bytes(self) -> int:
        """What the tightest device has left."""
        return min(device.left_bytes for device in self.devices)


def _check_split(request: PlanRequest) -> None:
    num_layers, split = request.inventory.config.num_layers, request.split
    if split and (len(split) != len(request.devices) or sum(split) != num_layers):
        raise ConfigError(
            f"split={','.join(map(str, split))} is {sum(split)} layers on {len(split)} devices;"
            f" the model has {num_layers} layers and {len(request.devices)} devices are given"
        )


def _devices(
    request: PlanRequest, shape: CacheShape, problem: Problem, placed: Placement
) -> tuple[DevicePlan, ...]:
    config, plans, first = request.inventory.config, [], 0
    for at, device in enumerate(request.devices):
        last = first + placed.counts[at]
        parts = request.inventory.layers[first:last]
        planes = PlaneBytes()
        for part in parts:
            planes += trunk_layer(config, shape, part.index)
        items = [Item(f"layers ({last - first})", sum(weight_bytes(request, p) for p in parts))]
        singles = [
            s for s, where in zip(problem.singles, placed.singles, strict=True) if where == at
        ]
        items += [item for single in singles for item in single.items]
        items += [*plane_items(planes), *overhead_items(request)]
        plans.append(DevicePlan(device=device, layers=(first, last), items=tuple(_merged(items))))
        first = last
    return tuple(plans)


def _merged(items: Sequence[Item]) -> list[Item]:
    """One item per name, in order of first appearance; empty ones dropped."""
    sums: dict[str, Item] = {}
    for item in items:
        before = sums.get(item.name)
        total = item.num_bytes + (before.num_bytes if before else 0)
        sums[item.name] = Item(item.name, total, item.is_estimate)
    return [item for item in sums.values() if item.num_bytes]


def largest_context(request: PlanRequest) -> int:
    """Tokens per sequence (whole pages, at most the model's limit) that fit, 0 if none."""
    limit = request.inventory.config.max_position_embeddings

    def fits(pages: int) -> bool:
        trial = replace(request, context=min(pages * PAGE_SIZE, limit), cache_tokens=0)
        return pages > 0 and slack_of(trial) >= 0

    found = largest(fits, -(-limit // PAGE_SIZE))
    return min(found * PAGE_SIZE, limit)


def plan(request: PlanRequest) -> Plan:
    """Plan a request. Raises ConfigError for requests without meaning; "no" is a result."""
    _check_split(request)
    limit = request.inventory.config.max_position_embeddings
    if request.context > limit:
        raise ConfigError(
            f"context={request.context} exceeds the model's {limit} positions; use {limit} or less"
        )
    shape = request.shape()
    problem = size_up(request, shape)
    placed = place(request, problem)
    devices = _devices(request, shape, problem, placed)
    fits = all(device.left_bytes >= 0 for device in devices)
    reason, remedies = "", tuple[str, ...]()
    if not fits:
        reason = _reason(devices)
        remedies = tuple(_remedies(request))
    return Plan(
        request=request,
        fits=fits,
        devices=devices,
        host=tuple(_host(request, shape)),
        disk_bytes=request.inventory.file_bytes
        + (request.drafter.part.packed_bytes if request.drafter else 0),
        largest_context=largest_context(request),
        reason=reason,
        remedies=remedies,
    )


def _host(request: PlanRequest, shape: CacheShape) -> list[Item]:
    """Host memory of a run on cards; on a CPU everything is on the one device already."""
    items = []
    if not request.is_cpu and request.embed_on_host and request.inventory.head is not None:
        items.append(Item("embeddings", request.inventory.embed.packed_bytes))
    one = state_bytes(request.inventory.config, shape)
    items.append(Item("one snapshot of a sequence", one))
    budget = round(request.checkpoint_gib * GIB)
    items.append(Item(f"budget of prefix checkpoints (room for {budget // one})", budget))
    return items


def _reason(devices: Sequence[DevicePlan]) -> str:
    worst = min(devices, key=lambda device: device.left_bytes)
    return (
        f"{worst.device.name} needs {gib(worst.used_bytes)}, its budget is"
        f" {gib(worst.device.budget_bytes)}: {gib(-worst.left_bytes)} short"
    )


def _remedies(request: PlanRequest) -> Iterator[str]:
    """Single changes, smallest first, each of which makes the request fit."""
    longest = largest_context(request)
    if longest:
        yield f"lower the context to {longest} tokens"
    smaller = ["fp16", "q8", "q6", "q4"]
    at = smaller.index(request.latent_format) if request.latent_format in smaller else -1
    for fmt in smaller[at + 1 :]:
        if slack_of(replace(request, latent_format=fmt)) >= 0:
            yield f"store latents as {fmt}"
            break
    if request.split and slack_of(replace(request, split=())) >= 0:
        free = replace(request, split=())
        counts = place(free, size_up(free, free.shape())).counts
        yield f"split the layers {','.join(map(str, counts))}"
    on_host = replace(request, embed_on_host=True)
    if not request.is_cpu and not request.embed_on_host and slack_of(on_host) >= 0:
        yield "keep the embeddings in host memory"
    if request.with_vision and slack_of(replace(request, with_vision=False)) >= 0:
        yield "leave the vision tower out (text only)"
    if request.drafter is not None and slack_of(replace(request, drafter=None)) >= 0:
        yield "run without the drafter"
    fewer = largest(
        lambda n: n > 0 and slack_of(replace(request, sequences=n, cache_tokens=0)) >= 0,
        request.sequences - 1,
    )
    if fewer:
        yield f"run {fewer} sequence{'s' if fewer > 1 else ''} at once"
    yield from _more_memory(request)


def _more_memory(request: PlanRequest) -> Iterator[str]:
    """How much larger every device must be."""
    short = -slack_of(request)
    if short > 0:
        yield f"give each device {gib(short)} more"
