"""`twining recipe`: show, check, resolve, run and publish community recipe documents."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from twining.cli.options import JsonOption, note
from twining.errors import ConfigError
from twining.recipes.checks import check as check_rules
from twining.recipes.checks import check_quant
from twining.recipes.document import emit, parse_document, plain, read_bytes
from twining.recipes.pins import Pin, check_folder, checkpoint_bits, fetch, pin_of
from twining.recipes.points import BATTERIES, Measurement, by_context, measurements
from twining.recipes.resolve import Resolution, engine_config, resolve, server_config
from twining.recipes.schema import Finding, Recipe, view
from twining.recipes.settings import Capabilities, Verdict

FileArgument = Annotated[Path, typer.Argument(help="A recipe document (.json).")]
ProfileOption = Annotated[
    str | None, typer.Option("--profile", help="Another profile of the recipe's launcher.")
]
ModelDirOption = Annotated[
    Path | None, typer.Option("--model", help="Folder of the model that you downloaded.")
]
DrafterFolderOption = Annotated[
    Path | None, typer.Option("--drafter", help="Folder of the drafter that you downloaded.")
]


def recipe_app() -> typer.Typer:
    """The command group."""
    app = typer.Typer(help="Community recipes: read them, run them.", no_args_is_help=True)
    for name, command in (
        ("show", show),
        ("check", check),
        ("resolve", resolve_command),
        ("run", run),
        ("publish", publish_command),
    ):
        app.command(name)(command)
    return app


def load(path: Path) -> Recipe:
    """A document from a file. Raises ConfigError when it is no document at all."""
    return view(parse_document(read_bytes(path), path.name))


def show(file: FileArgument, as_json: JsonOption = False) -> None:
    """What a recipe says: model, cards, measurements by battery and by context, credits."""
    recipe = load(file)
    limit = recipe.config.max_context_len if recipe.config else None
    rows = measurements(recipe.points, limits=[limit])
    if as_json:
        typer.echo(json.dumps(_show_data(recipe, rows)))
        return
    console = Console(highlight=False)
    console.print(Text(plain(recipe.title or recipe.label), style="bold"))
    for label, value in _facts(recipe):
        console.print(Text(f"{label}: {value}"))
    for table in (_battery_table(rows), _context_table(rows)):
        if table.row_count:
            console.print(table)
    for row in rows:
        if row.is_warm or row.is_limit:
            what = "first token, prefix reused" if row.is_warm else "decode, filed at the limit"
            unit = "ms" if row.kind == "ttft" else "tok/s"
            console.print(Text(f"{what}: {row.value:.3f} {unit} at {row.context_tokens}"))
    console.print(Text("credit: " + "; ".join(plain(c.name, 120) for c in recipe.credit)))


def _facts(recipe: Recipe) -> list[tuple[str, str]]:
    engine = recipe.engine
    facts = [("slug", recipe.label)]
    if engine:
        facts.append(("engine", plain(f"{engine.base_engine} {engine.base_version or ''}")))
    for model in recipe.models[:8]:
        facts.append(("model", plain(f"{model.name} ({model.hf_repo}, {model.quant})")))
    for card in recipe.hardware[:8]:
        facts.append(
            ("cards", plain(f"{card.device_count} x {card.card}, {card.vram_gb:g} GiB each"))
        )
    for artifact in recipe.artifacts[:16]:
        facts.append((plain(artifact.kind, 40), plain(f"{artifact.pointer} @ {artifact.pin}", 160)))
    licence = recipe.raw.get("license")
    facts.append(("licence of the document", plain(licence, 60)))
    return facts


def _battery_table(rows: tuple[Measurement, ...]) -> Table:
    cells = {(r.battery, r.concurrency): r.value for r in rows if r.battery}
    counts = sorted({c for _, c in cells if c is not None})
    table = Table(title="aggregate decode, tok/s")
    table.add_column("battery")
    for count in counts:
        table.add_column(f"C{count}", justify="right")
    for battery in BATTERIES:
        if any(name == battery for name, _ in cells):
            values = [cells.get((battery, c)) for c in counts]
            table.add_row(battery, *("" if v is None else f"{v:.3f}" for v in values))
    return table


def _context_table(rows: tuple[Measurement, ...]) -> Table:
    columns = [dict(by_context(rows, kind)) for kind in ("prefill", "decode", "ttft")]
    table = Table(title="one stream by context")
    for title in ("tokens", "prefill tok/s", "decode tok/s", "first token ms"):
        table.add_column(title, justify="right")
    for tokens in sorted(set().union(*columns)):
        values = [column.get(tokens) for column in columns]
        table.add_row(str(tokens), *("" if v is None else f"{v:.3f}" for v in values))
    return table


def _show_data(recipe: Recipe, rows: tuple[Measurement, ...]) -> dict[str, Any]:
    return {
        "slug": recipe.slug,
        "title": recipe.title,
        "engine": recipe.engine.model_dump() if recipe.engine else None,
        "models": [m.model_dump() for m in recipe.models],
        "hardware": [h.model_dump() for h in recipe.hardware],
        "artifacts": [a.model_dump() for a in recipe.artifacts],
        "credit": [c.model_dump() for c in recipe.credit],
        "measurements": [
            {name: getattr(row, name) for name in Measurement.__dataclass_fields__} for row in rows
        ],
    }


def check(
    file: FileArgument,
    model: ModelDirOption = None,
    drafter: DrafterFolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Rules and known traps, one answer each. Exit status 1 if a "must" is broken."""
    recipe = load(file)
    findings = check_rules(
        recipe,
        resolve(recipe, Capabilities()),
        file_stem=file.stem,
        checkpoint_bits=checkpoint_bits(model) if model else None,
    )
    findings += _pins(recipe, model, drafter)
    is_sound = all(f.is_ok for f in findings if f.level == "must")
    if as_json:
        typer.echo(json.dumps({"is_sound": is_sound, "findings": list(map(_finding, findings))}))
    else:
        _print_findings(findings)
    if not is_sound:
        raise typer.Exit(1)


def _pins(recipe: Recipe, model: Path | None, drafter: Path | None) -> list[Finding]:
    found = []
    if model is not None:
        found.append(check_folder(recipe, "model_weights", model))
    if drafter is not None:
        found.append(check_folder(recipe, "drafter", drafter))
    return found


def _finding(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule,
        "level": finding.level,
        "is_ok": finding.is_ok,
        "message": finding.message,
    }


def _print_findings(findings: list[Finding]) -> None:
    table = Table()
    for title in ("rule", "level", "", "answer"):
        table.add_column(title)
    for f in findings:
        mark = Text("ok", style="green") if f.is_ok else Text("broken", style="red")
        table.add_row(f.rule, f.level, mark, Text(f.message))
    Console(highlight=False).print(table)


def resolve_command(
    file: FileArgument, profile: ProfileOption = None, as_json: JsonOption = False
) -> None:
    """Every setting with what happens to it. Exit status 1 if the recipe cannot start."""
    found = resolve(load(file), Capabilities(), profile=profile)
    if as_json:
        typer.echo(json.dumps(resolution_data(found)))
    else:
        _print_resolution(found)
    if not found.can_start:
        raise typer.Exit(1)


def resolution_data(found: Resolution) -> dict[str, Any]:
    """Plain data of a resolution."""
    names = type(found.settings).__dataclass_fields__
    return {
        "slug": found.label,
        "profile": found.profile,
        "can_start": found.can_start,
        "argv": list(found.argv),
        "settings": {name: getattr(found.settings, name) for name in names},
        "lines": [
            {
                "given": line.given,
                "setting": line.setting,
                "verdict": str(line.verdict),
                "reason": line.reason,
            }
            for line in found.lines
        ],
        "problems": list(found.problems),
    }


def _print_resolution(found: Resolution) -> None:
    styles = {"refused": "red", "approximate": "yellow", "exact": "green"}
    table = Table()
    for title in ("recipe says", "setting", "verdict", "why"):
        table.add_column(title, overflow="fold")
    for line in found.lines:
        verdict = Text(str(line.verdict), style=styles.get(line.verdict, ""))
        table.add_row(Text(line.given), Text(line.setting), verdict, Text(line.reason))
    console = Console(highlight=False)
    console.print(table)
    for problem in found.problems:
        console.print(Text(problem, style="red"))


def run(
    file: FileArgument,
    model: ModelDirOption = None,
    drafter: DrafterFolderOption = None,
    profile: ProfileOption = None,
    allow_approximate: Annotated[
        bool, typer.Option("--allow-approximate", help="Accept settings that differ in value.")
    ] = False,
    download: Annotated[
        Path | None, typer.Option(help="Fetch the pinned revisions into this folder first.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Stop before loading.")] = False,
) -> None:
    """Resolve, plan, compare pins, and serve on loopback."""
    recipe = load(file)
    found = resolve(recipe, Capabilities(), profile=profile)
    for message in found.messages():
        note(message.replace(f"recipe {found.label}: ", "recipe: ", 1))
    _refuse(found, allow_approximate)
    wants_drafter = found.settings.draft_method == "dflash2"
    if download is not None:
        model, drafter = _download(recipe, download, model, drafter, wants_drafter)
    if model is None or (wants_drafter and drafter is None):
        raise ConfigError(_what_to_fetch(recipe, model, wants_drafter and drafter is None))
    for finding in (check_quant(recipe, checkpoint_bits(model)), *_pins(recipe, model, drafter)):
        note(("" if finding.is_ok else "warning: ") + finding.message)
    engine = engine_config(found, model, drafter_dir=drafter)
    _check_fit(recipe, found, model, drafter)
    server = server_config(found)
    if dry_run:
        note("dry run: would serve now")
        return
    from twining.cli.serve import _run as run_serve

    run_serve(engine, server)


def _refuse(found: Resolution, allow_approximate: bool) -> None:
    if not found.can_start:
        refusals = [x.message("") for x in found.lines if x.verdict is Verdict.REFUSED]
        first = [*found.problems, *refusals][0].removeprefix("recipe : ")
        raise ConfigError(f"the recipe cannot start: {plain(first, 300)}")
    differing = [line for line in found.lines if line.verdict is Verdict.APPROXIMATE]
    if differing and not allow_approximate:
        given = ", ".join(line.given.split()[0] for line in differing)
        raise ConfigError(f"{given} would differ; accept with --allow-approximate, or change it")


def _check_fit(recipe: Recipe, found: Resolution, model: Path, drafter: Path | None) -> None:
    from twining.cli.plan import this_machine
    from twining.planner.plan import plan
    from twining.planner.report import headline
    from twining.recipes.fit import plan_request

    request = plan_request(recipe, found, (this_machine(),), model_dir=model, drafter_dir=drafter)
    answer = plan(request)
    note(headline(answer))
    if not answer.fits:
        change = f"; {answer.remedies[0]}" if answer.remedies else ""
        raise ConfigError(f"the model does not fit on this machine: {answer.reason}{change}")


def _what_to_fetch(recipe: Recipe, model: Path | None, needs_drafter: bool) -> str:
    steps = []
    for kind, option, needed in (
        ("model_weights", "--model", model is None),
        ("drafter", "--drafter", needs_drafter),
    ):
        if not needed:
            continue
        pin = pin_of(recipe, "model_weights" if kind == "model_weights" else "drafter")
        folder = Path(option.removeprefix("--"))
        command = f"`{pin.command(folder)}`" if pin else "the files that the document names"
        steps.append(f"fetch {command} and pass {option} {folder}")
    return "the recipe's files are not here: " + "; ".join(steps)


def _download(
    recipe: Recipe,
    folder: Path,
    model: Path | None,
    drafter: Path | None,
    wants_drafter: bool,
) -> tuple[Path | None, Path | None]:
    """Fetch what is missing; folders that the user named are left as they are."""

    def one(pin: Pin | None, name: str) -> Path:
        if pin is None:
            raise ConfigError(f"the document pins no repository for the {name}; fetch it yourself")
        target = folder / name
        note(f"fetching {pin.repo} @ {pin.revision} into {target}")
        fetch(pin, target)
        return target

    if model is None:
        model = one(pin_of(recipe, "model_weights"), "model")
    if wants_drafter and drafter is None:
        drafter = one(pin_of(recipe, "drafter"), "drafter")
    return model, drafter


def publish_command(
    results: Annotated[Path, typer.Argument(help="results.json of the bench.")],
    about: Annotated[Path, typer.Option(help="JSON with slug, title, licence, author, cards.")],
    out: Annotated[Path, typer.Option(help="Folder for the document; its name is the slug.")],
    base: Annotated[Path | None, typer.Option("--from", help="Recipe that was followed.")] = None,
) -> None:
    """Write a recipe document of our own from measurements, and check it with our reader."""
    from twining.recipes.publish import publication_from, publish, read_results

    followed = parse_document(read_bytes(base), base.name) if base else None
    described = publication_from(parse_document(read_bytes(about), about.name))
    document = publish(read_results(read_bytes(results)), described, base=followed)
    recipe = view(document)
    findings = check_rules(recipe, resolve(recipe, Capabilities()), file_stem=described.slug)
    broken = [f for f in findings if not f.is_ok and f.level == "must"]
    if broken:
        raise ConfigError(f"not written: {broken[0].rule}: {broken[0].message}")
    path = out / f"{described.slug}.json"
    try:
        path.write_text(emit(document), encoding="utf-8")
    except OSError as err:
        raise ConfigError(f"{path}: cannot be written ({err.strerror})") from None
    note(f"wrote {path} with {len(recipe.points)} rows")
