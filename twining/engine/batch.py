"""Rows of a step: cutting them up, walking them, and the log-probabilities of a prompt.

Letters: R rows, V vocabulary.
"""

from collections.abc import Sequence as SequenceOf
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from twining.engine.grammar import GrammarState
from twining.engine.protocols import Trunk
from twining.engine.request import Request, TokenLogprob
from twining.engine.sampler import LogitsError, TokenHistory, token_logprob
from twining.engine.sequence import Sequence
from twining.engine.verify import Accepted, accept

if TYPE_CHECKING:
    from twining.models.glm5_next.model import TrunkRows

LOGPROB_ROWS = 64  # rows of prompt logits held at once; a whole chunk's [R, V] would be large


def slice_rows(rows: "TrunkRows", begin: int, end: int) -> "TrunkRows":
    """Rows begin..end-1 of a step's output, as views."""
    taps = None if rows.taps is None else rows.taps[begin:end]
    return replace(rows, hidden=rows.hidden[begin:end], taps=taps)


def accept_prefix(
    logits: Tensor,
    drafts: SequenceOf[int],
    request: Request,
    history: TokenHistory,
    grammar: GrammarState | None = None,
) -> Accepted:
    """`accept`, but tokens in front of a bad row are kept: one-by-one decoding emits them too.

    logits [K+1, V] for K drafts. Raises LogitsError if the first row is bad.
    """
    for count in range(len(drafts), 0, -1):
        try:
            return accept(logits[: count + 1], drafts[:count], request, history, grammar)
        except LogitsError:
            continue
    return accept(logits[:1], (), request, history, grammar)


def prompt_logprobs(
    model: Trunk, seq: Sequence, start: int, rows: "TrunkRows"
) -> list[TokenLogprob | None]:
    """Entries of a chunk's tokens if the request asks for them, else nothing.

    rows: the chunk's output, its first token at position `start`. Row i is the law of token
    start + i + 1, so the last row is carried to the next chunk; a prompt's first token has no
    entry.
    """
    num_top = seq.request.prompt_logprobs
    if num_top < 0:
        return []
    entries: list[TokenLogprob | None] = []
    previous = seq.carried_logits
    for first in range(0, len(rows.hidden), LOGPROB_ROWS):
        logits_RV = model.logits(rows.hidden[first : first + LOGPROB_ROWS])
        for i, row in enumerate(logits_RV):
            token = seq.tokens[start + first + i]
            if previous is None:
                entries.append(None)
            else:
                entries.append(token_logprob(previous.float().cpu().numpy(), token, num_top))
            previous = row
    seq.carried_logits = None if previous is None else previous.clone()
    return entries
