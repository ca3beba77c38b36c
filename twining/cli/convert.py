"""`twining convert`: a glm5_next model or a DFlash2 drafter into EXL3 weights."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from twining.cli.options import JsonOption
from twining.errors import ConfigError

if TYPE_CHECKING:
    from twining.exl3.convert import ConvertReport

MAX_THREADS = 1024


def convert(
    model: Annotated[Path, typer.Argument(help="Folder with the weights to convert.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; an interrupted run goes on.")],
    bits: Annotated[float, typer.Option(help="Bits per weight: 1 to 8, or 1.5, 2.5, 3.5.")] = 4.0,
    bits_for: Annotated[
        list[str] | None,
        typer.Option(
            help="PATTERN=BITS for modules whose name matches; repeatable, the last match wins;"
            " 16 leaves a module as it is."
        ),
    ] = None,
    head_bits: Annotated[float, typer.Option(help="Bits of the output head.")] = 6.0,
    mtp_bits: Annotated[float, typer.Option(help="Bits of the MTP block.")] = 4.0,
    vision_bits: Annotated[float, typer.Option(help="Bits of the vision tower.")] = 6.0,
    codebook: Annotated[str, typer.Option(help="3inst, mcg or mul1.")] = "mul1",
    seed: Annotated[int, typer.Option(help="Chooses the random signs.")] = 0,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    threads: Annotated[
        int, typer.Option(help="CPU threads; 1 is best for small models, 0 = automatic.")
    ] = 0,
    resume: Annotated[bool, typer.Option(help="Go on with an interrupted run.")] = True,
    as_json: JsonOption = False,
) -> None:
    """Quantise a model into EXL3 and print the error of every tensor."""
    if not model.is_dir():
        raise ConfigError(f"model {str(model)!r} is not a folder; give a model folder")
    if not 0 <= threads <= MAX_THREADS:
        raise ConfigError(f"threads={threads} is outside 0..{MAX_THREADS}; use 0 for automatic")
    rules = tuple(parse_rule(text) for text in bits_for or ())
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from twining.exl3.convert import convert_model

    if threads:
        import torch

        torch.set_num_threads(threads)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("quantising", total=None)

        def advance(done: int, total: int, module: str) -> None:
            bar.update(task, completed=done, total=total, description=module)

        report = convert_model(
            model,
            out,
            bits=bits,
            bits_for=rules,
            head_bits=head_bits,
            mtp_bits=mtp_bits,
            vision_bits=vision_bits,
            codebook=codebook,
            device=device,
            seed=seed,
            resume=resume,
            progress=advance,
        )
    if as_json:
        typer.echo(json.dumps(report.to_dict()))
    else:
        _print_table(report)


def parse_rule(text: str) -> tuple[str, float]:
    """PATTERN=BITS -> (pattern, bits). Raises ConfigError."""
    pattern, equals, number = text.rpartition("=")
    try:
        bits = float(number)
    except ValueError:
        bits = 0.0
    if not equals or not pattern or bits <= 0:
        raise ConfigError(f"bits_for={text!r} is not PATTERN=BITS; for example '*.down_proj=5'")
    return pattern, bits


def _print_table(report: "ConvertReport") -> None:
    from rich.console import Console
    from rich.table import Column, Table

    name = Column("module", overflow="fold")
    table = Table(name, "bits", "shape", "relative error", "seconds")
    for module in report.modules:
        table.add_row(
            module.module,
            f"{module.bits:g}",
            f"{module.shape[0]} x {module.shape[1]}",
            f"{module.mse:.3e}",
            f"{module.seconds:.2f}",
        )
    console = Console()
    console.print(table)
    console.print(
        f"{report.out_dir}: {report.num_bytes / 1e6:.1f} MB, {report.bits:g} bits per weight",
        soft_wrap=True,
    )
