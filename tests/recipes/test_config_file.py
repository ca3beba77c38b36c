"""TOML files mirror the configuration; every setting is documented; nothing is dropped."""

import dataclasses
import typing
from pathlib import Path

import pytest

from twining.config import EngineConfig, ServerConfig
from twining.config_docs import ALL_DOCS
from twining.config_file import (
    explain,
    parse_config,
    read_config,
    settings,
    values_of,
    write_config,
)
from twining.errors import ConfigError


def keys_of(cls, prefix=""):
    hints = typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if dataclasses.is_dataclass(hints[item.name]):
            yield from keys_of(hints[item.name], f"{prefix}{item.name}.")
        else:
            yield prefix + item.name


def test_every_setting_is_documented_and_no_other():
    keys = [*keys_of(EngineConfig), *keys_of(ServerConfig, "server.")]
    assert set(keys) == set(ALL_DOCS)
    assert [s.key for s in settings()] == keys
    assert all(s.doc.effect.endswith(".") for s in settings())


def test_defaults_are_those_of_the_dataclasses():
    engine, server = parse_config('model_dir = "m"')
    assert engine == EngineConfig(model_dir=Path("m")) and server == ServerConfig()
    values = values_of(engine, server)
    for setting in settings():
        if not setting.is_required and setting.key != "server.api_keys":
            assert values[setting.key] == setting.default, setting.key


FULL = """
model_dir = "models/x"
max_seq_len = 4096
threads = 2
[cache]
latent_format = "q6"
max_pages = 64
[draft]
drafter = "dflash2"
drafter_dir = "drafters/\\u00e9"
num_draft_tokens = 5
[schedule]
max_seqs = 3
decode_share = 0.25
queue_timeout_s = 7
[server]
port = 9001
aliases = ["a", "b \\" c"]
any_model = false
[server.sampling]
temperature = 0
"""


def test_round_trip():
    engine, server = parse_config(FULL)
    assert engine.cache.latent_format == "q6" and engine.draft.drafter_dir == Path("drafters/é")
    assert engine.schedule.queue_timeout_s == 7.0 and server.sampling.temperature == 0.0
    assert server.aliases == ("a", 'b " c')
    assert parse_config(write_config(engine, server)) == (engine, server)


def test_keys_of_the_api_are_not_shown():
    engine, server = parse_config('model_dir = "m"\n[server]\napi_keys = ["secret"]')
    assert server.api_keys == ("secret",)
    assert "secret" not in write_config(engine, server)
    assert values_of(engine, server)["server.api_keys"] == "1 set"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "model_dir is missing"),
        ('model_dir = "m"\nmax_seqlen = 5', "did you mean max_seq_len"),
        ('model_dir = "m"\n[cache]\nlatent_fromat = "q8"', "cache.latent_format"),
        ('model_dir = "m"\n[server.sampling]\ntemprature = 1', "server.sampling.temperature"),
        ('model_dir = "m"\n[zzz]\nqqq = 1', "config show"),
        ('model_dir = "m"\nmax_seq_len = "5"', "max_seq_len is '5'; whole number"),
        ('model_dir = "m"\nmax_seq_len = 5.0', "whole number is needed"),
        ('model_dir = "m"\nthreads = true', "threads is 'True'"),
        ('model_dir = "m"\ncache = 5', "write [cache]"),
        ('model_dir = "m"\nserver = 5', "write [server]"),
        ('model_dir = "m"\n[cache]\nlatent_format = "q5"', "fp32 | bf16"),
        ('model_dir = "m"\n[server]\naliases = "a"', "list of texts"),
        ('model_dir = "m"\n[server]\naliases = [1]', "list of texts"),
        ('model_dir = "m"\n[server]\nany_model = 1', "true or false"),
        ('model_dir = "m"\n[server.sampling]\ntemperature = nan', "temperature=nan"),
        ('model_dir = "m"\n[schedule]\nmax_batched_tokens = 100', "multiple of 64"),
        ('model_dir = ""', "folder is needed"),
        ("model_dir = 'm", "not valid TOML"),
        ("model_dir = " + "[" * 5000, "config"),
    ],
)
def test_nothing_is_dropped(text, words):
    with pytest.raises(ConfigError) as err:
        parse_config(text)
    assert words in str(err.value)
    assert "\n" not in str(err.value)


def test_folders_count_from_the_file(tmp_path):
    path = tmp_path / "x.toml"
    path.write_text(FULL, encoding="utf-8")
    engine, _ = read_config(path)
    assert engine.model_dir == tmp_path / "models/x"
    assert engine.draft.drafter_dir == tmp_path / "drafters/é"
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_config(path)
    with pytest.raises(ConfigError, match="no file"):
        read_config(tmp_path)


def test_explain():
    found = explain("cache.latent_format")
    assert found.type_name.startswith("fp32 | bf16") and found.default == "fp32"
    assert explain("model_dir").is_required
    with pytest.raises(ConfigError, match=r"did you mean server\.port"):
        explain("server.prot")
