"""A recipe's settings as ours: every flag and variable with a verdict, and the engine's config.

Source: spec/recipes.md section 4. Pure: nothing is executed, opened or fetched. Folders of the
recipe are never used; the user names the model and drafter folders.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from twining.config import (
    PAGE_SIZE,
    CacheConfig,
    DraftConfig,
    EngineConfig,
    ScheduleConfig,
    ServerConfig,
)
from twining.errors import ConfigError
from twining.recipes import table_exllama, table_own, table_vllm
from twining.recipes.document import plain
from twining.recipes.launch import Launch, profile_launch, read_launch
from twining.recipes.schema import Recipe
from twining.recipes.settings import (
    BadValue,
    Capabilities,
    Context,
    Flag,
    Given,
    Handler,
    Line,
    Settings,
    Verdict,
    refused,
)

MAX_UNKNOWN_LINES: Final = 200


@dataclass(frozen=True, slots=True)
class _Table:
    flags: Mapping[str, Flag]
    variables: Mapping[str, Handler]
    positional: str | None  # name for the first word without a dash


_TABLES: Final = {
    "exllamav3": _Table(table_exllama.FLAGS, table_exllama.VARIABLES, None),
    "vllm": _Table(table_vllm.FLAGS, table_vllm.VARIABLES, table_vllm.MODEL),
    "twining": _Table(table_own.FLAGS, {}, table_vllm.MODEL),
}


@dataclass(frozen=True, slots=True)
class Resolution:
    """Settings in neutral names, a line for each given one, and unknown words among them."""

    label: str
    settings: Settings
    lines: tuple[Line, ...]
    argv: tuple[str, ...]
    profile: str | None
    problems: tuple[str, ...] = field(default=())

    def count(self, verdict: Verdict) -> int:
        return sum(line.verdict is verdict for line in self.lines)

    @property
    def can_start(self) -> bool:
        """No refusal and no problem; approximate lines still need the user's switch."""
        return not self.problems and not self.count(Verdict.REFUSED)

    def messages(self) -> list[str]:
        return [line.message(self.label) for line in self.lines] + [
            f"recipe {self.label}: {problem}" for problem in self.problems
        ]


def resolve(recipe: Recipe, can: Capabilities, *, profile: str | None = None) -> Resolution:
    """Resolve a document for an engine, or another profile of its launcher by name.

    Never raises for the document; raises ConfigError for an unknown profile asked for by the user.
    """
    engine = recipe.engine.base_engine if recipe.engine else ""
    if profile is not None:
        if engine != "exllamav3":
            raise ConfigError(
                f"--profile {plain(profile, 40)}: only recipes of exllamav3 have profiles"
            )
        return resolve_launch(profile_launch(profile), engine, can, label=recipe.label)
    if recipe.config is None:
        return _nothing(recipe.label, engine, "config.launch is missing or damaged")
    return resolve_launch(read_launch(recipe.config), engine, can, label=recipe.label)


def _nothing(label: str, engine: str, problem: str) -> Resolution:
    return Resolution(label, Settings(base_engine=engine), (), (), None, (problem,))


def resolve_launch(
    launch: Launch, engine: str, can: Capabilities, *, label: str = ""
) -> Resolution:
    """Apply the table of an engine to a launch's words and variables. Never raises."""
    table = _TABLES.get(engine)
    if table is None:
        known = ", ".join(_TABLES)
        problem = f"base_engine {plain(engine, 40)!r} has no flag table (known: {known})"
        return _nothing(label, plain(engine, 40), f"{problem}; its settings cannot be mapped")
    words, unknown = _split(launch.argv, table)
    given = {item.name: item.value for item in words}
    given |= {v.name: v.value for v in launch.variables}
    ctx = Context(Settings(base_engine=engine), can, given)
    lines = [_apply(item, table.flags[item.name].handler, ctx) for item in words]
    for variable in launch.variables:
        item = Given(variable.name, variable.value)
        handler = table.variables.get(variable.name)
        if handler is not None:
            lines.append(_apply(item, handler, ctx))
        elif variable.source != "prose" or variable.value is not None:
            unknown.append(item)
    for item in unknown[:MAX_UNKNOWN_LINES]:
        lines.append(refused(item, "unknown; remove it, or check its spelling"))
    problems = list(launch.problems)
    if len(unknown) > MAX_UNKNOWN_LINES:
        problems.append(f"{len(unknown) - MAX_UNKNOWN_LINES} more unknown settings")
    problems += _consistency(ctx.settings, given, engine)
    return Resolution(
        label, ctx.settings, tuple(lines), launch.argv, launch.profile, tuple(problems)
    )


def _apply(given: Given, handler: Handler, ctx: Context) -> Line:
    try:
        return handler(given, ctx)
    except BadValue as err:
        return refused(given, str(err))


def _split(argv: Sequence[str], table: _Table) -> tuple[list[Given], list[Given]]:
    """Known settings (the last of each name wins) and unknown ones, in order."""
    known: dict[str, Given] = {}
    unknown: list[Given] = []
    rest, at = list(argv), 0
    while at < len(rest):
        word, at = rest[at], at + 1
        name, joined, value = word.partition("=")
        if not word.startswith("-"):
            if table.positional and table.positional not in known:
                known[table.positional] = Given(table.positional, word)
            else:
                unknown.append(Given(plain(word, 60), None))
            continue
        flag = table.flags.get(name if joined else word)
        if flag is None:
            follows = at < len(rest) and not rest[at].startswith("-")
            unknown.append(
                Given(plain(name, 60), value if joined else rest[at] if follows else None)
            )
            at += int(follows and not joined)
            continue
        known.pop(name, None)
        if not flag.takes_value:
            known[name] = Given(name, value if joined else None)
        elif joined:
            known[name] = Given(name, value)
        else:
            known[name] = Given(name, rest[at] if at < len(rest) else None)
            at += 1
    return list(known.values()), unknown


def _consistency(settings: Settings, given: Mapping[str, str | None], engine: str) -> list[str]:
    """Rules over several settings: R10, R11 and required ones."""
    problems = []
    if settings.model_dir is None:
        problems.append("no model folder is named")
    if engine == "exllamav3":
        if settings.cache_tokens is None and "-cs" not in given:
            problems.append("-cs is missing: the size of the cache is not stated")
        if settings.cache_format is None and "-cq" not in given:
            settings.cache_format = "fp16"  # absent means fp16 (table A)
    parts = settings.layers_per_stage
    if parts and len(parts) != settings.pipeline_stages:
        problems.append(
            f"{len(parts)} stages in the layer split, pipeline of {settings.pipeline_stages}"
        )
    if settings.draft_method != "none" and settings.num_draft_tokens is None:
        settings.num_draft_tokens = table_exllama.DRAFTS.get(settings.draft_method, 7)
    return problems


def engine_config(
    resolution: Resolution, model_dir: Path, *, drafter_dir: Path | None = None
) -> EngineConfig:
    """The engine's configuration. Raises ConfigError for what it cannot hold."""
    s = resolution.settings
    max_seqs = s.max_running or 1
    max_seq_len = s.max_seq_len or 0
    drafter: Any = s.draft_method
    if drafter == "dflash2" and drafter_dir is None:
        raise ConfigError("the recipe drafts with a DFlash2 drafter; name its folder (--drafter)")
    return EngineConfig(
        model_dir=model_dir,
        max_seq_len=max_seq_len,
        stages=s.pipeline_stages,
        partition=",".join(map(str, s.layers_per_stage)),
        cache=CacheConfig(
            latent_format=_latent_format(s),
            max_pages=(s.cache_tokens or 0) // PAGE_SIZE,
            reuse=_reuse(s),
        ),
        draft=DraftConfig(
            drafter=drafter,
            drafter_dir=drafter_dir if drafter == "dflash2" else None,
            num_draft_tokens=0 if drafter == "none" else s.num_draft_tokens or 0,
        ),
        schedule=_schedule(s, max_seqs),
    )


def _reuse(settings: Settings) -> Any:
    """Our own mode where stated; another engine's recipe without reuse gets none."""
    if settings.own_reuse is not None:
        return settings.own_reuse
    is_off = settings.prefix_reuse == "off" and settings.base_engine != "twining"
    return "off" if is_off else "exact"


def _latent_format(settings: Settings) -> Any:
    """The stated format; without one, the recipe's 16-bit type."""
    return settings.cache_format or ("bf16" if settings.dtype == "bfloat16" else "fp16")


def _schedule(settings: Settings, max_seqs: int) -> ScheduleConfig:
    chunk = settings.prefill_chunk or settings.token_budget
    defaults = ScheduleConfig()
    return ScheduleConfig(
        max_seqs=max_seqs,
        max_batched_tokens=chunk or defaults.max_batched_tokens,
        prefill_tokens_with_decodes=settings.prefill_chunk_when_decoding
        or defaults.prefill_tokens_with_decodes,
    )


def server_config(resolution: Resolution) -> ServerConfig:
    """The server's configuration: always a loopback listener. Raises ConfigError."""
    s = resolution.settings
    defaults = ServerConfig()
    return ServerConfig(
        host="127.0.0.1",
        port=s.port or defaults.port,
        model_id=s.served_name or defaults.model_id,
    )
