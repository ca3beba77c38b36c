"""Which requests are refused before they wait: a pure check against the engine's limits."""

from twining.config import ScheduleConfig
from twining.engine.request import EngineReady, Request
from twining.errors import RequestError


def check_request(
    request: Request, ready: EngineReady, schedule: ScheduleConfig, *, is_open: bool, num_open: int
) -> None:
    """is_open: a request of this id is open; num_open: requests that wait or run.

    Raises RequestError with a code of spec/api.md 3.2.
    """
    limit, count = ready.max_seq_len, len(request.prompt_ids)
    if is_open:
        raise RequestError("this request id is already open", code="invalid_value")
    if num_open >= schedule.max_seqs + schedule.max_queue:
        raise RequestError(
            f"max_queue={schedule.max_queue} requests are waiting; retry later", code="queue_full"
        )
    if count == 0:
        raise RequestError("prompt_ids is empty; send at least one token", code="invalid_value")
    if count >= limit:
        raise RequestError(
            f"This model's maximum context length is {limit} tokens. The prompt has {count}"
            " tokens and leaves no room for output; shorten it.",
            code="context_length_exceeded",
        )
    if min(request.prompt_ids) < 0 or max(request.prompt_ids) >= ready.vocab_size:
        raise RequestError(f"prompt_ids must lie in 0..{ready.vocab_size - 1}", code="out_of_range")
    if request.max_tokens < 0:
        raise RequestError(f"max_tokens={request.max_tokens} is negative", code="out_of_range")
