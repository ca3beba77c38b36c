"""How a recipe was started, as words: argv or shell lines, and the variables of the prose.

Source: spec/recipes.md 4.0, 4.3. Nothing here is ever executed; shell lines are only split. Order
of precedence: explicit argv > launch-line environment > runtime.env > profile default. No torch.
"""

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from twining.errors import ConfigError
from twining.recipes.document import plain
from twining.recipes.schema import LaunchConfig

_ASSIGNMENT = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)", re.DOTALL)
_PROSE_ASSIGNMENT = re.compile(r"(?<![A-Za-z0-9_$/])([A-Z][A-Z0-9_]{2,63})=([^\s()/;]\S{0,255})")
_PROSE_NAME = re.compile(
    r"(?:^|/)([A-Z][A-Z0-9_]{2,63})(?:\(([^)]{0,200})\)|(=)([^\s/()]{0,200}))?"
)
_PATH_ASSIGNMENT = re.compile(r"(?<![A-Za-z0-9_$/])([A-Z][A-Z0-9_]{2,63})=(/\S{0,255})")
_MAX_LINE_CHARS: Final = 1 << 16
_MAX_LAUNCH_CHARS: Final = 1 << 18  # splitting is slow
_TWO_WORD_PROGRAMS: Final = ("vllm", "twining")

Source = Literal["argv", "line", "prose", "profile"]

PROFILE_COMMON: Final = ("-chunk_size", "2048", "--autosplit_max_batch_size", "1", "--port", "8012")
_DFLASH: Final = ("-dm", "DRAFTER", "-ndt", "7", "--dflash-prefix-cache")
_TARGET: Final = ("-m", "TARGET")


@dataclass(frozen=True, slots=True)
class Profile:
    """One profile of the ExLlamaV3 launcher (4.3): its words between model and common part."""

    memory: tuple[str, ...]
    drafting: tuple[str, ...]
    margin_mib: int

    @property
    def argv(self) -> tuple[str, ...]:
        return (*_TARGET, *self.memory, *self.drafting, *PROFILE_COMMON)


_Q8_SPLIT: Final = ("-cq", "8", "-gs", "62,63", "--q8-staging")
PROFILES: Final[Mapping[str, Profile]] = {
    "q8_384k": Profile(("-cs", "393216", *_Q8_SPLIT, "--q8-head-gpu0"), _DFLASH, 128),
    "q8_320k": Profile(("-cs", "327680", *_Q8_SPLIT), _DFLASH, 256),
    "q8_fast": Profile(("-cs", "262144", *_Q8_SPLIT), _DFLASH, 192),
    "fp16": Profile(("-cs", "196608", "-gs", "62,63"), _DFLASH, 256),
    "mtp": Profile(("-cs", "196608", "-gs", "62,63"), ("--mtp", "-ndt", "2"), 256),
}
DEFAULT_PROFILE: Final = "q8_384k"


@dataclass(frozen=True, slots=True)
class Variable:
    """An environment variable; value None: named without one."""

    name: str
    value: str | None
    source: Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Words of the server's command, after the program's own name. problems: one line each."""

    argv: tuple[str, ...]
    variables: tuple[Variable, ...]
    profile: str | None = None
    problems: tuple[str, ...] = ()


def is_argv_form(launch: Sequence[str]) -> bool:
    """One token per element: some element other than the first starts with a dash."""
    return any(word.startswith("-") for word in launch[1:])


def prose_variables(text: str | None) -> tuple[Variable, ...]:
    """Variables named in runtime.env: NAME=value inside sentences, or NAME(value)/NAME lists.

    A parenthesis counts as a value only when it starts with one word ("1; =0 disables ..." is 1,
    "profile: 128 ..." is none).
    """
    if not text:
        return ()
    text = text[:_MAX_LINE_CHARS]
    found: dict[str, str | None] = {}
    if text.count("/") and _PROSE_NAME.match(text) and not _PATH_ASSIGNMENT.search(text):
        for match in _PROSE_NAME.finditer(text):
            name, inside, _, direct = match.groups()
            value = direct
            if inside is not None:
                word = re.match(r"([^\s;:]+)(?=$|;)", inside)
                value = word.group(1) if word else None
            found.setdefault(name, value)
    else:
        both = (*_PROSE_ASSIGNMENT.finditer(text), *_PATH_ASSIGNMENT.finditer(text))
        for match in sorted(both, key=lambda m: m.start()):
            found.setdefault(match.group(1), match.group(2).rstrip(".,;:)"))
    return tuple(Variable(name, value, "prose") for name, value in list(found.items())[:200])


def profile_variables(name: str) -> tuple[Variable, ...]:
    """What the script exports for a profile (4.3)."""
    values = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLM53_K_HCFUSE": "1",
        "EXL3_AUTOSPLIT_MARGIN_MB": str(PROFILES[name].margin_mib),
    }
    return tuple(Variable(key, value, "profile") for key, value in values.items())


def _merge(*layers: Sequence[Variable]) -> tuple[Variable, ...]:
    """Later layers win; a name without a value never hides a value."""
    merged: dict[str, Variable] = {}
    for layer in layers:
        for variable in layer:
            if variable.value is not None or variable.name not in merged:
                merged[variable.name] = variable
    return tuple(merged.values())


@dataclass(slots=True)
class _Lines:
    argv: list[str]
    variables: list[Variable]
    problems: list[str]
    profile: str | None = None


def _read_line(line: str, found: _Lines) -> None:
    try:
        words = shlex.split(line[:_MAX_LINE_CHARS])
    except ValueError:
        found.problems.append(f"launch line {plain(line, 60)!r}: a quote is not closed")
        return
    while words and (match := _ASSIGNMENT.fullmatch(words[0])):
        found.variables.append(Variable(match.group(1), match.group(2), "line"))
        words.pop(0)
    if not words:
        return
    program, rest = words[0].rsplit("/", 1)[-1], words[1:]
    if program == "setup.sh":
        return
    if program == "serve.sh":
        _read_serve(rest, found)
    elif program.startswith("python") and any(w.endswith("glm_api.py") for w in rest):
        at = next(i for i, w in enumerate(rest) if w.endswith("glm_api.py"))
        found.argv += rest[at + 1 :]
    else:
        found.problems.append(f"launch line runs {plain(program, 40)!r}, which no table covers")


def _read_serve(words: Sequence[str], found: _Lines) -> None:
    """serve.sh: the profile's words, then whatever else stands on the line."""
    profile, extra, rest = DEFAULT_PROFILE, [], list(words)
    while rest:
        word = rest.pop(0)
        name, has_value, value = word.partition("=")
        if name not in ("--profile", "--models-dir"):
            extra.append(word)
            continue
        if not has_value:
            value = rest.pop(0) if rest else ""
        if name == "--profile":
            profile = value
    if profile not in PROFILES:
        names = ", ".join(PROFILES)
        found.problems.append(f"profile {plain(profile, 40)!r} is unknown; it has {names}")
        return
    found.profile = profile
    found.argv += [*PROFILES[profile].argv, *extra]


def read_launch(config: LaunchConfig) -> Launch:
    """The words and variables of a document, precedence applied. Never raises."""
    prose = prose_variables(config.runtime.env if config.runtime else None)
    if is_argv_form(config.launch):
        words = list(config.launch)
        lead = next((i for i, w in enumerate(words) if w.startswith("-")), len(words))
        # `vllm serve MODEL`: the program has two words, then the model's folder.
        start = min(lead, 2) if words[0].rsplit("/", 1)[-1] in _TWO_WORD_PROGRAMS else 1
        return Launch(argv=tuple(words[start:]), variables=_merge(prose))
    found = _Lines([], [], [])
    if sum(map(len, config.launch)) > _MAX_LAUNCH_CHARS:
        found.problems.append(f"the launch lines have more than {_MAX_LAUNCH_CHARS} characters")
    else:
        for line in config.launch:
            _read_line(line, found)
    if found.profile is None:
        merged = _merge(prose, found.variables)
    else:
        # For these the script's own values win over the line; for the margin too.
        script = profile_variables(found.profile)
        merged = _merge(prose, found.variables, script)
    if not found.argv and not found.problems:
        found.problems.append("no launch line starts a server")
    return Launch(
        argv=tuple(found.argv),
        variables=merged,
        profile=found.profile,
        problems=tuple(found.problems),
    )


def profile_launch(name: str) -> Launch:
    """The launch of a profile by its name alone. Raises ConfigError for an unknown one."""
    if name not in PROFILES:
        raise ConfigError(f"profile {plain(name, 40)!r} is unknown; use {', '.join(PROFILES)}")
    return Launch(argv=PROFILES[name].argv, variables=profile_variables(name), profile=name)
