"""From a validated body to engine requests (spec/api.md 5, 9): prompt, limits, sampling, choices.

Everything that can fail in a request fails here, before the first byte of the reply.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from twining.engine.request import GrammarSpec, Request, SamplingParams
from twining.errors import RequestError
from twining.serving.access import random_id
from twining.serving.chat_format import build_prompt
from twining.serving.context import ServerContext
from twining.serving.generation import Choice
from twining.serving.openai.bodies import (
    ChatBody,
    CompletionBody,
    asked_tokens,
    check_chat,
    check_common,
    ignored_warnings,
    reasoning_budget,
    refuse_unsupported,
    sampling_values,
    show_reasoning,
)
from twining.serving.openai.fields import parse_body
from twining.serving.output import ChoiceOutput, OutputOptions
from twining.serving.parsing import start_state
from twining.serving.structured import build_grammar, content_grammar, parse_tool_choice

MAX_PROMPTS = 32
SEED_MASK = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A request that is ready to run. prompts: token ids, one list per prompt."""

    body: ChatBody | CompletionBody
    model: str
    choices: list[Choice]
    prompts: list[list[int]]
    warnings: list[str]
    show_reasoning: bool = True
    partial_reasoning: str = ""
    partial_content: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tail:
    """What differs between the choices of chat and raw completions."""

    banned_ids: tuple[int, ...] = ()
    grammar: GrammarSpec | None = None
    force_after: int = -1
    logprobs: int = -1
    prompt_logprobs: int = -1


def overflow(context: ServerContext, count: int, *, at_least: bool = False) -> RequestError:
    """The refusal of spec 3.3; clients compare these very words."""
    limit = context.context_length
    words = "at least " if at_least else ""
    return RequestError(
        f"This model's maximum context length is {limit} tokens. The prompt has {words}{count}"
        f" tokens and at most {limit - 1} fit; shorten it.",
        code="context_length_exceeded",
        param=None,
        extra={"n_prompt_tokens": count, "n_ctx": limit},
    )


def refuse_huge(context: ServerContext, text: Iterable[str]) -> None:
    """Refuse text that cannot fit, before tokenising it (spec 9)."""
    longest = context.longest_token
    num_bytes = sum(len(piece.encode()) for piece in text)
    if num_bytes > context.context_length * longest:
        raise overflow(context, -(-num_bytes // longest), at_least=True)


def check_length(context: ServerContext, ids: Sequence[int]) -> None:
    """Rule P <= L - 1. Raises RequestError context_length_exceeded."""
    if len(ids) >= context.context_length:
        raise overflow(context, len(ids))


def prepare_chat(context: ServerContext, data: dict[str, Any]) -> Prepared:
    """Raises RequestError for anything wrong with a chat body. Pure; may run on a thread."""
    refuse_unsupported(data)
    content = content_grammar(data)
    body = parse_body(ChatBody, data)
    check_chat(body)
    check_common(body, vocab_size=context.vocab_size, max_n=context.config.max_n)
    asked = asked_tokens(body)
    budget = reasoning_budget(body)
    model, effort = context.resolve_model(body.model)
    prompt = build_prompt(
        data,
        default_effort=effort or context.config.default_effort,
        thinking_off=context.config.thinking_off,
    )
    choice = parse_tool_choice(body.tool_choice, prompt.tools)
    refuse_best_of(data, body.n)
    if prompt.media:
        raise RequestError(
            "messages hold pictures or video; this version takes text only",
            code="unsupported_content",
            param="messages",
        )
    refuse_huge(context, (segment.text for segment in prompt.segments))
    tokenizer = context.tokenizer
    ids = tokenizer.encode_segments(prompt.segments)
    check_length(context, ids)
    start = start_state(ids, tokenizer.markers)
    shown = show_reasoning(body)
    grammar, grammar_warnings = build_grammar(
        content=content,
        tools=prompt.tools,
        choice=choice,
        parallel=body.parallel_tool_calls,
        is_thinking=start == "reasoning",
        markers=tokenizer.markers,
        tool_guard=context.config.tool_guard,
    )
    is_barred = bool(prompt.tools) and not choice.is_calling
    tail = _Tail(
        banned_ids=(tokenizer.markers.tool_call_open,) if is_barred else (),
        grammar=grammar,
        force_after=budget if start == "reasoning" else -1,
        logprobs=body.top_logprobs if body.logprobs else -1,
        prompt_logprobs=-1 if body.prompt_logprobs is None else body.prompt_logprobs,
    )
    choices, warnings = _choices(
        context,
        body,
        [ids],
        asked,
        tail,
        lambda options: (
            ChoiceOutput.for_chat(
                tokenizer,
                options,
                start=start,
                tools=prompt.tools if choice.is_calling else [],
                parallel_tool_calls=body.parallel_tool_calls,
                tool_choice=choice.mode,
            )
            if start is not None
            else ChoiceOutput.for_text(tokenizer, options, skip_special=True)
        ),
    )
    return Prepared(
        body=body,
        model=model,
        choices=choices,
        prompts=[ids],
        warnings=[*ignored_warnings(data), *prompt.warnings, *grammar_warnings, *warnings],
        show_reasoning=shown,
        partial_reasoning=prompt.partial_reasoning if body.echo else "",
        partial_content=prompt.partial_content if body.echo else "",
    )


def prepare_completion(context: ServerContext, data: dict[str, Any]) -> Prepared:
    """Raises RequestError for anything wrong with a raw completion body."""
    refuse_unsupported(data)
    content = content_grammar(data)
    if data.get("suffix") is not None:
        raise RequestError(
            "suffix: fill-in-the-middle is off; leave it out",
            code="unsupported_parameter",
            param="suffix",
        )
    body = parse_body(CompletionBody, data)
    check_common(body, vocab_size=context.vocab_size, max_n=context.config.max_n)
    asked = asked_tokens(body)
    model, _ = context.resolve_model(body.model)
    refuse_best_of(data, body.n)
    if body.stream and body.echo and body.logprobs is not None:
        raise RequestError(
            "echo with logprobs cannot be streamed; set stream to false",
            code="conflicting_fields",
            param="echo",
        )
    prompts = _raw_prompts(context, body.prompt)
    for ids in prompts:
        check_length(context, ids)
    logprobs = -1 if body.logprobs is None else body.logprobs
    asked_prompt = -1 if body.prompt_logprobs is None else body.prompt_logprobs
    grammar, grammar_warnings = build_grammar(content=content, markers=context.tokenizer.markers)
    tail = _Tail(
        grammar=grammar,
        logprobs=logprobs,
        prompt_logprobs=max(asked_prompt, logprobs if body.echo else -1),
    )
    choices, warnings = _choices(
        context,
        body,
        prompts,
        asked,
        tail,
        lambda options: ChoiceOutput.for_text(
            context.tokenizer, options, skip_special=body.skip_special_tokens
        ),
    )
    return Prepared(
        body=body,
        model=model,
        choices=choices,
        prompts=prompts,
        warnings=[*ignored_warnings(data), *grammar_warnings, *warnings],
    )


def refuse_best_of(data: dict[str, Any], n: int) -> None:
    """best_of has no effect only when it equals n."""
    best_of = data.get("best_of")
    if best_of is not None and best_of != n:
        raise RequestError(
            f"best_of must equal n={n}; leave it out", code="unsupported_parameter", param="best_of"
        )


def _choices(
    context: ServerContext,
    body: ChatBody | CompletionBody,
    prompts: list[list[int]],
    asked: int | None,
    tail: _Tail,
    make_output: Callable[[OutputOptions], ChoiceOutput],
) -> tuple[list[Choice], list[str]]:
    """n choices per prompt, numbered prompt by prompt, and warning codes."""
    values, warnings = sampling_values(body, context.config.sampling)
    stops = [stop for stop in body.stop if stop]
    if len(stops) < len(body.stop):
        warnings.append("stop_empty_dropped")
    if body.stream_options is not None and not body.stream:
        warnings.append("stream_options_ignored")
    markers = context.tokenizer.markers
    stop_ids = set(body.stop_token_ids) | (set() if body.ignore_eos else set(markers.stop_ids))
    seed = secrets.randbits(63) if body.seed == -1 else body.seed
    group = random_id("gen_")
    choices: list[Choice] = []
    for ids in prompts:
        room = context.context_length - len(ids)
        limit = room if asked is None else min(asked, room)
        if asked is not None and asked > room:
            warnings.append("max_tokens_clamped")
        for copy in range(body.n):
            index = len(choices)
            sampling = SamplingParams(
                # Masked so that seed + index stays a 64-bit integer.
                seed=(seed + copy) & SEED_MASK if copy else seed,
                presence_penalty=body.presence_penalty,
                frequency_penalty=body.frequency_penalty,
                logit_bias=body.logit_bias,
                banned_ids=tail.banned_ids,
                penalty_exempt_ids=markers.structure_ids,
                **values,
            )
            request = Request(
                id=f"{group}-{index}",
                prompt_ids=ids,
                sampling=sampling,
                max_tokens=limit,
                min_tokens=min(body.min_tokens, limit),
                stop_ids=tuple(sorted(stop_ids)),
                logprobs=tail.logprobs,
                prompt_logprobs=tail.prompt_logprobs,
                force_after=tail.force_after,
                force_id=markers.think_close if tail.force_after >= 0 else -1,
                grammar=tail.grammar,
                priority=body.priority,
                cache_salt=body.cache_salt,
                use_prefix_cache=body.cache_prompt,
            )
            options = OutputOptions(
                stops=tuple(stops),
                include_stop=body.include_stop_str_in_output,
                min_tokens=request.min_tokens,
                stop_ids=frozenset(stop_ids),
                user_stop_ids=frozenset(body.stop_token_ids),
                logprobs=tail.logprobs,
            )
            choices.append(Choice(index=index, request=request, output=make_output(options)))
    return choices, warnings


def _raw_prompts(context: ServerContext, prompt: Any) -> list[list[int]]:
    """The four prompt forms of spec 8 as token ids. Raises RequestError."""
    if isinstance(prompt, str):
        items: list[Any] = [prompt]
    elif isinstance(prompt, list) and prompt and all(_is_id(item) for item in prompt):
        items = [prompt]
    elif isinstance(prompt, list) and prompt:
        items = prompt
    else:
        raise _bad_prompt("must be a non-empty string, list of strings or list of token ids")
    if len(items) > MAX_PROMPTS:
        raise RequestError(
            f"prompt has {len(items)} entries; at most {MAX_PROMPTS} are allowed",
            code="too_many_items",
            param="prompt",
        )
    return [_raw_prompt(context, item) for item in items]


def _raw_prompt(context: ServerContext, item: Any) -> list[int]:
    if isinstance(item, str):
        if not item:
            raise _bad_prompt("must not be empty; send at least one character", "invalid_value")
        refuse_huge(context, [item])
        return context.tokenizer.encode_with_markers(item)
    if not isinstance(item, list) or not item or not all(_is_id(token) for token in item):
        raise _bad_prompt("must hold strings or non-empty lists of token ids")
    if not all(0 <= token < context.vocab_size for token in item):
        raise _bad_prompt(f"must hold ids between 0 and {context.vocab_size - 1}", "out_of_range")
    return [int(token) for token in item]


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _bad_prompt(what: str, code: str = "wrong_type") -> RequestError:
    return RequestError(f"prompt {what}", code=code, param="prompt")
