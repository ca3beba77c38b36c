"""An engine loop without a model, for tests of the process boundary: one token per request and
step.

Prompt [n, ...] yields n, n + 1, ...; some first ids make trouble in the child on purpose.
"""

import os
import time

from twining.config import EngineConfig
from twining.engine.request import Delta, EngineReady, EngineStats, Request
from twining.engine.scheduler import StepKind, StepPlan
from twining.errors import CheckpointError, ConfigError

DIE, RAISE, HANG, SLOW = 1_000_001, 1_000_002, 1_000_003, 1_000_004


class LoopEngine:
    """Counts upwards for every open request."""

    def __init__(self) -> None:
        self.open: dict[str, list[int]] = {}
        self.requests: dict[str, Request] = {}
        self.outbox: list[Delta] = []

    @property
    def has_work(self) -> bool:
        return bool(self.open or self.outbox)

    def ready(self) -> EngineReady:
        return EngineReady(
            max_seq_len=1024,
            vocab_size=100,
            max_seqs=4,
            drafter="none",
            num_draft_tokens=0,
            num_pages=16,
            load_s=0.0,
        )

    def stats(self) -> EngineStats:
        return EngineStats(running=len(self.open))

    def submit(self, request: Request) -> None:
        self.open[request.id] = []
        self.requests[request.id] = request
        self.outbox.append(Delta(request_id=request.id, kind="admitted"))

    def cancel(self, request_id: str) -> None:
        if self.open.pop(request_id, None) is not None:
            self.outbox.append(
                Delta(request_id=request_id, kind="finished", finish_reason="cancelled")
            )

    def plan(self) -> StepPlan:
        slow = any(self.requests[i].prompt_ids[0] == SLOW for i in self.open)
        return StepPlan(kind=StepKind.PREFILL if slow else StepKind.VERIFY)

    def run(self, plan: StepPlan) -> list[Delta]:
        for request_id, tokens in list(self.open.items()):
            request = self.requests[request_id]
            first = request.prompt_ids[0]
            if first == DIE:
                os.abort()
            if first == RAISE:
                raise RuntimeError("a bug")
            if first == HANG:
                time.sleep(3600)
            if first == SLOW:
                time.sleep(1.5)
            tokens.append(first + len(tokens))
            self.outbox.append(Delta(request_id=request_id, kind="tokens", token_ids=tokens[-1:]))
            if len(tokens) == request.max_tokens:
                del self.open[request_id]
                self.outbox.append(
                    Delta(request_id=request_id, kind="finished", finish_reason="length")
                )
        time.sleep(0.002)
        deltas, self.outbox = self.outbox, []
        return deltas


def make_loop(config: EngineConfig) -> LoopEngine:
    """model_dir chooses how the start goes."""
    name = config.model_dir.name
    if name == "bad_config":
        raise ConfigError("max_pages=1 is too few; use 9")
    if name == "bad_checkpoint":
        raise CheckpointError("x.safetensors is truncated; download it again")
    if name == "bug":
        raise ValueError("two\nlines")
    if name == "die":
        os._exit(3)
    if name == "slow":
        time.sleep(3600)
    return LoopEngine()
