"""Token tools: /tokenize, /detokenize, /apply-template and their other names (spec/api.md 15).

They run on threads, beside generation, and need no engine.
"""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from twining.errors import RequestError
from twining.serving.access import add_warnings
from twining.serving.body import read_object
from twining.serving.chat_format import build_prompt, prompt_text
from twining.serving.context import ServerContext
from twining.serving.openai.fields import Body, Bool, List, Str, parse_body
from twining.serving.openai.prepare import refuse_huge

Work = Callable[[ServerContext, dict[str, Any], list[str]], dict[str, Any]]


class TokenizeBody(Body):
    """All three forms of /tokenize and the /v1/token/encode form."""

    prompt: Str | None = None
    content: Str | None = None
    text: Str | None = None
    messages: List | None = None
    add_special_tokens: Bool = False
    return_token_strs: Bool = False
    add_special: Bool = False
    parse_special: Bool = True
    with_pieces: Bool = False


class DetokenizeBody(Body):
    """/detokenize and /v1/token/decode."""

    tokens: List


class TokenTool:
    """One POST endpoint around a pure function."""

    def __init__(self, context: ServerContext, work: Work) -> None:
        self._context = context
        self._work = work

    async def __call__(self, request: Request) -> Response:
        """Raises RequestError for a bad body."""
        data = await read_object(request, self._context.config.max_body_mib << 20)
        warnings: list[str] = []
        reply = await asyncio.to_thread(self._work, self._context, data, warnings)
        add_warnings(request, warnings)
        return Response(msgspec.json.encode(reply), media_type="application/json")


def tokenize(context: ServerContext, data: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Ids of a raw prompt, of plain content, or of rendered messages."""
    body = parse_body(TokenizeBody, data)
    ids = _encode(context, body, data, warnings)
    pieces = [context.tokenizer.token_bytes(token) for token in ids]
    if body.content is not None and body.prompt is None and body.messages is None:
        if body.with_pieces:
            return {"tokens": [_piece(t, p) for t, p in zip(ids, pieces, strict=True)]}
        return {"tokens": ids}
    strings = [piece.decode(errors="replace") for piece in pieces]
    return {
        "count": len(ids),
        "max_model_len": context.context_length,
        "tokens": ids,
        "token_strs": strings if body.return_token_strs else None,
    }


def encode(context: ServerContext, data: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    """/v1/token/encode: `text` is a string or a list of messages."""
    if isinstance(data.get("text"), list):
        data = {**data, "messages": data["text"], "text": None}
    ids = _encode(context, parse_body(TokenizeBody, data), data, warnings)
    return {"tokens": ids, "length": len(ids)}


def detokenize(context: ServerContext, data: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    """Text of ids; bytes that are no character become U+FFFD."""
    text = _decode(context, data)
    return {"prompt": text, "content": text}


def decode(context: ServerContext, data: dict[str, Any], warnings: list[str]) -> dict[str, Any]:
    """/v1/token/decode."""
    return {"text": _decode(context, data)}


def apply_template(
    context: ServerContext, data: dict[str, Any], warnings: list[str]
) -> dict[str, Any]:
    """The rendered prompt as text."""
    prompt = _chat_prompt(context, data, warnings)
    return {"prompt": prompt_text(prompt.segments)}


def _chat_prompt(context: ServerContext, data: dict[str, Any], warnings: list[str]) -> Any:
    prompt = build_prompt(
        data,
        default_effort=context.config.default_effort,
        thinking_off=context.config.thinking_off,
    )
    warnings.extend(prompt.warnings)
    return prompt


def _encode(
    context: ServerContext, body: TokenizeBody, data: dict[str, Any], warnings: list[str]
) -> list[int]:
    forms = [body.messages, body.prompt, body.content, body.text]
    if sum(form is not None for form in forms) != 1:
        raise RequestError(
            "send exactly one of prompt, content, text, messages",
            code="missing_field" if all(form is None for form in forms) else "conflicting_fields",
            param="prompt",
        )
    if body.messages is not None:
        segments = _chat_prompt(context, data, warnings).segments
        refuse_huge(context, (segment.text for segment in segments))
        return context.tokenizer.encode_segments(segments)
    text = body.prompt or body.content or body.text or ""
    refuse_huge(context, [text])
    if body.parse_special:
        return context.tokenizer.encode_with_markers(text)
    return context.tokenizer.encode_text(text)


def _decode(context: ServerContext, data: dict[str, Any]) -> str:
    tokens = parse_body(DetokenizeBody, data).tokens
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int):
            raise RequestError(
                "tokens must be a list of integers", code="wrong_type", param="tokens"
            )
        if not 0 <= token < context.vocab_size:
            raise RequestError(
                f"tokens must be ids between 0 and {context.vocab_size - 1}",
                code="out_of_range",
                param="tokens",
            )
    data_bytes = b"".join(context.tokenizer.token_bytes(token) for token in tokens)
    return data_bytes.decode(errors="replace")


def _piece(token: int, data: bytes) -> dict[str, Any]:
    """Text where the bytes are whole characters, else the list of bytes."""
    try:
        return {"id": token, "piece": data.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": list(data)}
