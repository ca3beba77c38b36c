"""What every endpoint needs: the configuration, the tokenizer, the engine client.

One immutable object, made once; the only thing that changes is `phase`, which shutdown sets.
"""

import time
from dataclasses import dataclass, field

from twining import __version__
from twining.config import Effort, ServerConfig
from twining.errors import RequestError
from twining.serving.client import EngineLike
from twining.serving.http_errors import shown
from twining.serving.metrics import Metrics
from twining.serving.tokenizer import Tokenizer

EFFORT_SUFFIXES: dict[str, Effort] = {":low": "low", ":high": "high", ":max": "max"}


@dataclass(slots=True)
class Phase:
    """Where the server is in its life."""

    is_draining: bool = False
    active: int = 0  # generation requests in progress


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerContext:
    """max_seq_len and vocab_size are what is known before the engine is ready."""

    config: ServerConfig
    tokenizer: Tokenizer
    engine: EngineLike
    max_seq_len: int
    vocab_size: int
    trained_length: int
    longest_token: int  # bytes of the longest vocabulary entry
    fingerprint: str = f"twining-{__version__}-exact"
    display_name: str = "GLM-5.3-Flash"
    created: int = field(default_factory=lambda: int(time.time()))
    phase: Phase = field(default_factory=Phase)
    metrics: Metrics = field(default_factory=Metrics)

    @property
    def context_length(self) -> int:
        """L of spec section 9, tokens."""
        ready = self.engine.ready
        return ready.max_seq_len if ready is not None else self.max_seq_len

    @property
    def is_drafting(self) -> bool:
        ready = self.engine.ready
        return ready is not None and ready.num_draft_tokens > 0 and ready.drafter != "none"

    @property
    def model_ids(self) -> tuple[str, ...]:
        return (self.config.model_id, *self.config.aliases)

    def availability(self) -> RequestError | None:
        """Why generation is impossible now (503), or None."""
        if self.phase.is_draining:
            return RequestError(
                "the server is shutting down; retry elsewhere", code="shutting_down", status=503
            )
        if self.engine.ready is None:
            return RequestError(
                "the model is loading; retry in a few seconds", code="model_loading", status=503
            )
        if not self.engine.healthy:
            return RequestError(
                "the engine has failed and is being restarted; retry",
                code="engine_failed",
                status=503,
            )
        return None

    def resolve_model(self, asked: str | None) -> tuple[str, Effort | None]:
        """(model string of the reply, effort its suffix chose). Raises 404 model_not_found."""
        if asked is None:
            return self.config.model_id, None
        base, effort = asked, None
        for suffix, word in EFFORT_SUFFIXES.items():
            if asked.endswith(suffix):
                base, effort = asked.removesuffix(suffix), word
        if base not in self.model_ids and not self.config.any_model:
            raise RequestError(
                f"model {shown(asked)} is not served here; use {self.config.model_id}",
                code="model_not_found",
                param="model",
                status=404,
            )
        return asked, effort
