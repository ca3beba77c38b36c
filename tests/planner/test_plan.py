"""Placing, the largest context, remedies, headers as input, speed, and no torch."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from twining.checkpoint.headers import TensorInfo
from twining.errors import CheckpointError, ConfigError
from twining.planner.inventory import (
    drafter_from_config,
    from_config,
    from_folder,
    from_headers,
    read_headers_only,
)
from twining.planner.known import glm_5_3_flash, glm_5_3_flash_drafter, rates_of
from twining.planner.placing import slack_of
from twining.planner.plan import plan
from twining.planner.planes import all_planes
from twining.planner.report import COLORS, headline, html_report, plan_data, text_bar
from twining.planner.sizes import PlanRequest
from twining.planner.units import GIB, MIB, gib, parse_devices

CONFIG = glm_5_3_flash()
INVENTORY = from_config(CONFIG, rates_of(3.05))
DRAFTER = drafter_from_config(glm_5_3_flash_drafter(), 6)
MILLION = 1_048_576


def request(devices="2x64GB", context=MILLION, **options):
    defaults = {"inventory": INVENTORY, "drafter": DRAFTER, "max_draft": 7}
    return PlanRequest(devices=parse_devices(devices), context=context, **(defaults | options))


def test_a_million_tokens_at_q8_with_the_drafter_on_two_cards():
    found = plan(request())
    assert found.fits and found.largest_context == MILLION
    # On each card: 0.25 GiB of declared margin, and this much more.
    assert found.margin_bytes > 1.5 * GIB
    left = [device.left_bytes / GIB for device in found.devices]
    assert left == pytest.approx([1.57, 1.63], abs=0.02)
    # Estimates could grow by half and it would still fit.
    estimates = [
        sum(i.num_bytes for i in d.items if i.is_estimate and i.name != "margin")
        for d in found.devices
    ]
    assert all(e / 2 < d.left_bytes for e, d in zip(estimates, found.devices, strict=True))


def test_the_same_at_16_bits_or_in_float32_does_not():
    for fmt in ("fp16", "fp32"):
        found = plan(request(latent_format=fmt))
        assert not found.fits and "store latents as q8" in found.remedies
    assert plan(request(latent_format="fp16")).largest_context == 845_568  # as docs/recipes.md says


def test_planes_of_the_devices_add_up():
    found = plan(request(sequences=3, context=100_000))
    shape = found.request.shape()
    planes = all_planes(CONFIG, shape, has_mtp=False)
    named = {"latent cache": 0, "pooled index keys": 0, "index tails": 0, "KDA state": 0}
    for device in found.devices:
        for item in device.items:
            if item.name in named:
                named[item.name] += item.num_bytes
    assert tuple(named.values()) == (
        planes.latent,
        planes.index_keys,
        planes.index_slots,
        planes.kda,
    )
    weights = sum(
        item.num_bytes
        for device in found.devices
        for item in device.items
        if item.name.startswith("layers") or item.name == "head"
    )
    assert weights == INVENTORY.trunk_bytes - INVENTORY.embed.packed_bytes


@pytest.mark.parametrize(
    "devices", ["1x140GB", "2x64GB", "3x48GB", "4x40GB", "8x24GB", "80GB,64GB"]
)
def test_layers_are_whole_in_order_and_under_budget(devices):
    found = plan(request(devices, context=65_536))
    assert found.fits
    ends = [device.layers for device in found.devices]
    assert ends[0][0] == 0 and ends[-1][1] == 45
    assert all(a[1] == b[0] for a, b in pairwise(ends))
    for device in found.devices:
        assert device.left_bytes >= 0
        assert device.used_bytes == sum(item.num_bytes for item in device.items)


def test_largest_context_is_largest():
    base = request(latent_format="fp16", sequences=2)
    found = plan(replace(base, context=1000)).largest_context
    assert 0 < found < MILLION and found % 256 == 0
    assert slack_of(replace(base, context=found)) >= 0
    assert slack_of(replace(base, context=found + 256)) < 0


FAILING = [
    # devices, options, words that must be among the remedies
    ("2x62GB", {"latent_format": "fp16", "sequences": 2, "context": 400_000}, {"store", "run"}),
    ("2x61GB", {"context": 131_072, "split": (20, 25)}, {"split"}),
    ("2x61GB", {"context": 600_000}, {"leave", "lower"}),
    ("2x61GB", {"context": 450_000, "embed_on_host": False}, {"keep"}),
    ("2x40GB", {"context": 4096}, {"give"}),
]


@pytest.mark.parametrize(("devices", "options", "words"), FAILING)
def test_every_remedy_works_alone(devices, options, words):
    failing = request(devices, **options)
    found = plan(failing)
    assert not found.fits and "short" in found.reason
    by_word = {text.split()[0]: text for text in found.remedies}
    assert words <= set(by_word)
    if "lower" in by_word:
        tokens = int(by_word["lower"].split()[4])
        assert plan(replace(failing, context=tokens)).fits
        assert not plan(replace(failing, context=tokens + 256)).fits
    if "leave" in by_word:
        assert plan(replace(failing, with_vision=False)).fits
    if "keep" in by_word:
        assert plan(replace(failing, embed_on_host=True)).fits
    short = -slack_of(failing)
    roomy = tuple(replace(d, budget_bytes=d.budget_bytes + int(short) + 1) for d in failing.devices)
    assert plan(replace(failing, devices=roomy)).fits
    if "store" in by_word:
        assert plan(replace(failing, latent_format=by_word["store"].split()[-1])).fits
    for text in found.remedies:
        if text == "run without the drafter":
            assert plan(replace(failing, drafter=None)).fits
        elif text.startswith("run "):
            assert plan(replace(failing, sequences=int(text.split()[1]))).fits
    if "split" in by_word:
        counts = tuple(map(int, by_word["split"].split()[-1].split(",")))
        assert plan(replace(failing, split=counts)).fits


def test_stated_split():
    found = plan(request(context=225_280, split=(23, 22), drafter=None, max_draft=0))
    assert [d.layers for d in found.devices] == [(0, 23), (23, 45)]
    with pytest.raises(ConfigError, match="23,21 is 44 layers"):
        plan(request(split=(23, 21)))
    with pytest.raises(ConfigError, match="2 devices are given"):
        plan(request(split=(15, 15, 15)))


@pytest.mark.parametrize(
    "options",
    [
        {"context": 0},
        {"context": MILLION + 1},
        {"latent_format": "q5"},
        {"index_format": "q8"},
        {"sequences": 0},
        {"max_draft": 16},
    ],
)
def test_requests_without_meaning(options):
    with pytest.raises(ConfigError) as err:
        plan(request(**options))
    assert "\n" not in str(err.value)


@pytest.mark.parametrize(
    "text", ["", "64", "0GB", "2x", "ax64GB", "cpu:8GB,64GB", "2xcpu:8GB", "99x1GB"]
)
def test_devices_that_are_not_understood(text):
    if text == "64":
        assert parse_devices(text)[0].total_bytes == 64 * GIB
        return
    with pytest.raises(ConfigError, match="devices="):
        parse_devices(text)


def test_devices_in_words():
    assert [d.total_bytes for d in parse_devices("2x64GB, 512MiB")] == [64 * GIB] * 2 + [512 * MIB]
    (cpu,) = parse_devices("cpu:1.5GB")
    assert (cpu.kind, cpu.name, cpu.total_bytes) == ("cpu", "cpu", 3 * GIB // 2)
    assert gib(GIB) == "1.00 GiB" and gib(MIB) == "1.0 MiB" and gib(-2 * GIB) == "-2.00 GiB"


def big_tensors(path=Path("model.safetensors")):
    """More than 150,000 tensors, named as an EXL3 pack of the model names them."""
    tensors, at = {}, 0

    def add(name, dtype, shape, size):
        nonlocal at
        tensors[name] = TensorInfo(name, dtype, shape, path, at, at + size)
        at += size

    text = "model.language_model."
    add(f"{text}embed_tokens.weight", "BF16", (154880, 4096), 154880 * 4096 * 2)
    add(f"{text}norm.weight", "BF16", (4096,), 8192)
    add("lm_head.trellis", "I16", (256, 9680, 96), 256 * 9680 * 96 * 2)
    for layer in range(46):
        prefix = f"{text}layers.{layer}."
        add(f"{prefix}input_layernorm.weight", "BF16", (4096,), 8192)
        for expert in range(288):
            for part in ("gate_proj", "up_proj", "down_proj"):
                module = f"{prefix}mlp.experts.{expert}.{part}"
                add(f"{module}.trellis", "I16", (256, 128, 48), 256 * 128 * 48 * 2)
                add(f"{module}.suh", "F16", (4096,), 8192)
                add(f"{module}.svh", "F16", (2048,), 4096)
                add(f"{module}.mul1", "I32", (), 4)
    return tensors


def test_150_000_tensors_in_under_a_second():
    tensors = big_tensors()
    assert len(tensors) > 150_000
    began = time.process_time()
    inventory = from_headers(CONFIG, tensors)
    found = plan(request(inventory=inventory))
    assert time.process_time() - began < 1
    assert found.devices[0].layers[0] == 0
    assert inventory.file_bytes == sum(t.nbytes for t in tensors.values())
    assert inventory.mtp is not None and inventory.vision is None
    assert inventory.source == "headers"
    assert inventory.layers[7].packed_bytes == 8192 + 288 * 3 * (256 * 128 * 96 + 12288 + 4)


def test_headers_must_cover_every_layer():
    tensors = {k: v for k, v in big_tensors().items() if ".layers.17." not in k}
    with pytest.raises(CheckpointError, match="layer 17 has no tensors"):
        from_headers(CONFIG, tensors)
    with pytest.raises(CheckpointError, match="no embedding"):
        from_headers(CONFIG, {})


def test_redundant_fused_vision_copies_do_not_count():
    tensors = big_tensors()
    path = Path("v")
    for name, size in (("attn.qkv.weight", 100), ("attn.q_proj.trellis", 7)):
        full = f"model.visual.blocks.0.{name}"
        tensors[full] = TensorInfo(full, "U8", (size,), path, 0, size)
    assert from_headers(CONFIG, tensors).vision.packed_bytes == 7


def test_headers_only_file(golden, tmp_path):
    folder = golden / "glm5_next" / "tiny"
    raw = (folder / "model.safetensors").read_bytes()
    length = 8 + int.from_bytes(raw[:8], "little")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes(raw[:length])
    whole = from_folder(folder)
    assert from_headers(whole.config, read_headers_only(cut)) == whole
    cut.write_bytes(raw[: length - 10])
    with pytest.raises(CheckpointError, match="header is not whole"):
        read_headers_only(cut)
    for damage in (b"", b"\xff" * 64, (2).to_bytes(8, "little") + b"[]"):
        cut.write_bytes(damage)
        with pytest.raises(CheckpointError):
            read_headers_only(cut)


@pytest.mark.parametrize(
    "entry", [1, {}, {"dtype": "F99", "shape": []}, {"dtype": "F32", "shape": [-1]}]
)
def test_headers_only_entries_are_checked(tmp_path, entry):
    body = json.dumps({"a": entry}).encode()
    path = tmp_path / "x.safetensors"
    path.write_bytes(len(body).to_bytes(8, "little") + body)
    with pytest.raises(CheckpointError, match="damaged"):
        read_headers_only(path)


def test_reports():
    found = plan(request(latent_format="fp16"))
    assert headline(found).startswith("does not fit: 1048576 tokens at fp16; gpu")
    data = json.loads(json.dumps(plan_data(found)))
    assert data["fits"] is False and data["remedies"] == list(found.remedies)
    assert data["devices"][1]["used_bytes"] == found.devices[1].used_bytes
    bar = text_bar(plan(request()).devices[0], width=60)
    assert 56 <= sum(columns for _, columns in bar) <= 60
    page = html_report(found, "<script>alert(1)</script>", ["a & b"])
    assert "<script" not in page and "a &amp; b" in page
    assert "http" not in page and "src=" not in page and "url(" not in page
    svg = page[page.index("<svg") : page.index("</svg>") + 6]
    tree = ElementTree.fromstring(svg)
    boxes = [r for r in tree.iter() if r.tag.endswith("rect") and len(r)]
    assert len(boxes) == sum(len(d.items) for d in found.devices)
    assert len([r for r in tree.iter() if r.tag.endswith("line")]) == 2


def test_no_torch():
    """Planning and recipes import no torch."""
    code = (
        "import sys; import twining.planner.plan, twining.planner.report, twining.planner.roofline;"
        "import twining.recipes.fit, twining.recipes.examine, twining.recipes.publish;"
        "import twining.recipes.pins, twining.config_file, twining.cli.plan, twining.cli.recipe;"
        "import twining.cli.config_cmd; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_a_device_far_too_small_is_an_answer():
    """Parts larger than the budget leave nothing for layers; that is a no, not a fault."""
    for devices in ("cpu:1GB", "1GB", "2x1GB", "8x1GB", "3x0.001GB"):
        for context in (1, MILLION):
            found = plan(request(devices, context))
            assert not found.fits and found.largest_context == 0
            assert any(text.startswith("give each device") for text in found.remedies)
    assert "No context fits" in html_report(found, "t")


def test_colours_of_the_map_are_distinct():
    found = plan(request(with_mtp=True, embed_on_host=False))
    names = {item.name.split(" (")[0] for device in found.devices for item in device.items}
    assert len(names) <= len(set(COLORS)) == len(COLORS)
