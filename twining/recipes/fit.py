"""A resolved recipe on devices: as its own engine loads it, and as ours does, side by side.

Source: spec/recipes.md 5.3: the total of the cards is never the test. The recipe engine's answer
uses sizes calibrated on what the recipe publishes; ours uses headers, or the config at its rate.
"""

from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Final

from twining.errors import ConfigError
from twining.planner.inventory import (
    DrafterInventory,
    Inventory,
    drafter_from_config,
    drafter_from_folder,
    from_config,
    from_folder,
)
from twining.planner.known import glm_5_3_flash, glm_5_3_flash_drafter, rates_of
from twining.planner.packing import Layout, calibrated_layout
from twining.planner.sizes import PlanRequest
from twining.planner.units import GIB, MAX_DEVICES, Device
from twining.recipes.checks import bits_of
from twining.recipes.resolve import Resolution
from twining.recipes.schema import Recipe
from twining.recipes.settings import Settings

OWN_MARGIN_MIB: Final = 256
CONVERTED_DRAFTER_BITS: Final = 6.0


@dataclass(frozen=True, slots=True)
class TheirFit:
    """What the recipe's own engine does with a cache of that size. reason: "" if it loads."""

    tokens: int
    fits: bool
    reason: str
    largest_tokens: int
    cache_bytes: int


def their_layout(settings: Settings) -> Layout | None:
    """ExLlamaV3's load of the recipe, or None for another engine or an unknown layout."""
    fmt = settings.cache_format or "fp16"
    budgets = settings.device_budgets_gib
    if settings.base_engine != "exllamav3" or len(budgets) < 2 or fmt not in ("q8", "fp16"):
        return None
    return calibrated_layout(
        cache_format=fmt, head_first=settings.head_device == 0, budgets_gib=budgets
    )


def their_fit(settings: Settings) -> TheirFit | None:
    """The recipe's own question, answered without loading anything."""
    layout, tokens = their_layout(settings), settings.cache_tokens
    if layout is None or tokens is None:
        return None
    most = layout.largest_tokens()
    refusal = layout.pack(tokens).refusal
    reason = "" if refusal is None else refusal.reason(most)
    return TheirFit(tokens, refusal is None, reason, most, layout.cache_bytes(tokens))


def recipe_devices(recipe: Recipe, settings: Settings) -> tuple[Device, ...]:
    """The recipe's cards with its budgets or its share of them. Raises ConfigError for none."""
    cards = chain.from_iterable(repeat(h.vram_gb, h.device_count) for h in recipe.hardware)
    sizes = list(islice(cards, MAX_DEVICES))
    if not sizes:
        raise ConfigError(f"recipe {recipe.label} lists no cards; give --devices such as 2x64GB")
    share = settings.device_memory_fraction or 1.0
    devices = []
    for i, size in enumerate(sizes):
        total = int(size * GIB)
        budget = int(total * share)
        if i < len(settings.device_budgets_gib):
            budget = min(budget, int(settings.device_budgets_gib[i] * GIB))
        devices.append(Device(f"gpu{i}", "gpu", total, budget))
    return tuple(devices)


def recipe_inventory(recipe: Recipe, model_dir: Path | None) -> Inventory:
    """The model's parts: a folder's headers, or the published config at the recipe's rate."""
    if model_dir is not None:
        return from_folder(model_dir)
    bits = bits_of(recipe.model.quant if recipe.model else None)
    if bits is None:
        raise ConfigError(
            f"recipe {recipe.label} names no EXL3 rate; give the model folder with --model"
        )
    return from_config(glm_5_3_flash(), rates_of(bits))


def recipe_drafter(settings: Settings, drafter_dir: Path | None) -> DrafterInventory | None:
    """The drafter's parts: a folder's headers, or the published one as the recipe holds it."""
    if settings.draft_method != "dflash2":
        return None
    if drafter_dir is not None:
        return drafter_from_folder(drafter_dir)
    bits = 16.0 if settings.draft_weights == "bf16" else CONVERTED_DRAFTER_BITS
    return drafter_from_config(glm_5_3_flash_drafter(), bits)


def plan_request(
    recipe: Recipe,
    resolution: Resolution,
    devices: tuple[Device, ...],
    *,
    model_dir: Path | None = None,
    drafter_dir: Path | None = None,
) -> PlanRequest:
    """Our engine's plan of a resolved recipe. Raises ConfigError, CheckpointError."""
    s = resolution.settings
    inventory = recipe_inventory(recipe, model_dir)
    limit = inventory.config.max_position_embeddings
    split = s.layers_per_stage if len(s.layers_per_stage) == len(devices) else ()
    if sum(split) != inventory.config.num_layers:
        split = ()
    is_cpu = devices[0].kind == "cpu"
    return PlanRequest(
        inventory=inventory,
        devices=devices,
        context=min(s.max_seq_len or limit, limit),
        sequences=s.max_running or 1,
        drafter=recipe_drafter(s, drafter_dir),
        max_draft=min(s.num_draft_tokens or 0, 15),
        latent_format=s.cache_format or ("bf16" if s.dtype == "bfloat16" else "fp16"),
        index_format="fp32" if is_cpu else "fp16",
        chunk_tokens=s.prefill_chunk or s.token_budget or 2048,
        cache_tokens=s.cache_tokens or 0,
        split=split,
        with_mtp=s.draft_method == "mtp",
        margin_mib=max(OWN_MARGIN_MIB, s.margin_mib or 0),
    )
