"""`twining demo score`: what the bundled model can do, measured here and now."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from twining.cli.options import (
    DEMO,
    DRAFT,
    SCHEDULE,
    DrafterDirOption,
    DrafterOption,
    JsonOption,
    MaxSeqsOption,
    ModelOption,
    NumDraftOption,
    engine_config,
    note,
    resolve_model,
)
from twining.config import ScheduleConfig
from twining.errors import ConfigError


def demo_app() -> typer.Typer:
    """Commands about the bundled model."""
    app = typer.Typer(help="The bundled demo model.", no_args_is_help=True)
    app.callback()(_group)
    app.command("score")(score)
    return app


def _group() -> None:
    """Keeps `score` a subcommand although it is the only one."""


def score(
    model: ModelOption = DEMO,
    num_per_task: Annotated[int, typer.Option(help="Items per task.")] = 100,
    num_retrieval: Annotated[int, typer.Option(help="Texts per retrieval length.")] = 16,
    num_accepted: Annotated[
        int, typer.Option(help="Texts per kind for the accepted length; 0 leaves it out.")
    ] = 8,
    seed: Annotated[int, typer.Option(help="Chooses the items.")] = 0,
    drafter: DrafterOption = DRAFT.drafter,
    drafter_dir: DrafterDirOption = DRAFT.drafter_dir,
    num_draft_tokens: NumDraftOption = DRAFT.num_draft_tokens,
    max_seqs: MaxSeqsOption = SCHEDULE.max_seqs,
    as_json: JsonOption = False,
) -> None:
    """Score a model on held-out tasks, greedily."""
    from rich.console import Console
    from rich.progress import Progress

    from twining.cli.session import Session
    from twining.demo.score import engine_generate
    from twining.demo.score import score as run_score

    if num_per_task < 1 or num_retrieval < 1:
        raise ConfigError("--num-per-task and --num-retrieval must be at least 1")
    if num_accepted < 0:
        raise ConfigError(f"--num-accepted {num_accepted} is negative; use 0 to leave it out")
    config = engine_config(
        resolve_model(model, drafter_dir),
        drafter=drafter,
        num_draft_tokens=num_draft_tokens,
        schedule=ScheduleConfig(max_seqs=max_seqs),
    )
    session = Session.load(config)
    note(f"scoring {Path(config.model_dir).name}; this takes minutes on a CPU")
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("requests")

        def progress(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)

        report = run_score(
            engine_generate(session.engine, session.tokenizer, progress),
            session.tokenizer,
            num_per_task=num_per_task,
            num_retrieval=num_retrieval,
            num_accepted=num_accepted,
            seed=seed,
        )
    if as_json:
        typer.echo(json.dumps(report))
    else:
        _print_table(report, num_retrieval)


def _print_table(report: dict[str, Any], num_retrieval: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("task", "result", title="held-out tasks, greedy")
    for name in ("arithmetic", "json_extraction", "tool_call", "python_functions"):
        table.add_row(name.replace("_", " "), f"{report[name]:.1%}")
    for length, hits in report["retrieval"].items():
        table.add_row(f"retrieval, {length} tokens", f"{hits} of {num_retrieval}")
    for kind, tokens in report["accepted_length"].items():
        table.add_row(f"accepted length, {kind}", f"{tokens:.2f} tokens a step")
    Console().print(table)
