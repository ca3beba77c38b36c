"""Choose one token from one row of logits: a pure function of (logits, settings, prefix, position).

Order of transforms (spec/api.md 5.3): grammar mask, bans -> logit_bias -> repetition, presence,
frequency penalties -> temperature -> top_k -> top_p -> min_p -> draw. The draw is Gumbel-max:
argmax of scaled logit + noise, where the noise is a counter-based hash of (seed, absolute position,
token id). It is keyed by token id, so filtering does not move it; it knows nothing of drafts,
batches or threads, so neither can change a token (design.md, "Drafting and acceptance"). All
arithmetic after the logits is float64 and never mixes rows.

Letters: V vocabulary. numpy only: rows are small and the integer hash must be the same everywhere.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from twining.engine.request import SamplingParams, TokenLogprob
from twining.errors import EngineError

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_MASK64 = (1 << 64) - 1
# Odd 64-bit constants: the golden-ratio step between ids, another step between positions, and a
# salt that keeps this purpose (drawing target tokens) apart from any other use of the same seed.
_ID_STEP = 0x9E3779B97F4A7C15
_POSITION_STEP = 0xD1342543DE82EF95
_TARGET_SALT = 0x5851F42D4C957F2D
# Longest prefix of the sorted candidates looked at before top_p sorts all of them; results are
# equal.
_TOP_P_PREFIX = 512


class LogitsError(EngineError):
    """A row of logits cannot be sampled (NaN, infinite, or every token excluded); ends that request
    only."""


class TokenHistory:
    """Tokens of one sequence, as the penalties count them.

    prompt tokens matter to repetition_penalty only; generated tokens to all three. `extend` and
    `rollback` cost O(tokens touched). Positions are absolute: the next token has position
    `num_tokens`.
    """

    def __init__(self, prompt_ids: Sequence[int]) -> None:
        self.num_prompt = len(prompt_ids)
        self.prompt_set: Ids = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        self.generated: list[int] = []
        self._counts: Counter[int] = Counter()

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens: the absolute position of the next token."""
        return self.num_prompt + len(self.generated)

    def count(self, token: int) -> int:
        """How often `token` was generated."""
        return self._counts.get(token, 0)

    def extend(self, tokens: Iterable[int]) -> None:
        for token in tokens:
            self.generated.append(token)
            self._counts[token] += 1

    def rollback(self, num_tokens: int) -> None:
        """Forget the last num_tokens generated tokens. Raises ValueError if there are fewer."""
        if not 0 <= num_tokens <= len(self.generated):
            raise ValueError(f"rollback of {num_tokens} tokens, {len(self.generated)} generated")
        for _ in range(num_tokens):
            token = self.generated.pop()
            self._counts[token] -= 1
            if not self._counts[token]:
                del self._counts[token]

    def generated_counts(self) -> tuple[Ids, Floats]:
        """Distinct generated ids and how often each occurred."""
        n = len(self._counts)
        ids = np.fromiter(self._counts.keys(), dtype=np.int64, count=n)
        return ids, np.fromiter(self._counts.values(), dtype=np.float64, count=n)


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of splitmix64 (Steele, Lea and Flood 2014): a bijection with full avalanche."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def noise_bits(seed: int, position: int, token_ids: Ids) -> npt.NDArray[np.uint64]:
    """64 hash bits per token id: mix(mix(mix(seed ^ salt) + position * step) + id * golden), modulo
    2^64."""
    with np.errstate(over="ignore"):
        state = _mix64(np.array([(seed ^ _TARGET_SALT) & _MASK64], dtype=np.uint64))
        state = _mix64(state + np.uint64((position * _POSITION_STEP) & _MASK64))
        return _mix64(state + token_ids.astype(np.uint64) * np.uint64(_ID_STEP))


def gumbel_noise(seed: int, position: int, token_ids: Ids) -> Floats:
    """Standard Gumbel noise of each token id at one absolute position, float64, finite.

    The uniform uses 52 bits plus a half, so it lies strictly inside (0, 1) and is exact in float64.
    """
    bits = noise_bits(seed, position, token_ids) >> np.uint64(12)
    uniform = (bits.astype(np.float64) + 0.5) * 2.0**-52
    return np.asarray(-np.log(-np.log(uniform)), dtype=np.float64)


def _largest(values: Floats, n: int) -> Ids:
    """Indices of the n largest values, best first; equal values in index order."""
    size = len(values)
    if n >= size:
        return np.argsort(-values, kind="stable").astype(np.int64)
    threshold = np.partition(values, size - n)[size - n]
    above = np.flatnonzero(values > threshold)
    ties = np.flatnonzero(values == threshold)[: n - len(above)]
    chosen = np.concatenate([above, ties])
    return np.asarray(chosen[np.lexsort((chosen, -values[chosen]))], dtype=np.int64)


def _inside(ids: Ids, vocab_size: int) -> npt.NDArray[np.bool_]:
    return np.asarray((ids >= 0) & (ids < vocab_size), dtype=np.bool_)


def _apply_bans_and_bias(x: Floats, params: SamplingParams, banned_ids: Sequence[int]) -> None:
    banned = np.asarray([*params.banned_ids, *banned_ids], dtype=np.int64)
    x[banned[_inside(banned, len(x))]] = -np.inf
    for token, bias in params.logit_bias.items():
        if 0 <= token < len(x):
            x[token] += bias


def _apply_penalties(x: Floats, params: SamplingParams, history: TokenHistory) -> None:
    """In place. Repetition divides positive and multiplies negative logits; the others subtract."""
    exempt = np.asarray(params.penalty_exempt_ids, dtype=np.int64)
    ids, counts = history.generated_counts()
    keep = _inside(ids, len(x)) & ~np.isin(ids, exempt)
    ids, counts = ids[keep], counts[keep]
    if params.repetition_penalty != 1.0:
        seen = np.union1d(history.prompt_set, ids)
        seen = seen[_inside(seen, len(x)) & ~np.isin(seen, exempt)]
        penalty = params.repetition_penalty
        x[seen] = np.where(x[seen] > 0, x[seen] / penalty, x[seen] * penalty)
    x[ids] -= params.presence_penalty + params.frequency_penalty * counts


def _filter_top_p(z: Floats, top_p: float) -> None:
    """Keep the smallest set of best tokens whose probability reaches top_p; in place."""
    weights = np.exp(z)
    target = top_p * weights.sum()
    alive = int(np.count_nonzero(z > -np.inf))
    for prefix in (min(_TOP_P_PREFIX, alive), alive):
        order = _largest(z, prefix)
        # The set reaches top_p at the first index whose running sum is >= target.
        num_kept = int(np.searchsorted(np.cumsum(weights[order]), target, side="left")) + 1
        if num_kept <= prefix:
            break
    kept = order[:num_kept]
    values = z[kept]
    z.fill(-np.inf)
    z[kept] = values


def check_logits(logits: npt.NDArray[Any]) -> None:
    """Raises LogitsError unless every logit is finite."""
    if not np.isfinite(logits).all():
        bad = int(np.flatnonzero(~np.isfinite(logits))[0])
        raise LogitsError(
            f"logit of token {bad} is {logits[bad]}; non-finite model output for this request,"
            " check the checkpoint and the cache format"
        )


def process_logits(
    logits: npt.NDArray[Any],
    params: SamplingParams,
    history: TokenHistory,
    *,
    banned_ids: Sequence[int] = (),
    allowed: npt.NDArray[np.bool_] | None = None,
) -> Floats:
    """Transform raw logits [V] (any float dtype) into scores [V], float64; excluded tokens are
    -inf.

    banned_ids adds to params.banned_ids (stop tokens below min_tokens); allowed [V] is a grammar's
    mask, None for all. At temperature 0 the filters are left out, since they always keep the best
    token; otherwise scores are (logit - max) / temperature. Raises LogitsError for non-finite
    logits or when no token is left.
    """
    check_logits(logits)
    x = np.array(logits, dtype=np.float64)
    if allowed is not None:
        x[~allowed] = -np.inf
    _apply_bans_and_bias(x, params, banned_ids)
    penalties = (params.presence_penalty, params.frequency_penalty)
    if params.repetition_penalty != 1.0 or penalties != (0.0, 0.0):
        _apply_penalties(x, params, history)
    best = float(x.max())
    if not np.isfinite(best):
        raise LogitsError(
            "every token is banned; relax the grammar, banned tokens, logit_bias or min_tokens"
        )
    if params.temperature == 0.0:
        return x
    # Subtracting first keeps tiny temperatures finite; a result below float64's range is simply
    # excluded.
    with np.errstate(over="ignore"):
        z = (x - best) / params.temperature
    if 0 < params.top_k < len(z):
        kept = _largest(z, params.top_k)
        filtered = np.full_like(z, -np.inf)
        filtered[kept] = z[kept]
        z = filtered
    if params.top_p < 1.0:
        _filter_top_p(z, params.top_p)
    if params.min_p > 0.0:
        z[np.exp(z) < params.min_p] = -np.inf
    return z


def sample_token(scores: Floats, params: SamplingParams, position: int) -> int:
    """The token at absolute `position` from processed scores [V]; the lowest id wins exact ties."""
    if params.temperature == 0.0:
        return int(scores.argmax())
    ids = np.flatnonzero(scores > -np.inf).astype(np.int64)
    noisy = scores[ids] + gumbel_noise(params.seed, position, ids)
    return int(ids[noisy.argmax()])


def token_logprob(logits: npt.NDArray[Any], token: int, num_top: int) -> TokenLogprob:
    """Raw log-softmax of `token` and of the num_top best ids (ties: lower id first) of logits [V].

    Raises LogitsError for non-finite logits.
    """
    check_logits(logits)
    x = np.array(logits, dtype=np.float64)
    x -= x.max()
    x -= np.log(np.exp(x).sum())
    top = _largest(x, num_top) if num_top > 0 else np.empty(0, dtype=np.int64)
    return TokenLogprob(float(x[token]), [int(i) for i in top], [float(x[i]) for i in top])
