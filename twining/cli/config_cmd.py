"""`twining config`: the settings in effect, and what each one means."""

import dataclasses
import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from twining.cli.options import JsonOption
from twining.config import EngineConfig, ServerConfig
from twining.config_file import Setting, explain, read_config, settings, values_of

FileOption = Annotated[Path | None, typer.Option("--config", help="A TOML file of settings.")]


def config_app() -> typer.Typer:
    """The command group."""
    app = typer.Typer(help="Settings: show them, explain one.", no_args_is_help=True)
    app.command("show")(show)
    app.command("explain")(explain_command)
    return app


def show(config: FileOption = None, as_json: JsonOption = False) -> None:
    """Every setting with its value (from a file, or the defaults) and its unit."""
    if config is not None:
        engine, server = read_config(config)
    else:
        engine, server = EngineConfig(model_dir=Path("MODEL")), ServerConfig()
    values = values_of(engine, server)
    if as_json:
        typer.echo(json.dumps({key: _plain(value) for key, value in values.items()}))
        return
    console = Console(highlight=False, soft_wrap=True)
    for setting in settings():
        line = Text(setting.key, style="bold").append(" = ", style="default")
        value = _plain(values[setting.key])
        # Keys are shown by their number only.
        shown = value if setting.key == "server.api_keys" else _toml(value)
        line.append(shown, style="default")
        if setting.doc.unit:
            line.append(f"  ({setting.doc.unit})", style="dim")
        console.print(line)
        console.print(Text(f"    {setting.doc.effect}"))


def explain_command(
    key: Annotated[str, typer.Argument(help="A key such as cache.latent_format.")],
    as_json: JsonOption = False,
) -> None:
    """One setting: type, unit, default, effect."""
    setting = explain(key)
    if as_json:
        typer.echo(json.dumps(_data(setting)))
        return
    default = "none, it must be given" if setting.is_required else repr(_plain(setting.default))
    unit = f", in {setting.doc.unit}" if setting.doc.unit else ""
    typer.echo(f"{setting.key}: {setting.type_name}{unit}; default {default}")
    typer.echo(setting.doc.effect)


def _toml(value: Any) -> str:
    """A value as it is written in a file."""
    return "unset" if value is None else json.dumps(value)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value


def _data(setting: Setting) -> dict[str, Any]:
    return {
        "key": setting.key,
        "type": setting.type_name,
        "default": _plain(setting.default),
        "is_required": setting.is_required,
        **dataclasses.asdict(setting.doc),
    }
