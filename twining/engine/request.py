"""What crosses the boundary of the engine: requests in, deltas out. msgspec structs, no torch.

A request is token ids and numbers only; text, chat format, stop strings and tool parsing live in
serving. The engine ends a sequence at a stop token or at max_tokens; serving cuts at stop strings
and cancels.
"""

from typing import Literal

import msgspec

FinishReason = Literal["stop", "length", "cancelled", "error"]


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How one token is chosen (spec/api.md 5.3). Already validated by whoever builds it.

    seed: any 64-bit integer; noise is a pure function of (seed, absolute position, token id).
    temperature 0 is greedy. top_k 0, min_p 0, top_p 1, penalties 0 and repetition 1 are off.
    """

    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    banned_ids: tuple[
        int, ...
    ] = ()  # never sampled (for example the tool marker with tool_choice none)
    penalty_exempt_ids: tuple[int, ...] = ()  # structure markers: no penalty touches them


class GrammarSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What the generated tokens must look like (engine/grammar.py); built by serving/structured.

    source: a grammar in llguidance's JSON form, token ids already in it. start_id: the grammar
    starts after this token was generated (the end of the thought), -1 for at once. trigger_id: from
    then on text is free, and one match must follow each of these tokens (the opening of a call); -1
    for one match and then the end. banned_before: never sampled before the start. is_optional: an
    engine that cannot apply it goes on without.
    """

    source: str
    start_id: int = -1
    trigger_id: int = -1
    banned_before: tuple[int, ...] = ()
    is_optional: bool = False


class Request(msgspec.Struct, frozen=True, kw_only=True, tag="request"):
    """One generation. `max_tokens` >= 1 counts every sampled token, the stop token included;
    0 means prefill only: the request ends with "length" and no token."""

    id: str
    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int
    min_tokens: int = 0  # stop tokens are banned until this many tokens were sampled
    stop_ids: tuple[int, ...] = ()
    logprobs: int = -1  # -1: none; n >= 0: chosen token plus n best, raw log-softmax of the target
    prompt_logprobs: int = -1  # the same for prompt tokens
    num_draft_tokens: int = -1  # -1: engine's setting; lower values allowed per request
    force_after: int = (
        -1
    )  # after this many sampled tokens without `force_id`, force it once (think budget)
    force_id: int = -1
    grammar: GrammarSpec | None = None
    priority: int = 0  # lower runs first
    cache_salt: str = ""
    use_prefix_cache: bool = True


class TokenLogprob(msgspec.Struct, frozen=True):
    """Natural log of the raw softmax before temperature, penalties and masks."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class Timings(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and counts of one request (spec/api.md section 10)."""

    queue_s: float = 0.0
    prefill_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    cached_tokens: int = 0
    draft_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0


class Delta(msgspec.Struct, frozen=True, kw_only=True, tag="delta"):
    """News of one request: admission, tokens, or the end.

    kind "admitted": prefill starts. "progress": prompt_done tokens of the prompt are in.
    "tokens": token_ids (>= 1) and, if asked, one logprob entry each. "finished": finish_reason is
    set; may also carry last tokens. "error": finish_reason "error" with message and code
    (spec/api.md 3.2).
    """

    request_id: str
    kind: Literal["admitted", "progress", "tokens", "finished", "error"]
    token_ids: list[int] = []
    logprobs: list[TokenLogprob] = []
    prompt_logprobs: list[TokenLogprob | None] = []
    prompt_done: int = 0
    finish_reason: FinishReason | None = None
    stop_id: int = -1  # the stop token that ended the sequence
    timings: Timings | None = None
    message: str = ""
    code: str = ""


class Cancel(msgspec.Struct, frozen=True, tag="cancel"):
    """Ask the engine to drop a request; it answers with a finished delta, reason "cancelled"."""

    request_id: str


class Shutdown(msgspec.Struct, frozen=True, tag="shutdown"):
    """Stop after the step in progress."""


class EngineReady(msgspec.Struct, frozen=True, kw_only=True, tag="ready"):
    """Sent once by the engine process when requests can be served."""

    max_seq_len: int  # tokens
    vocab_size: int
    max_seqs: int
    drafter: str
    num_draft_tokens: int
    num_pages: int
    load_s: float


class EngineFailed(msgspec.Struct, frozen=True, kw_only=True, tag="failed"):
    """Sent once instead of EngineReady when the engine cannot start; the process ends after it.

    kind names the error class: "config", "checkpoint", or "engine" (anything else).
    """

    message: str
    kind: Literal["config", "checkpoint", "engine"] = "engine"


class EngineStats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Sent after steps and at least once a second while idle: the heartbeat of the loop.

    prefilling: sent just before a prefill step, which may take long without a sign of life.
    """

    prefilling: bool = False
    running: int = 0
    waiting: int = 0
    pages_used: int = 0
    pages_total: int = 0
    prompt_tokens: int = 0  # counters since start
    cached_tokens: int = 0
    generated_tokens: int = 0
    draft_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    preemptions: int = 0
    pages_cached: int = 0  # held by reusable prefixes alone, free for the asking
    checkpoints: int = 0  # reusable prefixes now
    checkpoint_bytes: int = 0  # host memory of their planes
    parked_bytes: int = 0  # host memory of preempted sequences
    prefix_hits: int = 0  # requests; counters since start
    prefix_misses: int = 0
    prefix_mismatches: int = 0  # misses because a digest or a plane did not match
    prefix_evictions: int = 0


ToEngine = Request | Cancel | Shutdown
FromEngine = Delta | EngineReady | EngineFailed | EngineStats
