"""Which drafter a configuration gets, and what is refused."""

import json
from types import SimpleNamespace

import pytest

from tests.drafters.test_dflash2 import CONFIG, random_parts, save
from twining.config import DraftConfig
from twining.drafters.make import make_drafter, resolve_name, tap_layers
from twining.errors import CheckpointError, ConfigError


def fake_model(**changes):
    fields = {"hidden_size": 48, "vocab_size": 90, "num_layers": 8, "taps": (5, 1), "mtp": None}
    fields |= changes
    config = SimpleNamespace(**{k: fields[k] for k in ("hidden_size", "vocab_size", "num_layers")})
    return SimpleNamespace(config=config, tap_layers=fields["taps"], mtp=fields["mtp"])


@pytest.fixture
def folder(tmp_path):
    save(tmp_path, random_parts(1)[1])
    return tmp_path


def make(config, model):
    return make_drafter(config, model, max_seqs=2, max_chunk=64)


@pytest.mark.parametrize(
    ("drafter", "has_dir", "has_mtp", "num_draft", "expected"),
    [
        ("auto", False, False, 7, "ngram"),
        ("auto", False, True, 7, "mtp"),
        ("auto", True, True, 7, "dflash2"),
        ("auto", True, True, 0, "none"),
        ("dflash2", True, False, 7, "dflash2"),
        ("dflash2", False, False, 0, "none"),
        ("mtp", True, True, 2, "mtp"),
        ("ngram", True, True, 2, "ngram"),
        ("none", True, True, 7, "none"),
    ],
)
def test_resolution(folder, drafter, has_dir, has_mtp, num_draft, expected):
    config = DraftConfig(
        drafter=drafter, drafter_dir=folder if has_dir else None, num_draft_tokens=num_draft
    )
    assert resolve_name(config, has_mtp=has_mtp) == expected
    taps = tap_layers(config)
    assert taps == ((5, 1) if expected == "dflash2" else ())
    made = make(config, fake_model(mtp=object() if has_mtp else None, taps=taps))
    assert made.name == expected
    limit = {"none": 0, "dflash2": 5}.get(expected, num_draft)
    assert made.max_draft == limit
    assert made.needs_taps == (expected == "dflash2")
    assert made.needs_hidden == (expected == "mtp")


def test_unavailable_drafters_are_refused():
    with pytest.raises(ConfigError, match="needs drafter_dir"):
        resolve_name(DraftConfig(drafter="dflash2"), has_mtp=True)
    with pytest.raises(ConfigError, match="no MTP block"):
        make(DraftConfig(drafter="mtp"), fake_model())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 64}, "hidden_size is 48, the target has 64"),
        ({"vocab_size": 91}, "vocab_size is 90"),
        ({"taps": (1, 5)}, "target_layer_ids"),
        ({"num_layers": 9}, "num_target_layers is 8"),
    ],
)
def test_drafter_of_another_target(folder, change, message):
    with pytest.raises(ConfigError, match=message) as err:
        make(DraftConfig(drafter_dir=folder), fake_model(**change))
    assert "\n" not in str(err.value)


def test_full_attention_is_refused_before_the_model_is_loaded(folder):
    config = CONFIG | {"layer_types": ["sliding_attention", "full_attention"]}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="full-attention"):
        tap_layers(DraftConfig(drafter_dir=folder))


def test_folder_without_a_checkpoint(tmp_path):
    with pytest.raises(CheckpointError):
        tap_layers(DraftConfig(drafter_dir=tmp_path / "nowhere"))
