"""Bytes of each stage of a CPU run: what the engine's stages hold of the one memory they share.

Source: design.md "Process model". A stage holds its layers and their cache planes; the embedding is
on the first, head, final norm, MTP block and drafter are on the last. Exact. Pure. No torch.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from twining.planner.planes import PlaneBytes, attention_layer, ring_bytes, trunk_layer
from twining.planner.sizes import PlanRequest, weight_bytes
from twining.planner.units import gib


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBytes:
    """layers: first and one past the last. drafter: weights and ring, 0 where it is not."""

    layers: tuple[int, int]
    weights: int
    planes: PlaneBytes
    drafter: int

    @property
    def total(self) -> int:
        return self.weights + self.planes.total + self.drafter


def layer_costs(request: PlanRequest) -> tuple[list[int], int, int]:
    """What the engine balances: bytes of each layer, what the first stage and the last hold more
    (MTP block included)."""
    parts = request.inventory
    head = weight_bytes(request, parts.head or parts.embed)
    mtp = weight_bytes(request, parts.mtp) if parts.mtp else 0
    costs = [weight_bytes(request, part) for part in parts.layers]
    return costs, weight_bytes(request, parts.embed), head + mtp


def stages_of(request: PlanRequest, partition: Sequence[int]) -> tuple[StageBytes, ...]:
    """Bytes per stage for layers per stage that add up to the model's; weights are float32."""
    parts, shape = request.inventory, request.shape()
    found: list[StageBytes] = []
    first = 0
    for count in partition:
        last, planes = first + count, PlaneBytes()
        weights = sum(weight_bytes(request, part) for part in parts.layers[first:last])
        for index in range(first, last):
            planes += trunk_layer(parts.config, shape, index)
        if first == 0:
            weights += weight_bytes(request, parts.embed)
        drafter = 0
        if last == len(parts.layers):
            ends = (parts.final, parts.head, parts.mtp)
            weights += sum(weight_bytes(request, part) for part in ends if part is not None)
            if parts.mtp is not None:
                planes += attention_layer(parts.config, shape, has_index=True)
            drafter = _drafter_bytes(request)
        found.append(
            StageBytes(layers=(first, last), weights=weights, planes=planes, drafter=drafter)
        )
        first = last
    return tuple(found)


def _drafter_bytes(request: PlanRequest) -> int:
    if request.drafter is None:
        return 0
    ring = ring_bytes(
        request.drafter.config, max_seqs=request.sequences, max_chunk=request.chunk_tokens
    )
    return weight_bytes(request, request.drafter.part) + ring


def stage_line(number: int, stage: StageBytes) -> str:
    """A stage in one line."""
    first, last = stage.layers
    drafter = f", drafter {gib(stage.drafter)}" if stage.drafter else ""
    return (
        f"stage {number}: layers {first}-{last - 1}, weights {gib(stage.weights)},"
        f" planes {gib(stage.planes.total)}{drafter}"
    )


def stages_data(stages: Sequence[StageBytes]) -> list[dict[str, Any]]:
    """Plain data for JSON; bytes as integers."""
    return [asdict(stage) | {"layers": list(stage.layers)} for stage in stages]
