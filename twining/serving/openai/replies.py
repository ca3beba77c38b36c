"""Members that all replies share: usage, timings, models (spec/api.md 4, 10)."""

import time
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from twining.engine.request import Timings
from twining.serving.context import ServerContext

MINUS_INFINITY = -9999.0


def now() -> int:
    """Unix seconds, the `created` member."""
    return int(time.time())


def usage(
    prompt_tokens: int, completion_tokens: int, reasoning_tokens: int, cached_tokens: int
) -> dict[str, Any]:
    """The usage object; n choices count the prompt once."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {
            "cached_tokens": cached_tokens,
            "image_tokens": 0,
            "video_tokens": 0,
            "audio_tokens": 0,
        },
        "completion_tokens_details": {
            "reasoning_tokens": reasoning_tokens,
            "audio_tokens": 0,
            "accepted_prediction_tokens": 0,
            "rejected_prediction_tokens": 0,
        },
    }


def _ms(seconds: float) -> float:
    return round(max(seconds, 0.0) * 1000, 3)


def _rate(count: float, per: float) -> float:
    return round(count / per, 3) if per > 0 else 0.0


def timings(
    parts: Iterable[Timings], *, prompt_tokens: int, completion_tokens: int, is_drafting: bool
) -> dict[str, Any]:
    """The timings object over one or several choices; times of the slowest, counts summed."""
    runs = list(parts) or [Timings()]
    prefill_s = max(run.prefill_s for run in runs)
    decode_s = max(run.decode_s for run in runs)
    cached = min(run.cached_tokens for run in runs)
    computed = max(prompt_tokens - cached, 0)
    result: dict[str, Any] = {
        "queue_ms": _ms(max(run.queue_s for run in runs)),
        "cache_n": cached,
        "prompt_n": computed,
        "prompt_ms": _ms(prefill_s),
        "prompt_per_token_ms": _rate(prefill_s * 1000, computed),
        "prompt_per_second": _rate(computed, prefill_s),
        "media_ms": 0.0,
        "ttft_ms": _ms(max(run.ttft_s for run in runs)),
        "predicted_n": completion_tokens,
        "predicted_ms": _ms(decode_s),
        "predicted_per_token_ms": _rate(decode_s * 1000, completion_tokens),
        "predicted_per_second": _rate(completion_tokens, decode_s),
    }
    if is_drafting:
        result["draft_n"] = sum(run.num_drafted for run in runs)
        result["draft_n_accepted"] = sum(run.num_accepted for run in runs)
        result["draft_steps"] = sum(run.draft_steps for run in runs)
    return result


def model_object(context: ServerContext, model_id: str) -> dict[str, Any]:
    """One entry of the model list."""
    limit = context.context_length
    return {
        "id": model_id,
        "object": "model",
        "type": "model",
        "display_name": context.display_name,
        "created": context.created,
        "created_at": datetime.fromtimestamp(context.created, UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "owned_by": "local",
        "root": context.config.model_id,
        "parent": None,
        "permission": [],
        "max_model_len": limit,
        "context_length": limit,
        "max_output_tokens": max(limit - 1, 0),
        "architecture": {"input_modalities": ["text"], "output_modalities": ["text"]},
        "supported_parameters": [
            "tools",
            "tool_choice",
            "response_format",
            "reasoning_effort",
            "logprobs",
            "seed",
        ],
        "meta": {
            "n_ctx": limit,
            "n_ctx_train": context.trained_length,
            "n_vocab": context.vocab_size,
        },
    }


def finite(logprob: float) -> float:
    """Minus infinity has no JSON form; it is shown as -9999."""
    return logprob if logprob > MINUS_INFINITY else MINUS_INFINITY
