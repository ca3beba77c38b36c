"""The configuration as a TOML file: keys mirror the dataclasses of config.py one to one.

Top-level keys and the tables cache, draft and schedule are EngineConfig's; the table server is
ServerConfig's. Unknown keys and wrong types are errors that name the key. No torch.
"""

import dataclasses
import difflib
import json
import tomllib
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final, Literal, Union, get_args, get_origin, get_type_hints

from twining.config import EngineConfig, ServerConfig
from twining.config_docs import ALL_DOCS, SettingDoc
from twining.errors import ConfigError

MAX_FILE_BYTES: Final = 1 << 20
_SERVER: Final = "server"


@dataclasses.dataclass(frozen=True, slots=True)
class Setting:
    """One key. default None with is_required: there is none."""

    key: str
    type_name: str
    default: Any
    is_required: bool
    doc: SettingDoc


def _leaves(cls: type, prefix: str = "") -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    hints = get_type_hints(cls)
    for item in dataclasses.fields(cls):
        hint = hints[item.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from _leaves(hint, f"{prefix}{item.name}.")
        else:
            yield prefix + item.name, hint, item


def _all_leaves() -> Iterator[tuple[str, Any, dataclasses.Field[Any]]]:
    yield from _leaves(EngineConfig)
    yield from _leaves(ServerConfig, f"{_SERVER}.")


def type_name(hint: Any) -> str:
    """A type in words."""
    if get_origin(hint) is Literal:
        return " | ".join(map(str, get_args(hint)))
    if get_origin(hint) in (Union, types.UnionType):
        return " or nothing".join(type_name(a) for a in get_args(hint) if a is not type(None)) + (
            " or nothing"
        )
    if get_origin(hint) is tuple:
        return "list of texts"
    names = {int: "whole number", float: "number", bool: "true or false", str: "text"}
    return names.get(hint, "folder")


def settings() -> tuple[Setting, ...]:
    """Every key in file order, with type, default, unit and effect."""
    found = []
    for key, hint, item in _all_leaves():
        is_required = (
            item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING
        )
        default = None if is_required else item.default
        found.append(Setting(key, type_name(hint), default, is_required, ALL_DOCS[key]))
    return tuple(found)


def explain(key: str) -> Setting:
    """One setting. Raises ConfigError with the nearest names for an unknown key."""
    for setting in settings():
        if setting.key == key:
            return setting
    raise _unknown(key)


def _unknown(key: str) -> ConfigError:
    near = difflib.get_close_matches(key[:200], list(ALL_DOCS), n=2, cutoff=0.5)
    hint = f"; did you mean {' or '.join(near)}?" if near else "; see `twining config show`"
    return ConfigError(f"unknown setting {key[:80]!r}{hint}")


def parse_config(text: str, *, where: str = "config") -> tuple[EngineConfig, ServerConfig]:
    """Both configurations from TOML text. Raises ConfigError for anything that is not honoured."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as err:
        raise ConfigError(f"{where}: not valid TOML: {err}") from None
    except RecursionError:
        raise ConfigError(f"{where}: values are nested too deeply") from None
    server = data.pop(_SERVER, {})
    if not isinstance(server, dict):
        raise ConfigError(f"{where}: server is not a table; write [server]")
    engine = _build(EngineConfig, data, "", where)
    return engine, _build(ServerConfig, server, f"{_SERVER}.", where)


def read_config(path: Path) -> tuple[EngineConfig, ServerConfig]:
    """The same from a file. Relative folders count from the file's folder. Raises ConfigError."""
    try:
        if not path.is_file() or path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path}: no file of at most 1 MiB; give a TOML file")
        text = path.read_bytes().decode("utf-8")
    except OSError as err:
        raise ConfigError(f"{path}: {err.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8; save it as UTF-8") from None
    engine, server = parse_config(text, where=path.name)
    base = path.parent
    draft = engine.draft
    if draft.drafter_dir is not None:
        draft = dataclasses.replace(draft, drafter_dir=base / draft.drafter_dir)
    return dataclasses.replace(engine, model_dir=base / engine.model_dir, draft=draft), server


def _build(cls: Any, data: Mapping[str, Any], prefix: str, where: str) -> Any:
    hints = get_type_hints(cls)
    known = {item.name for item in dataclasses.fields(cls)}
    for key in data:
        if key not in known:
            raise ConfigError(f"{where}: {_unknown(prefix + key)}")
    values: dict[str, Any] = {}
    for item in dataclasses.fields(cls):
        if item.name not in data:
            if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                raise ConfigError(f"{where}: {prefix}{item.name} is missing; it has no default")
            continue
        value, hint, key = data[item.name], hints[item.name], prefix + item.name
        if dataclasses.is_dataclass(hint):
            if not isinstance(value, dict):
                raise ConfigError(f"{where}: {key} is not a table; write [{key}]")
            values[item.name] = _build(hint, value, f"{key}.", where)
        else:
            values[item.name] = _value(value, hint, key, where)
    return cls(**values)


def _value(value: Any, hint: Any, key: str, where: str) -> Any:
    """A TOML value as the setting's type; integers count as numbers, nothing else is converted."""
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        hint = next(a for a in get_args(hint) if a is not type(None))
        origin = get_origin(hint)
    if origin is Literal and value in get_args(hint) and isinstance(value, str):
        return value
    if origin is tuple and isinstance(value, list) and all(isinstance(v, str) for v in value):
        return tuple(value)
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if hint is Path and isinstance(value, str) and value:
        return Path(value)
    if hint in (int, bool, str) and type(value) is hint:
        return value
    raise ConfigError(f"{where}: {key} is {str(value)[:60]!r}; {type_name(hint)} is needed")


def values_of(engine: EngineConfig, server: ServerConfig) -> dict[str, Any]:
    """Key to value of both configurations, in file order; keys of the API are only counted."""
    found: dict[str, Any] = {}
    for key, _, _ in _all_leaves():
        node: Any = server if key.startswith(f"{_SERVER}.") else engine
        for name in key.removeprefix(f"{_SERVER}.").split("."):
            node = getattr(node, name)
        found[key] = f"{len(node)} set" if key == "server.api_keys" else node
    return found


def write_config(engine: EngineConfig, server: ServerConfig) -> str:
    """TOML that reads back equal, but for API keys, which are left out."""
    tables: dict[str, list[str]] = {"": []}
    for key, value in values_of(engine, server).items():
        table, _, name = key.rpartition(".")
        if value is None or key == "server.api_keys":
            continue
        tables.setdefault(table, []).append(f"{name} = {_toml(value)}")
    blocks = []
    for table, lines in tables.items():
        blocks.append("\n".join([f"[{table}]", *lines] if table else lines))
    return "\n\n".join(blocks) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(v) for v in value)}]"
    if isinstance(value, int | float):
        return repr(value)
    # A JSON string is a TOML basic string, but for DEL.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007F")
