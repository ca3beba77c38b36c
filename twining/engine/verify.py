"""Acceptance: which tokens a verify pass emits. Pure: logits and history in, tokens out.

Rule: sample and compare (spec/dflash2.md D.2). Row i of the logits is the law of the token after
the anchor and the first i drafts. Each row is sampled exactly as plain decoding would sample it
(grammar, bans, penalties on the accepted prefix, noise of the absolute position); the walk goes on
while the sampled token equals the draft. Every emitted token is therefore the target's own,
whatever was drafted.

Letters: k drafts, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from torch import Tensor

from twining.engine.grammar import GrammarState
from twining.engine.request import FinishReason, Request, TokenLogprob
from twining.engine.sampler import (
    LogitsError,
    TokenHistory,
    check_logits,
    process_logits,
    sample_token,
    token_logprob,
)


class Accepted(msgspec.Struct, frozen=True, kw_only=True):
    """What one verify pass emits for one sequence.

    token_ids: 1 .. k + 1 tokens; the last is the bonus token (the next anchor), or the token that
    ended the sequence. num_accepted = len(token_ids) - 1 drafts were kept, so len(token_ids) rows
    of the pass (anchor and accepted drafts) are to be committed. stop_id: the stop token that ended
    it, or -1. logprobs: one entry per token if the request asks for them, else empty.
    """

    token_ids: list[int]
    num_accepted: int
    finish_reason: FinishReason | None = None
    stop_id: int = -1
    logprobs: list[TokenLogprob] = []


def forced_token(request: Request, history: TokenHistory) -> int | None:
    """The token that must come next (thinking budget), or None to sample.

    Depends on the emitted prefix alone: force_id comes once force_after tokens were generated and
    none of them was force_id.
    """
    if request.force_after < 0 or request.force_id < 0:
        return None
    if len(history.generated) < request.force_after or history.count(request.force_id):
        return None
    return request.force_id


def next_token(
    logits: npt.NDArray[Any],
    request: Request,
    history: TokenHistory,
    grammar: GrammarState | None = None,
) -> int:
    """The one token that follows the prefix in `history`, from its raw logits [V].

    A finished grammar wins over min_tokens: nothing but a stop token is left then.
    Raises LogitsError for non-finite logits or when every token is banned.
    """
    forced = forced_token(request, history)
    if forced is not None:
        check_logits(logits)
        return forced
    too_early = len(history.generated) < request.min_tokens
    allowed = None
    if grammar is not None:
        too_early = too_early and not grammar.is_complete(history.generated)
        allowed = grammar.allowed(history.generated, len(logits))
    banned = request.stop_ids if too_early else ()
    scores = process_logits(logits, request.sampling, history, banned_ids=banned, allowed=allowed)
    return sample_token(scores, request.sampling, history.num_tokens)


def accept(
    logits: Tensor,
    drafts: Sequence[int],
    request: Request,
    history: TokenHistory,
    grammar: GrammarState | None = None,
) -> Accepted:
    """Walk the rows of one verify pass (or the last row of a prefill, with no drafts).

    logits [k+1, V] float32; drafts: k ids that were in the pass after the anchor; history: prompt
    and every token generated so far, anchor included. history is unchanged on return; the caller
    extends it by the emitted tokens. grammar: the request's, a function of that prefix too. Only
    rows that are reached are looked at, and a bad row after the first ends the walk: what came
    before is emitted, as one-by-one decoding would have done.
    Raises ValueError if rows and drafts do not fit, LogitsError as `next_token` for
    the first row.
    """
    if logits.ndim != 2 or len(logits) != len(drafts) + 1:
        raise ValueError(
            f"accept: {len(drafts)} drafts need {len(drafts) + 1} rows of logits,"
            f" got shape {tuple(logits.shape)}"
        )
    rows: npt.NDArray[np.float32] = logits.detach().float().cpu().numpy()
    num_before = len(history.generated)
    logprobs: list[TokenLogprob] = []
    finish: FinishReason | None = None
    stop_id = -1
    try:
        for i, row in enumerate(rows):
            try:
                token = next_token(row, request, history, grammar)
            except LogitsError:
                if i == 0:
                    raise
                break  # the tokens before it stand, as without drafts; the next pass fails alone
            if request.logprobs >= 0:
                logprobs.append(token_logprob(row, token, request.logprobs))
            history.extend((token,))
            if token in request.stop_ids:
                finish, stop_id = "stop", token
            elif len(history.generated) >= request.max_tokens:
                finish = "length"
            elif grammar is not None and not request.stop_ids and _is_over(grammar, history):
                finish = "stop"  # no stop token exists that could say so
            if finish is not None or i == len(drafts) or token != drafts[i]:
                break
        token_ids = history.generated[num_before:]
    finally:
        history.rollback(len(history.generated) - num_before)
    return Accepted(
        token_ids=token_ids,
        num_accepted=len(token_ids) - 1,
        finish_reason=finish,
        stop_id=stop_id,
        logprobs=logprobs,
    )


def _is_over(grammar: GrammarState, history: TokenHistory) -> bool:
    """The grammar is complete; one that failed is reported by the next row."""
    try:
        return grammar.is_complete(history.generated)
    except LogitsError:
        return False
