"""Shared by the commands: model names, engine options, key files. Defaults are config.py's."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import typer

from twining.config import (
    Admission,
    CacheConfig,
    DraftConfig,
    DrafterName,
    EngineConfig,
    LatentFormat,
    ReuseMode,
    ScheduleConfig,
    ServerConfig,
)
from twining.errors import ConfigError

DEMO = "demo"
DEMO_ID = "twining-demo"
MAX_KEY_FILE_BYTES = 1 << 20

ENGINE = EngineConfig(model_dir=Path("."))  # only its defaults are read
DRAFT = DraftConfig()
SCHEDULE = ScheduleConfig()
CACHE = CacheConfig()
SERVER = ServerConfig()

ModelOption = Annotated[str, typer.Option("--model", help="A model folder, or `demo`.")]
DrafterOption = Annotated[
    DrafterName, typer.Option("--drafter", help="Who drafts; never changes the output.")
]
DrafterDirOption = Annotated[
    Path | None, typer.Option("--drafter-dir", help="Folder of a DFlash2 drafter.")
]
NumDraftOption = Annotated[
    int, typer.Option("--num-draft-tokens", help="Draft tokens per step, 0 to 15.")
]
MaxSeqsOption = Annotated[int, typer.Option("--max-seqs", help="Sequences running at once.")]
MaxSeqLenOption = Annotated[
    int, typer.Option("--max-seq-len", help="Context in tokens; 0 = the model's own limit.")
]
ThreadsOption = Annotated[
    int, typer.Option("--threads", help="CPU threads, a power of two; 0 = automatic.")
]
LatentOption = Annotated[
    LatentFormat, typer.Option("--latent-format", help="Format of the MLA latent cache.")
]
MaxPagesOption = Annotated[
    int, typer.Option("--max-pages", help="Cache pages of 256 tokens; 0 = enough for all.")
]
StagesOption = Annotated[
    int, typer.Option("--stages", help="Devices that the layers are divided over.")
]
PartitionOption = Annotated[
    str, typer.Option("--partition", help="Layers of each stage, as 23,22; empty = balanced.")
]
AdaptiveOption = Annotated[
    bool,
    typer.Option(
        "--adaptive-draft/--fixed-draft", help="Drafts per step by acceptance and measured time."
    ),
]
ReuseOption = Annotated[
    ReuseMode,
    typer.Option(
        "--reuse",
        help="Prefixes of earlier prompts: exact = never changes the output, fast = also state"
        " that decoding made, off.",
    ),
]
CheckpointGibOption = Annotated[
    float, typer.Option("--checkpoint-gib", help="GiB of host memory for reusable prefixes.")
]
AdmissionOption = Annotated[
    Admission,
    typer.Option(
        "--admission",
        help="reserved = pages of the worst case; optimistic = as needed, and requests are moved"
        " to host memory when pages run out.",
    ),
]
EffortOption = Annotated[
    Literal["low", "high", "max"], typer.Option("--effort", help="Reasoning effort.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelPaths:
    """model_id: the name a server gives it, None for the configured default."""

    model_dir: Path
    drafter_dir: Path | None
    model_id: str | None


def resolve_model(name: str, drafter_dir: Path | None = None) -> ModelPaths:
    """Folders behind a model name. Raises ConfigError if there is no such folder."""
    if name == DEMO:
        from twining.demo.paths import demo_paths

        model_dir, own_drafter = demo_paths()
        return ModelPaths(model_dir, drafter_dir or own_drafter, DEMO_ID)
    model_dir = Path(name).expanduser()
    if not model_dir.is_dir():
        raise ConfigError(f"model {name!r} is not a folder; give a model folder or `demo`")
    return ModelPaths(model_dir, drafter_dir, None)


def engine_config(
    paths: ModelPaths,
    *,
    drafter: DrafterName,
    num_draft_tokens: int,
    max_seq_len: int = ENGINE.max_seq_len,
    threads: int = ENGINE.threads,
    stages: int = ENGINE.stages,
    partition: str = ENGINE.partition,
    adaptive_draft: bool = DRAFT.adaptive_draft,
    cache: CacheConfig = CACHE,
    schedule: ScheduleConfig = SCHEDULE,
) -> EngineConfig:
    """The engine's configuration from command-line values. Raises ConfigError."""
    if drafter == "dflash2" and paths.drafter_dir is None:
        raise ConfigError("drafter 'dflash2' needs --drafter-dir with a DFlash2 checkpoint")
    return EngineConfig(
        model_dir=paths.model_dir,
        max_seq_len=max_seq_len,
        threads=threads,
        stages=stages,
        partition=partition,
        cache=cache,
        draft=DraftConfig(
            drafter=drafter,
            drafter_dir=paths.drafter_dir,
            num_draft_tokens=num_draft_tokens,
            adaptive_draft=adaptive_draft,
        ),
        schedule=schedule,
    )


def read_keys(path: Path | None) -> tuple[str, ...]:
    """API keys, one a line; empty lines and lines starting with # are skipped."""
    if path is None:
        return ()
    try:
        if path.stat().st_size > MAX_KEY_FILE_BYTES:
            raise ConfigError(f"api key file {path} is larger than 1 MiB; give one key a line")
        lines = path.read_text().splitlines()
    except OSError as err:
        raise ConfigError(f"api key file {path}: {err.strerror}; check the path") from None
    except UnicodeDecodeError:
        raise ConfigError(f"api key file {path} is not text; give one key a line") from None
    keys = tuple(line.strip() for line in lines if line.strip() and not line.startswith("#"))
    if not keys:
        raise ConfigError(f"api key file {path} holds no key; add one or drop --api-key-file")
    return keys


def note(text: str) -> None:
    """A line for the person at the terminal; stdout stays free for results."""
    print(text, file=sys.stderr, flush=True)
