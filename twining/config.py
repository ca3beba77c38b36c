"""Every setting of the engine and the server, with its default. The only place defaults live.

Plain frozen dataclasses, no torch. `__post_init__` raises ConfigError naming field, value and fix;
anything
`auto` is resolved once at start into a new config, and the effective values are printed.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from twining.errors import ConfigError

PAGE_SIZE = 256  # tokens per cache page; a multiple of the pool size, so pools stay inside a page
PREFILL_BLOCK = 64  # tokens; the fixed unit of prefill arithmetic (design.md P1, P2)

DrafterName = Literal["auto", "none", "ngram", "mtp", "dflash2"]
LatentFormat = Literal["fp32", "bf16", "fp16", "q8", "q6", "q4"]
ReuseMode = Literal["exact", "fast", "off"]
Admission = Literal["reserved", "optimistic"]
ThinkingOff = Literal["low", "prefill", "reject"]
Effort = Literal["low", "high", "max"]


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Sizes and formats of the cache planes."""

    latent_format: LatentFormat = "fp32"  # MLA latents; fp32 keeps the reference arithmetic
    max_pages: int = (
        0  # pages of 256 tokens shared by all sequences; 0 = enough for max_seqs full ones
    )
    reuse: ReuseMode = "exact"  # prefixes: exact = warm equals cold, fast = also decode-made state
    checkpoint_gib: float = 2.0  # GiB of host memory for the planes of reusable prefixes
    checkpoint_every: int = 2048  # prompt tokens between two checkpoints of one prompt

    def __post_init__(self) -> None:
        _require(
            self.max_pages >= 0, f"max_pages={self.max_pages} is negative; use 0 for automatic"
        )
        _require(
            self.reuse in ("exact", "fast", "off"),
            f"reuse={self.reuse!r} is unknown; use exact, fast or off",
        )
        _require(
            0 <= self.checkpoint_gib < 2**20,
            f"checkpoint_gib={self.checkpoint_gib} is outside 0..1048575; use reuse=off for none",
        )
        _require(
            self.checkpoint_every > 0 and self.checkpoint_every % PAGE_SIZE == 0,
            f"checkpoint_every={self.checkpoint_every} is not a positive multiple of {PAGE_SIZE}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftConfig:
    """Speculative drafting. Nothing here can change a token of the output."""

    # auto: dflash2 if a drafter folder is given, else mtp if the model has it, else ngram
    drafter: DrafterName = "auto"
    drafter_dir: Path | None = None  # DFlash2 checkpoint folder
    num_draft_tokens: int = 7  # K: drafts verified per step; 0 turns drafting off
    adaptive_draft: bool = (
        False  # fewer drafts when they are rarely right or cost more than they save
    )
    ngram_min: int = 3  # tokens; shortest suffix the n-gram drafter matches

    def __post_init__(self) -> None:
        _require(
            0 <= self.num_draft_tokens <= 15,
            f"num_draft_tokens={self.num_draft_tokens} is outside 0..15;"
            " a sequence has at most 16 verify rows",
        )
        _require(self.ngram_min >= 1, f"ngram_min={self.ngram_min} must be at least 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """Limits of batching and queueing."""

    max_seqs: int = 8  # sequences running at once
    max_batched_tokens: int = 2048  # prompt tokens per prefill step
    prefill_tokens_with_decodes: int = 256  # the same while other sequences decode
    decode_share: float = 0.5  # share of engine time that running chats keep during a long prefill
    max_queue: int = 64  # waiting requests; more are refused with 429
    queue_timeout_s: float = 120.0  # seconds a request may wait before 503
    # reserved: pages of the worst case are held from the start. optimistic: pages as they are
    # needed; when they run out, the youngest of the lowest priority is moved to host memory.
    admission: Admission = "reserved"

    def __post_init__(self) -> None:
        _require(1 <= self.max_seqs <= 256, f"max_seqs={self.max_seqs} is outside 1..256")
        for name in ("max_batched_tokens", "prefill_tokens_with_decodes"):
            value = getattr(self, name)
            _require(
                value >= PREFILL_BLOCK and value % PREFILL_BLOCK == 0,
                f"{name}={value} is not a positive multiple of {PREFILL_BLOCK}",
            )
        _require(
            0.0 < self.decode_share < 1.0,
            f"decode_share={self.decode_share} is not strictly between 0 and 1",
        )
        _require(self.max_queue >= 0, f"max_queue={self.max_queue} is negative")
        _require(
            self.admission in ("reserved", "optimistic"),
            f"admission={self.admission!r} is unknown; use reserved or optimistic",
        )
        _require(
            self.queue_timeout_s > 0, f"queue_timeout_s={self.queue_timeout_s} must be positive"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine process needs."""

    model_dir: Path
    max_seq_len: int = 0  # tokens, prompt + completion; 0 = the model's own limit
    threads: int = 0  # CPU threads; 0 = all cores, rounded down to a power of two (design.md P1)
    device: str = "cpu"
    stages: int = 1  # devices that the layers are divided over, in order
    partition: str = ""  # layers of each stage, as "23,22"; "" = balanced by bytes
    cache: CacheConfig = field(default_factory=CacheConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)

    def __post_init__(self) -> None:
        _require(
            self.max_seq_len >= 0,
            f"max_seq_len={self.max_seq_len} is negative; use 0 for automatic",
        )
        _require(
            self.threads >= 0 and self.threads & (self.threads - 1) == 0,
            f"threads={self.threads} is not a power of two; other counts split vector loops"
            " unevenly and change low bits (use 1, 2, 4, 8 ...)",
        )
        _require(
            self.device == "cpu",
            f"device={self.device!r} is not available in this version; use device='cpu'",
        )
        _require(1 <= self.stages <= 64, f"stages={self.stages} is outside 1..64")
        parts = self.partition.count(",") + 1
        _require(
            not self.partition or parts == self.stages,
            f"partition={self.partition[:60]!r} names {parts} stages, but stages={self.stages};"
            " make them equal, or leave partition empty",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """Values used when a request leaves a field out (spec/api.md 5.2)."""

    temperature: float = 1.0
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        _require(0 <= self.temperature <= 2, f"temperature={self.temperature} is outside 0..2")
        _require(0 < self.top_p <= 1, f"top_p={self.top_p} is outside (0, 1]")
        _require(self.top_k >= 0, f"top_k={self.top_k} is negative; use 0 for off")
        _require(0 <= self.min_p <= 1, f"min_p={self.min_p} is outside 0..1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """The HTTP side (spec/api.md section 21)."""

    host: str = "127.0.0.1"
    port: int = 8000
    api_keys: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    allowed_hosts: tuple[
        str, ...
    ] = ()  # further Host names accepted on a loopback bind without keys
    model_id: str = "glm-5.3-flash"
    aliases: tuple[str, ...] = ()
    any_model: bool = True
    default_effort: Effort = "high"
    thinking_off: ThinkingOff = "low"
    tool_guard: bool = True
    max_n: int = 8
    max_body_mib: int = 96
    heartbeat_s: float = 15.0  # 0 = off
    drain_timeout_s: float = 30.0
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)

    def __post_init__(self) -> None:
        _require(0 < self.port < 65536, f"port={self.port} is outside 1..65535")
        _require(1 <= self.max_n <= 64, f"max_n={self.max_n} is outside 1..64")
        _require(self.max_body_mib >= 1, f"max_body_mib={self.max_body_mib} must be at least 1")
        _require(self.heartbeat_s >= 0, f"heartbeat_s={self.heartbeat_s} is negative; 0 = off")
        _require(self.drain_timeout_s >= 0, f"drain_timeout_s={self.drain_timeout_s} is negative")
