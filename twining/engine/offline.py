"""Run a batch of requests through an engine in this process: commands, scores and tests.

Nothing here is special: requests go through the same `submit` and `step` as in the server.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from twining.engine.request import (
    Delta,
    EngineReady,
    FinishReason,
    Request,
    Timings,
    TokenLogprob,
)


class StepEngine(Protocol):
    """The part of engine.core.Engine that this module drives."""

    @property
    def has_work(self) -> bool: ...
    @property
    def num_open(self) -> int: ...
    def ready(self) -> EngineReady: ...
    def submit(self, request: Request) -> None: ...
    def step(self) -> list[Delta]: ...


@dataclass(slots=True, kw_only=True)
class Result:
    """All news of one request put together; `code` and `message` are set if it ended in error."""

    request_id: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_id: int = -1
    timings: Timings = field(default_factory=Timings)
    code: str = ""
    message: str = ""

    @property
    def accepted_length(self) -> float:
        """Mean tokens per verify step, bonus token included; 0 without a verify step."""
        steps = self.timings.draft_steps
        return (self.timings.num_accepted + steps) / steps if steps else 0.0

    def add(self, delta: Delta) -> None:
        """Take one delta in."""
        self.token_ids += delta.token_ids
        self.logprobs += delta.logprobs
        self.prompt_logprobs += delta.prompt_logprobs
        self.finish_reason = delta.finish_reason or self.finish_reason
        self.timings = delta.timings or self.timings
        if delta.kind == "finished":
            self.stop_id = delta.stop_id
        if delta.kind == "error":
            self.code, self.message = delta.code, delta.message


def generate(
    engine: StepEngine,
    requests: Iterable[Request],
    *,
    on_delta: Callable[[Delta], None] | None = None,
) -> list[Result]:
    """Run all requests to their end; results in the order of the requests.

    At most max_seqs requests are open at a time, so none is refused for a full queue. on_delta sees
    every delta as it comes (progress bars, streaming to a terminal).
    Raises ValueError for an id that occurs twice.
    """
    waiting = iter(requests)
    results: dict[str, Result] = {}
    limit = engine.ready().max_seqs
    exhausted = False
    while True:
        while not exhausted and engine.num_open < limit:
            request = next(waiting, None)
            if request is None:
                exhausted = True
                break
            if request.id in results:
                raise ValueError(f"generate: request id {request.id!r} occurs twice")
            results[request.id] = Result(request_id=request.id)
            engine.submit(request)
        if exhausted and not engine.has_work:
            return list(results.values())
        for delta in engine.step():
            results[delta.request_id].add(delta)
            if on_delta is not None:
                on_delta(delta)
