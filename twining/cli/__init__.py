"""The `twining` command: parse options, build a config, call one function.

User errors print `twining: message` on stderr and exit with status 2. Commands import what they
need when they run, so that `twining --help` starts no torch.
"""

import sys
from collections.abc import Sequence

import typer

from twining.cli.chat import chat
from twining.cli.config_cmd import config_app
from twining.cli.convert import convert
from twining.cli.demo import demo_app
from twining.cli.generate import generate
from twining.cli.plan import plan_command
from twining.cli.recipe import recipe_app
from twining.cli.serve import serve
from twining.errors import TwiningError


def build_cli() -> typer.Typer:
    """The command tree."""
    cli = typer.Typer(
        help="Exact inference for GLM-5.3-Flash-class models in EXL3 weights.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )
    cli.callback(invoke_without_command=True)(_root)
    for command in (serve, generate, chat, convert):
        cli.command()(command)
    cli.command("plan")(plan_command)
    cli.add_typer(demo_app(), name="demo")
    cli.add_typer(recipe_app(), name="recipe")
    cli.add_typer(config_app(), name="config")
    return cli


def _root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        from twining import __version__

        typer.echo(__version__)
        raise typer.Exit


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command line; returns the exit status."""
    try:
        build_cli()(args=argv, prog_name="twining")
    except TwiningError as err:
        print(f"twining: {err}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except SystemExit as end:  # how the parser reports usage errors, --help and success
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def main() -> None:
    """Entry point of the console script."""
    sys.exit(run())
