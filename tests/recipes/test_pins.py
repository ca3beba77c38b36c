"""Pins of a document against local folders, what to fetch, and fetching only on request."""

import sys
import types
from pathlib import Path

import pytest

from twining.errors import CheckpointError, ConfigError
from twining.recipes.document import parse_document
from twining.recipes.pins import (
    Pin,
    check_folder,
    checkpoint_bits,
    fetch,
    local_revision,
    pin_of,
)
from twining.recipes.schema import view

COMMIT = "332ab457b709b7ba30dd9a448be5de03b80a7ac9"


def note_revision(folder, *commits):
    notes = folder / ".cache" / "huggingface" / "download"
    notes.mkdir(parents=True)
    for i, commit in enumerate(commits):
        (notes / f"f{i}.metadata").write_text(f"{commit}\netag\n1.0\n")


def test_pins_of_the_document(recipe_e):
    model, drafter = pin_of(recipe_e, "model_weights"), pin_of(recipe_e, "drafter")
    assert model == Pin("model_weights", "turboderp/GLM-5.3-Flash-exl3", COMMIT)
    assert drafter.repo == "incoai/GLM-5.3-Flash-DFlash2"
    assert model.command(Path("m")) == (
        f"hf download turboderp/GLM-5.3-Flash-exl3 --revision {COMMIT} --local-dir m"
    )


@pytest.mark.parametrize(
    "pointer",
    [
        "https://example.com/a/b",
        "https://huggingface.co/a/b; rm -rf x",
        "https://huggingface.co/../x",
        "https://huggingface.co/--flag/x",
        "file:///etc/passwd",
    ],
)
def test_other_pointers_are_no_repository(e_bytes, pointer):
    document = parse_document(e_bytes)
    document["artifacts"][0]["pointer"] = pointer
    assert pin_of(view(document), "model_weights") is None


def test_a_folder_at_the_pinned_commit(recipe_e, tmp_path):
    note_revision(tmp_path, COMMIT, COMMIT)
    assert local_revision(tmp_path) == COMMIT
    assert check_folder(recipe_e, "model_weights", tmp_path).is_ok


def test_a_folder_at_another_commit(recipe_e, tmp_path):
    note_revision(tmp_path, "a" * 40)
    found = check_folder(recipe_e, "model_weights", tmp_path)
    assert not found.is_ok and "aaaaaaaaaaaa" in found.message and COMMIT[:12] in found.message


@pytest.mark.parametrize("commits", [(), ("not a commit",), ("a" * 40, "b" * 40)])
def test_a_folder_that_names_no_single_commit(recipe_e, tmp_path, commits):
    if commits:
        note_revision(tmp_path, *commits)
    found = check_folder(recipe_e, "model_weights", tmp_path)
    assert found.is_ok and "names no commit" in found.message


def test_bits_that_a_folder_declares(tmp_path):
    with pytest.raises(CheckpointError):
        checkpoint_bits(tmp_path)
    for text, bits in (
        ('{"quantization_config": {"quant_method": "exl3", "bits": 3.05}}', 3.05),
        ('{"text_config": {"quantization_config": {"bits": 2.6}}}', 2.6),
        ('{"quantization_config": {"bits": true}}', None),
        ('{"quantization_config": [1]}', None),
        ("{}", 16.0),
    ):
        (tmp_path / "config.json").write_text(text)
        assert checkpoint_bits(tmp_path) == bits


def test_fetching_uses_the_full_commit(monkeypatch, tmp_path):
    calls = []
    client = types.ModuleType("huggingface_hub")
    client.snapshot_download = lambda **options: calls.append(options)
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    fetch(Pin("drafter", "a/b", COMMIT), tmp_path)
    assert calls == [{"repo_id": "a/b", "revision": COMMIT, "local_dir": str(tmp_path)}]
    for revision in (None, "332ab45"):
        with pytest.raises(ConfigError, match="no full commit"):
            fetch(Pin("drafter", "a/b", revision), tmp_path)
    assert len(calls) == 1


def test_a_failed_transfer_says_what_to_run(monkeypatch, tmp_path):
    def fail(**options):
        raise OSError("unreachable")

    client = types.ModuleType("huggingface_hub")
    client.snapshot_download = fail
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    with pytest.raises(ConfigError, match="hf download a/b"):
        fetch(Pin("drafter", "a/b", COMMIT), tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match="not installed"):
        fetch(Pin("drafter", "a/b", COMMIT), tmp_path)
