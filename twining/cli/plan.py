"""`twining plan`: does it fit, how is it split, how far does the context go. Nothing is loaded."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twining.checkpoint.hf_config import load_config, load_json, parse_dflash2, parse_glm5_next
from twining.cli.options import DEMO, JsonOption
from twining.config import LatentFormat
from twining.demo.paths import demo_paths
from twining.engine.partition import parse_partition, resolve_partition
from twining.errors import ConfigError
from twining.planner.inventory import (
    DrafterInventory,
    Inventory,
    drafter_from_config,
    drafter_from_folder,
    from_config,
    from_folder,
    from_headers,
    read_headers_only,
)
from twining.planner.known import glm_5_3_flash, glm_5_3_flash_drafter, rates_of
from twining.planner.plan import Plan, plan
from twining.planner.report import (
    COLORS,
    Speed,
    headline,
    html_report,
    plan_data,
    scale_of,
    text_bar,
)
from twining.planner.roofline import MACHINES, Step, batch_experts, floors, prefill_rate
from twining.planner.sizes import PlanRequest
from twining.planner.stages import StageBytes, layer_costs, stage_line, stages_data, stages_of
from twining.planner.units import Device, gib, parse_devices
from twining.recipes.document import parse_document, plain, read_bytes
from twining.recipes.fit import TheirFit, plan_request, recipe_devices, their_fit
from twining.recipes.resolve import resolve
from twining.recipes.schema import Recipe, view
from twining.recipes.settings import Capabilities

PUBLISHED = "published"
DEFAULT_BITS = 3.05
_CELLS = "█▓▒░"


def plan_command(
    target: Annotated[
        str | None,
        typer.Argument(help="Model folder, config.json, headers file or recipe; else published."),
    ] = None,
    devices: Annotated[
        str, typer.Option(help="2x64GB, 24GB,12GB or cpu:64GB; default: the recipe's cards or cpu.")
    ] = "",
    context: Annotated[int, typer.Option(help="Tokens per sequence; 0 = the most stated.")] = 0,
    cache: Annotated[LatentFormat | None, typer.Option(help="Latent format.")] = None,
    sequences: Annotated[int, typer.Option(help="Sequences at once; 0 = as stated, or 1.")] = 0,
    drafter: Annotated[
        str, typer.Option(help="Folder of a DFlash2 drafter, `published`, or `none`.")
    ] = "",
    num_draft_tokens: Annotated[int, typer.Option(help="Drafts per step; -1 = as stated.")] = -1,
    split: Annotated[str, typer.Option(help="Layers per device or stage, such as 23,22.")] = "",
    stages: Annotated[int, typer.Option(help="Stages of a CPU run; 0 = as in the split.")] = 0,
    bits: Annotated[float, typer.Option(help="Rate when there are no headers.")] = DEFAULT_BITS,
    profile: Annotated[str | None, typer.Option(help="Profile of the recipe's launcher.")] = None,
    margin_mib: Annotated[int, typer.Option(help="Memory left unused per device.")] = 256,
    vision: Annotated[bool, typer.Option(help="Keep the vision tower on a device.")] = True,
    mtp: Annotated[bool | None, typer.Option(help="Load the MTP block.")] = None,
    embed_on_host: Annotated[bool, typer.Option(help="Embeddings in host memory.")] = True,
    machine: Annotated[
        str | None, typer.Option(help=f"Floors for a card: {', '.join(MACHINES)}.")
    ] = None,
    html: Annotated[Path | None, typer.Option(help="Write an HTML report to this file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether a model fits, from headers or a config alone. Exit status 1 if it does not."""
    changes = _changes(
        context=context or None,
        latent_format=cache,
        sequences=sequences or None,
        with_mtp=mtp,
        with_vision=vision,
        embed_on_host=embed_on_host,
    )
    if drafter or target == DEMO:
        changes["drafter"] = _drafter(drafter or DEMO)
    recipe = _recipe(target)
    notes: list[str] = []
    theirs: TheirFit | None = None
    if recipe is not None:
        request, theirs, notes = _recipe_request(recipe, devices, profile)
    elif profile is not None:
        raise ConfigError("--profile needs a recipe; give a recipe document as the target")
    else:
        request = _plain_request(_inventory(target, bits), devices)
    changes["margin_mib"] = max(margin_mib, request.margin_mib if recipe else 0)
    request = _with_drafts(replace(request, **changes), num_draft_tokens)
    if split and not request.is_cpu:
        request = replace(request, split=_split(split))
    divided = _stages(request, stages, split)
    notes += [stage_line(number, stage) for number, stage in enumerate(divided)]
    found = plan(request)
    speed = _speed(request, bits, machine)
    if html is not None:
        _write(html, html_report(found, _title(recipe, target), notes))
    if as_json:
        data = plan_data(found, speed) | _their_data(theirs)
        typer.echo(json.dumps(data | ({"stages": stages_data(divided)} if divided else {})))
    else:
        print_plan(found, notes, speed)
    if not found.fits:
        raise typer.Exit(1)


def _recipe_request(
    recipe: Recipe, devices: str, profile: str | None
) -> tuple[PlanRequest, TheirFit | None, list[str]]:
    """Our plan's request, the recipe engine's own answer, and what stands beside the result."""
    resolution = resolve(recipe, Capabilities(), profile=profile)
    stated = recipe_devices(recipe, resolution.settings) if recipe.hardware else ()
    places = _places(devices) or stated or (this_machine(),)
    theirs = their_fit(resolution.settings)
    notes = _notes(theirs, stated)
    if devices and stated:
        own = plan(plan_request(recipe, resolution, stated))
        notes.append(f"On the recipe's own cards and budgets ours {headline(own)}.")
    return plan_request(recipe, resolution, places), theirs, notes


def _changes(**options: Any) -> dict[str, Any]:
    """Options that were given; another context or count sizes the cache anew."""
    given = {name: value for name, value in options.items() if value is not None}
    if "context" in given or "sequences" in given:
        given["cache_tokens"] = 0
    return given


def _plain_request(inventory: Inventory, devices: str) -> PlanRequest:
    """A model without a recipe: its whole context, exact formats on a CPU, q8 on cards."""
    places = _places(devices) or (this_machine(),)
    is_cpu = places[0].kind == "cpu"
    return PlanRequest(
        inventory=inventory,
        devices=places,
        context=inventory.config.max_position_embeddings,
        latent_format="fp32" if is_cpu else "q8",
        index_format="fp32" if is_cpu else "fp16",
    )


def _places(text: str) -> tuple[Device, ...]:
    """Devices from the option; none for an empty one."""
    if text == "cpu":
        return (this_machine(),)
    return parse_devices(text) if text else ()


def _their_data(theirs: TheirFit | None) -> dict[str, Any]:
    if theirs is None:
        return {}
    answer = {
        "tokens": theirs.tokens,
        "fits": theirs.fits,
        "reason": theirs.reason or None,
        "largest_tokens": theirs.largest_tokens,
        "cache_bytes": theirs.cache_bytes,
    }
    return {"recipe_engine": answer}


def _recipe(target: str | None) -> Recipe | None:
    """The target as a recipe document, or None when it is something else."""
    path = Path(target) if target else None
    if path is None or path.suffix != ".json" or path.name == "config.json":
        return None
    document = parse_document(read_bytes(path), path.name)
    if "text_config" in document or "architectures" in document:
        return None
    return view(document)


def _inventory(target: str | None, bits: float) -> Inventory:
    """Parts from headers where there are any, else from a config at a rate."""
    if not 1 <= bits <= 16:
        raise ConfigError(f"bits={bits:g} is outside 1..16")
    if target is None or target == PUBLISHED:
        return from_config(glm_5_3_flash(), rates_of(bits))
    if target == DEMO:
        target = str(demo_paths()[0])
    path = Path(target).expanduser()
    if path.is_dir():
        if any(path.glob("*.safetensors")):
            return from_folder(path)
        return from_config(parse_glm5_next(load_config(path)), rates_of(bits))
    if not path.is_file():
        raise ConfigError(f"{plain(target, 80)}: no such folder or file; give a model or a recipe")
    if path.suffix == ".safetensors":
        config = path.parent / "config.json"
        parsed = parse_glm5_next(load_config(path.parent)) if config.is_file() else glm_5_3_flash()
        return from_headers(parsed, read_headers_only(path))
    return from_config(parse_glm5_next(load_json(path)), rates_of(bits))


def _drafter(name: str) -> DrafterInventory | None:
    if name == "none":
        return None
    if name == PUBLISHED:
        return drafter_from_config(glm_5_3_flash_drafter(), 16)
    if name == DEMO:
        own = demo_paths()[1]
        return drafter_from_folder(own) if own else None
    folder = Path(name).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"drafter {plain(name, 60)!r} is no folder; use a folder or `published`")
    if any(folder.glob("*.safetensors")):
        return drafter_from_folder(folder)
    return drafter_from_config(parse_dflash2(load_config(folder)), 16)


def _split(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if len(parts) > 64 or not all(p.isdecimal() and len(p) < 5 and int(p) > 0 for p in parts):
        raise ConfigError(f"split={plain(text, 60)!r} is not understood; write 23,22")
    return tuple(map(int, parts))


def _stages(request: PlanRequest, stages: int, split: str) -> tuple[StageBytes, ...]:
    """A CPU run divided as the engine divides it; none when one stage holds everything."""
    if not stages and not (split and request.is_cpu):
        return ()
    if not request.is_cpu:
        raise ConfigError(f"stages={stages}: cards are stages themselves; give --devices 2x64GB")
    stages = stages or len(parse_partition(split))
    if not 1 <= stages <= 64 or (split and len(parse_partition(split)) != stages):
        raise ConfigError(
            f"stages={stages} with split={plain(split, 60)!r} is no division into 1 to 64 stages;"
            " make them equal, or leave one out"
        )
    costs, first, last = layer_costs(request)
    return stages_of(
        request, resolve_partition(split, stages, costs, first_cost=first, last_cost=last)
    )


def _with_drafts(request: PlanRequest, asked: int) -> PlanRequest:
    """Drafts per step: as asked, as the recipe says, or what the drafter was trained for."""
    count = asked
    if asked < 0 and request.max_draft:
        count = request.max_draft if request.drafter or request.with_mtp else 0
    elif asked < 0:
        count = min(15, request.drafter.config.block_size - 1) if request.drafter else 0
    return replace(request, max_draft=count)


def this_machine() -> Device:
    """This computer: all of its memory, of which what is free now may be used."""
    import psutil  # type: ignore[import-untyped]

    memory = psutil.virtual_memory()
    return Device("cpu", "cpu", memory.total, memory.available)


def _speed(request: PlanRequest, bits: float, machine: str | None) -> Speed | None:
    if machine is None:
        return None
    if machine not in MACHINES:
        raise ConfigError(f"machine={plain(machine, 40)!r} is unknown; use {', '.join(MACHINES)}")
    config, rates, kind = request.inventory.config, rates_of(bits), MACHINES[machine]
    rows = 1 + request.max_draft
    step = Step(
        rows=rows * request.sequences,
        experts=batch_experts(config, request.sequences, rows),
        sequences=request.sequences,
        context=request.context,
    )
    found = floors(config, rates, step, kind)
    stages = len(request.devices)
    rate = prefill_rate(config, rates, kind, request.chunk_tokens) * stages
    return Speed(kind.name, step.rows, found, stages, rate)


def _title(recipe: Recipe | None, target: str | None) -> str:
    return f"Plan of {recipe.label if recipe else plain(target or 'the published model', 120)}"


def _notes(theirs: TheirFit | None, cards: tuple[Device, ...]) -> list[str]:
    """What stands beside our answer: the total, which is never the test, and their own load."""
    total = sum(device.total_bytes for device in cards)
    notes = [f"The recipe's cards have {gib(total)} in all; fit is decided per device."]
    if theirs is None:
        return notes
    answer = "loads" if theirs.fits else f"refused, {theirs.reason}"
    return [
        *notes,
        f"The recipe's own engine, {theirs.tokens} tokens on its own budgets: {answer};"
        f" its largest cache is {theirs.largest_tokens} tokens"
        f" ({gib(theirs.cache_bytes)} for {theirs.tokens}).",
    ]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"{path}: cannot be written ({err.strerror}); choose a folder") from None


def print_plan(found: Plan, notes: list[str], speed: Speed | None) -> None:
    """The answer, a bar and a table per device, and what would make it fit."""
    console = Console(highlight=False)
    console.print(Text(headline(found), style="bold green" if found.fits else "bold red"))
    names = list(dict.fromkeys(_group(i.name) for device in found.devices for i in device.items))
    for device in found.devices:
        bar = Text(f"{device.device.name:>5} ")
        for name, columns in text_bar(device):
            bar.append(
                _CELLS[names.index(_group(name)) % 4] * columns,
                style=COLORS[names.index(_group(name)) % len(COLORS)],
            )
        bar.append(
            f" {gib(device.used_bytes)} of {gib(device.device.budget_bytes)},"
            f" layers {device.layers[0]}-{device.layers[1] - 1}"
        )
        console.print(bar, no_wrap=True, crop=False, overflow="ignore")
    console.print(_table(found, names))
    longest = "no context fits"
    if found.largest_context:
        longest = f"largest context {found.largest_context} tokens"
    console.print(
        f"{longest}; disk {gib(found.disk_bytes)}; host "
        + ", ".join(f"{item.name} {gib(item.num_bytes)}" for item in found.host)
    )
    for note in notes:
        console.print(Text(note))
    if speed is not None:
        console.print(_speed_line(speed))
    for change in found.remedies:
        console.print(Text(f"it would fit if you {change}"))
    if not found.request.is_cpu:
        console.print("this version of the engine runs on a CPU; the plan is for graphics cards")


def _speed_line(speed: Speed) -> str:
    f = speed.floors
    return (
        f"{speed.machine}: a step of {speed.rows} rows moves {f.gigabytes:.1f} GB: at least"
        f" {f.memory_ms:.1f} ms of memory and {f.decode_ms[2]:.1f} ms of weight decoding"
        f" (20 per clock); prefill at most {speed.prefill_tok_s:.0f} tok/s on {speed.stages}"
    )


def _group(name: str) -> str:
    return "layers" if name.startswith("layers") else name


def _table(found: Plan, names: list[str]) -> Table:
    unit, word = scale_of(found)
    table = Table(title=f"{word} per device (~ estimate)", title_justify="left")
    table.add_column("component")
    for device in found.devices:
        table.add_column(device.device.name, justify="right")
    for number, name in enumerate(names):
        cells, mark = [], ""
        swatch = Text(_CELLS[number % 4], style=COLORS[number % len(COLORS)])
        for device in found.devices:
            items = [item for item in device.items if _group(item.name) == name]
            mark = "~ " if any(item.is_estimate for item in items) else mark
            cells.append(f"{sum(i.num_bytes for i in items) / unit:.3f}" if items else "")
        table.add_row(swatch.append(f" {mark}{name}", style="default"), *cells)
    table.add_section()
    table.add_row("  left", *(f"{d.left_bytes / unit:.3f}" for d in found.devices))
    return table
