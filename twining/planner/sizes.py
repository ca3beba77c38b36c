"""A plan's request and the sizes it asks for: weights, planes, workspace, what may go anywhere.

Source: design.md "Memory", spec/performance.md 4.7. Weights and planes are exact; workspace,
runtime and graphs are estimates and marked so. Pure. No torch.
"""

from dataclasses import dataclass
from typing import Final

from twining.config import PAGE_SIZE, PREFILL_BLOCK, CacheConfig
from twining.errors import ConfigError
from twining.planner.inventory import DrafterInventory, Inventory, Part
from twining.planner.planes import CacheShape, PlaneBytes, attention_layer, ring_bytes, trunk_layer
from twining.planner.units import GIB, MIB, Device

GPU_RUNTIME_BYTES: Final = GIB // 2  # driver context and library handles; estimate
GPU_GRAPH_BYTES: Final = GIB // 4  # captured decode steps; estimate
CPU_RUNTIME_BYTES: Final = 3 * GIB // 8  # interpreter and torch; estimate


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What is to run where. cache_tokens: of all sequences together, 0 = sequences x context."""

    inventory: Inventory
    devices: tuple[Device, ...]
    context: int
    sequences: int = 1
    drafter: DrafterInventory | None = None
    max_draft: int = 0
    latent_format: str = "q8"
    index_format: str = "fp16"
    chunk_tokens: int = 2048
    cache_tokens: int = 0
    split: tuple[int, ...] = ()  # layers per device; empty = chosen
    embed_on_host: bool = True  # rows are gathered by token, the table need not be on a device
    with_mtp: bool = False
    with_vision: bool = True
    margin_mib: int = 256
    checkpoint_gib: float = CacheConfig().checkpoint_gib  # host memory for reused prefixes

    @property
    def is_cpu(self) -> bool:
        return self.devices[0].kind == "cpu"

    def shape(self) -> CacheShape:
        """Planes for the request. Raises ConfigError for impossible sizes."""
        if self.context < 1 or self.context > 1 << 40:
            raise ConfigError(f"context={self.context} is not a number of tokens; use 1 or more")
        pages = -(-self.context // PAGE_SIZE) * self.sequences
        if self.cache_tokens:
            pages = -(-self.cache_tokens // PAGE_SIZE)
        return CacheShape(
            num_pages=pages,
            max_seqs=self.sequences,
            max_draft=self.max_draft,
            latent_format=self.latent_format,
            index_format=self.index_format,
        )


@dataclass(frozen=True, slots=True)
class Item:
    """Bytes of one component on one device."""

    name: str
    num_bytes: int
    is_estimate: bool = False


def weight_bytes(request: PlanRequest, part: Part) -> int:
    return part.values * 4 if request.is_cpu else part.packed_bytes


def workspace_terms(request: PlanRequest) -> list[Item]:
    """Scratch of the widest step on a device, by term; estimates.

    Letters: T rows of a step, B rows of a scoring block, W latents gathered per row.
    """
    config = request.inventory.config
    T = PREFILL_BLOCK if request.is_cpu else min(request.chunk_tokens, max(request.context, 64))
    B, W = PREFILL_BLOCK, config.index_topk + config.index_pool
    value = 4 if request.is_cpu else 2
    experts = T * config.num_experts_per_tok
    terms = [
        ("residual streams", 3 * T * config.hc_mult * config.hidden_size * 4),
        ("KDA projections", T * 5 * config.kda_width * 4),
        (
            "expert activations",
            experts * (2 * config.moe_intermediate_size + config.hidden_size) * value,
        ),
        ("index scores", B * -(-request.context // config.index_pool) * 4),
        ("gathered latents", B * W * config.kv_lora_rank * 4),
    ]
    return [Item(name, num_bytes, is_estimate=True) for name, num_bytes in terms]


def overhead_items(request: PlanRequest) -> list[Item]:
    """What every device needs besides weights and planes."""
    items = [Item("workspace", sum(i.num_bytes for i in workspace_terms(request)), True)]
    if request.is_cpu:
        items.append(Item("runtime", CPU_RUNTIME_BYTES, True))
    else:
        items.append(Item("runtime", GPU_RUNTIME_BYTES, True))
        items.append(Item("step graphs", GPU_GRAPH_BYTES, True))
    items.append(Item("margin", request.margin_mib * MIB, True))
    return items


def _logits_bytes(request: PlanRequest) -> int:
    rows = request.sequences * (1 + request.max_draft)
    return rows * request.inventory.config.vocab_size * 4


@dataclass(frozen=True, slots=True)
class Single:
    """A part that may go to any device, with the planes that belong to it."""

    name: str
    items: tuple[Item, ...]

    @property
    def num_bytes(self) -> int:
        return sum(item.num_bytes for item in self.items)


def single_parts(request: PlanRequest, shape: CacheShape) -> list[Single]:
    inventory = request.inventory
    head = weight_bytes(request, inventory.head) if inventory.head else 0
    found = [
        Single(
            "head",
            (
                Item("head", head + weight_bytes(request, inventory.final)),
                Item("logits", _logits_bytes(request), True),
            ),
        )
    ]
    embed_here = request.is_cpu or not request.embed_on_host or inventory.head is None
    if embed_here:
        found.append(Single("embed", (Item("embeddings", weight_bytes(request, inventory.embed)),)))
    # The float32 engine of this version loads the MTP block with the trunk and no tower.
    if inventory.mtp is not None and (request.with_mtp or request.is_cpu):
        planes = attention_layer(inventory.config, shape, has_index=True)
        items = (Item("MTP block", weight_bytes(request, inventory.mtp)), *plane_items(planes))
        found.append(Single("mtp", items))
    if inventory.vision is not None and request.with_vision and not request.is_cpu:
        found.append(Single("vision", (Item("vision", weight_bytes(request, inventory.vision)),)))
    if request.drafter is not None:
        ring = ring_bytes(
            request.drafter.config,
            max_seqs=request.sequences,
            max_chunk=request.chunk_tokens,
            value_bytes=4 if request.is_cpu else 2,
        )
        drafter = Item("drafter", weight_bytes(request, request.drafter.part))
        found.append(Single("drafter", (drafter, Item("drafter ring", ring))))
    return found


def plane_items(planes: PlaneBytes) -> tuple[Item, ...]:
    named = (
        ("latent cache", planes.latent),
        ("pooled index keys", planes.index_keys),
        ("index tails", planes.index_slots),
        ("KDA state", planes.kda),
    )
    return tuple(Item(name, num) for name, num in named if num)


@dataclass(slots=True)
class Problem:
    """Sizes of a request, ready for placing."""

    budgets: list[int]  # after overhead, per device
    layers: list[int]
    singles: list[Single]


def size_up(request: PlanRequest, shape: CacheShape) -> Problem:
    config = request.inventory.config
    overhead = sum(item.num_bytes for item in overhead_items(request))
    layers = [
        weight_bytes(request, part) + trunk_layer(config, shape, part.index).total
        for part in request.inventory.layers
    ]
    budgets = [device.budget_bytes - overhead for device in request.devices]
    return Problem(budgets, layers, single_parts(request, shape))
