"""Start-up check that this machine keeps a promise: a row's bits do not depend on its company.

design.md P1: torch's CPU kernels were measured to give one row the same bits at any position of a
fixed-shape call, but that property belongs to the machine's library, so it is checked here on the
model's own shapes before the first request. Letters: R rows, H hidden.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twining.engine.protocols import Pool, Trunk
from twining.errors import EngineError

if TYPE_CHECKING:
    from twining.cache.pool import SequenceState

PROBE_TOKENS = 70  # one whole prefill block and a partial one


@torch.inference_mode()
def check_row_invariance(
    model: Trunk, pool: Pool, *, vocab_size: int, max_seq_len: int, max_draft: int
) -> None:
    """Run one short sequence alone, chunked otherwise, and in company; compare bit for bit.

    The pool must be idle and is idle again afterwards; with one slot only, company is left out.
    Raises EngineError on the first difference.
    """
    num_tokens = max(1, min(PROBE_TOKENS, max_seq_len - 1 - max_draft))
    num_window = min(max_draft + 1, max_seq_len - num_tokens)
    ids = [(31 * i + 7) % vocab_size for i in range(num_tokens)]
    window = [(17 * i + 3) % vocab_size for i in range(num_window)]
    states: list[SequenceState] = []
    try:
        state, hidden = _prefill(model, pool, states, [ids[:64], ids[64:]], num_window)
        alone = model.verify([(state, window[:1])]).hidden
        several = model.verify([(state, window)]).hidden
        _compare(alone, several[:1], "a verify row alone and followed by drafts")
        logits = model.logits(several)
        _compare(model.logits(several[-1:]), logits[-1:], "logits of a row alone and of several")
        if pool.num_free_slots == 0:
            return
        other, _ = _prefill(model, pool, states, [ids[:5]], 1)
        rows = model.verify([(other, window[:1]), (state, window)]).hidden
        _compare(several, rows[1:], "verify rows alone and beside another sequence")
        pool.close(states.pop())
        _, whole = _prefill(model, pool, states, [ids], 0)
        _compare(hidden, whole, "a prompt in two chunks and in one")
    finally:
        for state in states:
            pool.close(state)


def _prefill(
    model: Trunk,
    pool: Pool,
    states: "list[SequenceState]",
    chunks: Sequence[Sequence[int]],
    num_window: int,
) -> "tuple[SequenceState, Tensor]":
    """Open a sequence (noted in `states`) and prefill the chunks; hidden rows [R, H] of all."""
    state = pool.open()
    if state is None:
        raise EngineError("the row-invariance check needs an idle cache pool")
    states.append(state)
    if not pool.reserve(state, sum(map(len, chunks)) + num_window):
        raise EngineError("the row-invariance check needs an idle cache pool")
    rows = [model.prefill(state, chunk).hidden for chunk in chunks if chunk]
    return state, torch.cat(rows)


def _compare(want: Tensor, got: Tensor, what: str) -> None:
    if want.shape == got.shape and bool((want == got).all()):
        return
    raise EngineError(
        f"row-invariance check failed: {what} differ on this machine, so output would depend on"
        " load; try --threads 1 or another build of torch"
    )
