"""`twining convert`: a glm5_next model or a DFlash2 drafter into EXL3 weights."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from twining.cli.options import JsonOption, note
from twining.errors import ConfigError


def convert(
    model: Annotated[Path, typer.Argument(help="Folder with the weights to convert.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; an interrupted run goes on.")],
    bits: Annotated[float, typer.Option(help="Bits per weight: 1 to 8, or 1.5, 2.5, 3.5.")] = 4.0,
    bits_for: Annotated[
        list[str] | None,
        typer.Option(help="PATTERN=BITS for modules whose name matches; repeatable."),
    ] = None,
    head_bits: Annotated[int, typer.Option(help="Bits of the output head.")] = 6,
    device: Annotated[str, typer.Option(help="cpu, or a CUDA device to quantise on.")] = "cpu",
    as_json: JsonOption = False,
) -> None:
    """Quantise a model into EXL3 and print an error table."""
    if not model.is_dir():
        raise ConfigError(f"model {str(model)!r} is not a folder; give a model folder")
    rules = [parse_rule(text) for text in bits_for or ()]
    from twining.exl3.convert import convert_model

    report = convert_model(
        model, out, bits=bits, bits_for=rules, head_bits=head_bits, device=device, progress=None
    )
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
        return
    _print_table(report.to_dict())
    note(f"wrote {out}")


def parse_rule(text: str) -> tuple[str, float]:
    """PATTERN=BITS -> (pattern, bits). Raises ConfigError."""
    pattern, equals, number = text.rpartition("=")
    try:
        bits = float(number)
    except ValueError:
        bits = 0.0
    if not equals or not pattern or bits <= 0:
        raise ConfigError(f"--bits-for {text!r} is not PATTERN=BITS; for example '*.down_proj=5'")
    return pattern, bits


def _print_table(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    rows = report["tensors"]
    columns = list(rows[0]) if rows else []
    table = Table(*columns, title="conversion errors")
    for row in rows:
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else str(v) for v in row.values()))
    Console().print(table)
