"""Bodies of the generation endpoints and the checks across fields (spec/api.md 5.2, 5.4, 7, 8).

What this version cannot honour is refused with `unsupported_parameter`; nothing that would change
the meaning of a request is dropped in silence.
"""

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from twining.config import SamplingDefaults
from twining.errors import RequestError
from twining.serving.http_errors import shown
from twining.serving.openai.fields import (
    BadWords,
    Body,
    Bool,
    Budget,
    CacheSalt,
    Choices,
    Count,
    Int,
    List,
    LogitBias,
    MaxTokens,
    MaxTokensRaw,
    MinP,
    Object,
    Penalty,
    Repetition,
    RequestId,
    Seed,
    Stop,
    Str,
    StreamOptions,
    Temperature,
    TokenIds,
    Top20,
    TopK,
    TopP,
)

MAX_MESSAGES = 65_536
MAX_PARTS = 65_536
MAX_TOOLS = 1024
SILENTLY_IGNORED = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
)
IGNORED = (
    "verbosity",
    "prediction",
    "web_search_options",
    "typical_p",
    "tfs_z",
    "n_probs",
    "id_slot",
)
IGNORED_PREFIXES = ("mirostat", "dynatemp_", "xtc_", "dry_")
# Ignoring one of these would change what the client asked for.
REFUSED = (
    "functions",
    "function_call",
    "audio",
    "truncate_prompt_tokens",
    "use_beam_search",
    "prompt_embeds",
    "lora_request",
    "mm_processor_kwargs",
    "media_io_kwargs",
)


class SamplingBody(Body):
    """Fields that chat and raw completions share."""

    model: Str | None = None
    min_tokens: Count = 0
    temperature: Temperature | None = None
    top_p: TopP | None = None
    top_k: TopK | None = None
    min_p: MinP | None = None
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    repetition_penalty: Repetition | None = None
    repeat_penalty: Repetition | None = None
    seed: Seed = -1
    n: Choices = 1
    stop: Stop = Field(default_factory=list)
    stop_token_ids: TokenIds = Field(default_factory=list)
    include_stop_str_in_output: Bool = False
    ignore_eos: Bool = False
    logit_bias: LogitBias = Field(default_factory=dict)
    prompt_logprobs: Top20 | None = None
    stream: Bool = False
    stream_options: StreamOptions | None = None
    bad_words: BadWords = Field(default_factory=list)
    cache_prompt: Bool = True
    cache_salt: CacheSalt = ""
    priority: Int = 0
    request_id: RequestId | None = None
    return_token_ids: Bool = False
    timings_per_token: Bool = False


class ChatBody(SamplingBody):
    """POST /v1/chat/completions. Messages and tools are checked further by the chat format."""

    messages: List
    max_completion_tokens: MaxTokens | None = None
    max_tokens: MaxTokens | None = None
    logprobs: Bool = False
    top_logprobs: Top20 = 0
    tools: List = Field(default_factory=list)
    tool_choice: Any = None
    parallel_tool_calls: Bool = True
    reasoning_effort: Str | None = None
    reasoning: Object = Field(default_factory=dict)
    thinking_token_budget: Budget | None = None
    thinking_budget: Budget | None = None
    include_reasoning: Bool = True
    chat_template_kwargs: Object = Field(default_factory=dict)
    enable_thinking: Any = None
    thinking: Any = None
    add_generation_prompt: Bool | None = None
    continue_final_message: Bool = False
    echo: Bool = False
    return_progress: Bool = False


class CompletionBody(SamplingBody):
    """POST /v1/completions."""

    prompt: Any
    max_tokens: MaxTokensRaw | None = None
    max_completion_tokens: MaxTokensRaw | None = None
    n_predict: MaxTokensRaw | None = None
    logprobs: Top20 | None = None
    echo: Bool = False
    skip_special_tokens: Bool = True
    best_of: Choices | None = None


def _unsupported(
    name: str, why: str = "this version does not support it; leave it out"
) -> RequestError:
    return RequestError(f"{name}: {why}", code="unsupported_parameter", param=name)


def ignored_warnings(data: Mapping[str, Any]) -> list[str]:
    """Codes for members that are accepted and without effect (spec 5.4)."""
    return [
        f"ignored:{name}"
        for name in data
        if name in IGNORED or (name.startswith(IGNORED_PREFIXES) and len(name) <= 64)
    ]


def refuse_unsupported(data: Mapping[str, Any]) -> None:
    """Raises RequestError for members that must not be ignored (spec 5.2, end)."""
    for name in REFUSED:
        if data.get(name) is not None:
            raise _unsupported(name)
    modalities = data.get("modalities")
    if modalities is not None and modalities != ["text"]:
        raise _unsupported("modalities", "only ['text'] is offered")


def check_common(body: SamplingBody, *, vocab_size: int, max_n: int) -> None:
    """Checks that need the server's options or several fields at once."""
    if body.n > max_n:
        raise RequestError(
            f"n must be between 1 and {max_n} (got {body.n})", code="out_of_range", param="n"
        )
    for token in body.stop_token_ids:
        if not 0 <= token < vocab_size:
            raise RequestError(
                f"stop_token_ids must hold ids between 0 and {vocab_size - 1} (got {shown(token)})",
                code="out_of_range",
                param="stop_token_ids",
            )
    for token in body.logit_bias:
        if token >= vocab_size:
            raise RequestError(
                f"logit_bias keys must be ids between 0 and {vocab_size - 1} (got {token})",
                code="invalid_value",
                param="logit_bias",
            )
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs cannot be streamed; set stream to false",
            code="conflicting_fields",
            param="prompt_logprobs",
        )
    if body.bad_words:
        raise _unsupported("bad_words", "this version does not support it; use logit_bias")


def asked_tokens(body: ChatBody | CompletionBody) -> int | None:
    """The output limit as asked, None for none or -1; the first of the names wins."""
    names = [body.max_completion_tokens, body.max_tokens]
    if isinstance(body, CompletionBody):
        # The public API's own default: a raw completion without a limit stops after 16 tokens.
        names = [body.max_tokens, body.max_completion_tokens, body.n_predict, 16]
    asked = next((value for value in names if value is not None), None)
    if asked == -1:
        asked = None
    if asked is not None and body.min_tokens > asked:
        raise RequestError(
            f"min_tokens must be between 0 and the output limit {asked} (got {body.min_tokens})",
            code="out_of_range",
            param="min_tokens",
        )
    return asked


def check_chat(body: ChatBody) -> None:
    """Counts and conflicts of a chat body."""
    if len(body.messages) > MAX_MESSAGES:
        raise _too_many("messages", len(body.messages), MAX_MESSAGES)
    if len(body.tools) > MAX_TOOLS:
        raise _too_many("tools", len(body.tools), MAX_TOOLS)
    parts = sum(
        len(m["content"])
        for m in body.messages
        if isinstance(m, dict) and isinstance(m.get("content"), list)
    )
    if parts > MAX_PARTS:
        raise _too_many("messages", parts, MAX_PARTS)
    if body.top_logprobs and not body.logprobs:
        raise RequestError(
            "top_logprobs needs logprobs: true", code="conflicting_fields", param="top_logprobs"
        )
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "continue_final_message needs add_generation_prompt: false",
            code="conflicting_fields",
            param="continue_final_message",
        )
    if body.echo and not body.continue_final_message:
        raise RequestError(
            "echo needs continue_final_message: true", code="conflicting_fields", param="echo"
        )


def _too_many(name: str, count: int, limit: int) -> RequestError:
    return RequestError(
        f"{name} has {count} items; at most {limit} are allowed", code="too_many_items", param=name
    )


def reasoning_budget(body: ChatBody) -> int:
    """Tokens of thought allowed, -1 for no limit (spec 7.5); the three names of 5.2."""
    asked = body.reasoning.get("max_tokens")
    if asked is not None and (isinstance(asked, bool) or not isinstance(asked, int) or asked < -1):
        raise RequestError(
            f"reasoning.max_tokens must be -1 or at least 0 (got {shown(asked)})",
            code="out_of_range",
            param="reasoning.max_tokens",
        )
    for value in (body.thinking_token_budget, asked, body.thinking_budget):
        if value is not None:
            return int(value)
    return -1


def show_reasoning(body: ChatBody) -> bool:
    """False when the client asked to hide the thought."""
    exclude = body.reasoning.get("exclude")
    if exclude is not None and not isinstance(exclude, bool):
        raise RequestError(
            "reasoning.exclude must be true or false", code="wrong_type", param="reasoning.exclude"
        )
    return body.include_reasoning and exclude is not True


def sampling_values(
    body: SamplingBody, defaults: SamplingDefaults
) -> tuple[dict[str, Any], list[str]]:
    """(temperature, top_p, top_k, min_p, repetition) with defaults filled in, and warnings."""
    warnings: list[str] = []
    temperature = defaults.temperature if body.temperature is None else body.temperature
    top_p = defaults.top_p if body.top_p is None else body.top_p
    if top_p == 0:
        warnings.append("top_p_zero")
        temperature, top_p = 0.0, 1.0
    top_k = defaults.top_k if body.top_k is None else max(body.top_k, 0)
    repetition = body.repetition_penalty or body.repeat_penalty or 1.0
    values = {
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": defaults.min_p if body.min_p is None else body.min_p,
        "repetition_penalty": repetition,
    }
    return values, warnings
