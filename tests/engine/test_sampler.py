"""Sampler: order of transforms, exact noise, law of the draws."""

import math

import numpy as np
import pytest

from twining.engine.request import SamplingParams
from twining.engine.sampler import (
    LogitsError,
    TokenHistory,
    gumbel_noise,
    noise_bits,
    process_logits,
    sample_token,
    token_logprob,
)

EMPTY = TokenHistory([])


def draw(logits, params, position, history=EMPTY):
    return sample_token(process_logits(logits, params, history), params, position)


def random_logits(seed: int, vocab: int) -> np.ndarray:
    return (3.0 * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)


def reference_scores(logits, params: SamplingParams, prompt, generated) -> list[float]:
    """The same transforms written token by token in plain Python."""
    x = [float(v) for v in logits]
    for token in params.banned_ids:
        x[token] = -math.inf
    for token, bias in params.logit_bias.items():
        x[token] += bias
    for token in range(len(x)):
        if token in params.penalty_exempt_ids:
            continue
        if token in prompt or token in generated:
            r = params.repetition_penalty
            x[token] = x[token] / r if x[token] > 0 else x[token] * r
        count = generated.count(token)
        if count:
            x[token] -= params.presence_penalty + params.frequency_penalty * count
    best = max(x)
    z = [(v - best) / params.temperature for v in x]
    order = sorted(range(len(z)), key=lambda i: (-z[i], i))
    if params.top_k:
        order = order[: params.top_k]
    total = sum(math.exp(z[i]) for i in order)
    kept, mass = [], 0.0
    for i in order:
        if params.top_p < 1 and mass >= params.top_p * total:
            break
        kept.append(i)
        mass += math.exp(z[i])
    kept = [i for i in kept if math.exp(z[i]) >= params.min_p]
    return [z[i] if i in kept else -math.inf for i in range(len(z))]


@pytest.mark.parametrize("seed", range(30))
def test_transforms_match_plain_python(seed):
    rng = np.random.default_rng(seed)
    vocab = int(rng.integers(3, 90))
    logits = random_logits(seed, vocab)
    logits[rng.integers(0, vocab, 3)] = logits[0]  # ties
    pick = lambda n: tuple(int(i) for i in rng.integers(0, vocab, n))  # noqa: E731
    params = SamplingParams(
        temperature=float(rng.uniform(0.2, 2)),
        top_p=float(rng.choice([1.0, 0.9, 0.5, 0.01])),
        top_k=int(rng.choice([0, 1, 3, 50])),
        min_p=float(rng.choice([0.0, 0.05, 0.5, 1.0])),
        presence_penalty=float(rng.uniform(-2, 2)),
        frequency_penalty=float(rng.uniform(-2, 2)),
        repetition_penalty=float(rng.uniform(0.5, 2)),
        logit_bias={t: float(rng.uniform(-5, 5)) for t in pick(3)},
        banned_ids=tuple(t for t in pick(2) if vocab > 5),
        penalty_exempt_ids=pick(2),
    )
    prompt, generated = pick(5), list(pick(9))
    history = TokenHistory(prompt)
    history.extend(generated)
    got = process_logits(logits, params, history)
    want = np.array(reference_scores(logits, params, prompt, generated))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


def test_top_p_over_a_long_flat_tail_equals_a_full_sort():
    logits = (0.01 * np.random.default_rng(3).standard_normal(5000)).astype(np.float32)
    params = SamplingParams(top_p=0.8)
    got = process_logits(logits, params, EMPTY)
    want = reference_scores(logits, params, (), [])
    assert np.count_nonzero(got > -np.inf) > 2000
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))


def test_noise_is_a_fixed_hash():
    """Frozen values: a change here changes every seeded answer ever given."""
    ids = np.array([0, 1, 2, 154879], dtype=np.int64)
    got = [f"{int(b):016x}" for b in noise_bits(42, 1000, ids)]
    mask = (1 << 64) - 1

    def mix(x):
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    state = mix(42 ^ 0x5851F42D4C957F2D)
    state = mix((state + 1000 * 0xD1342543DE82EF95) & mask)
    assert got == [f"{mix((state + int(i) * 0x9E3779B97F4A7C15) & mask):016x}" for i in ids]
    assert got == FROZEN


FROZEN = ["af94834be369557b", "20af2e1f2b08be31", "913da767c1f5ee38", "f9d39f6605bb5690"]


def test_noise_depends_on_id_not_on_company():
    rng = np.random.default_rng(0)
    everything = gumbel_noise(-7, 123_456_789, np.arange(3001))
    for size in (1, 2, 3, 7, 8, 9, 31, 1000):
        some = rng.choice(3001, size, replace=False)
        np.testing.assert_array_equal(gumbel_noise(-7, 123_456_789, some), everything[some])


def test_noise_is_gumbel_and_finite():
    noise = np.concatenate([gumbel_noise(1, p, np.arange(4096)) for p in range(64)])
    assert np.isfinite(noise).all()
    cdf = np.sort(np.exp(-np.exp(-noise)))  # uniform if the law is right
    grid = (np.arange(len(cdf)) + 0.5) / len(cdf)
    assert np.abs(cdf - grid).max() < 1.7 / math.sqrt(len(cdf))  # Kolmogorov-Smirnov, p ~ 0.006
    by_position = noise.reshape(64, 4096)
    assert abs(np.corrcoef(by_position[0], by_position[1])[0, 1]) < 0.06
    assert abs(np.corrcoef(noise[:-1], noise[1:])[0, 1]) < 0.008


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.7, "top_k": 4},
        {"temperature": 1.2, "min_p": 0.1},
        {"temperature": 0.9, "presence_penalty": 0.8, "frequency_penalty": 0.3, "top_p": 0.95},
    ],
)
@pytest.mark.parametrize("by", ["position", "seed"])
def test_draws_follow_the_processed_law(fields, by):
    logits = random_logits(4, 12)
    history = TokenHistory([1, 2])
    history.extend([3, 3, 5])
    num = 20_000
    params = SamplingParams(seed=9, **fields)
    scores = process_logits(logits, params, history)
    law = np.exp(scores) / np.exp(scores).sum()
    counts = np.zeros(12)
    for i in range(num):
        settings = params if by == "position" else SamplingParams(seed=i, **fields)
        counts[sample_token(scores, settings, i if by == "position" else 17)] += 1
    assert counts[law == 0].sum() == 0
    alive = law > 0
    chi2 = (((counts - num * law) ** 2)[alive] / (num * law[alive])).sum()
    degrees = alive.sum() - 1
    assert chi2 < degrees + 4.5 * math.sqrt(2 * degrees) + 6  # far below 1e-4 by chance


def test_greedy_is_the_limit_of_small_temperatures():
    for seed in range(20):
        logits = random_logits(seed, 300)
        best = int(logits.argmax())
        for temperature in (0.0, 1e-7, 1e-300, 5e-324):
            assert draw(logits, SamplingParams(temperature=temperature, seed=seed), seed) == best


def test_ties_go_to_the_lowest_id():
    logits = np.array([0, 4, 4, 1], dtype=np.float32)
    assert draw(logits, SamplingParams(temperature=0.0), 0) == 1
    assert {draw(logits, SamplingParams(top_k=1), p) for p in range(50)} == {1}
    out = token_logprob(logits, 2, 3)
    assert out.top_ids == [1, 2, 3]


def test_token_depends_on_seed_and_position_only():
    logits = random_logits(1, 50)
    params = SamplingParams(seed=3, temperature=1.5)
    stream = [draw(logits, params, p) for p in range(200)]
    assert [draw(logits, params, p) for p in reversed(range(200))][::-1] == stream
    other = [draw(logits, SamplingParams(seed=4, temperature=1.5), p) for p in range(200)]
    assert other != stream and len(set(stream)) > 5
    wide = np.concatenate([logits, np.full(30, -100, np.float32)])  # more ids, same noise
    assert [draw(wide, params, p) for p in range(200)] == stream


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bad_logits_are_refused(bad, temperature):
    logits = random_logits(0, 33)
    logits[32] = bad
    with pytest.raises(LogitsError, match="token 32"):
        process_logits(logits, SamplingParams(temperature=temperature), EMPTY)
    with pytest.raises(LogitsError):
        token_logprob(logits, 0, 1)


def test_everything_banned_is_refused():
    params = SamplingParams(banned_ids=(0, 1))
    with pytest.raises(LogitsError, match="every token is banned"):
        process_logits(np.zeros(3, np.float32), params, EMPTY, banned_ids=[2])


def test_ids_outside_the_vocabulary_are_harmless():
    history = TokenHistory([99, 1])
    history.extend([98, 1])
    params = SamplingParams(
        temperature=0.0,
        banned_ids=(77,),
        logit_bias={66: 3.0},
        repetition_penalty=2.0,
        presence_penalty=1.0,
    )
    got = process_logits(np.array([1.0, 3.0, 2.0], np.float32), params, history)
    np.testing.assert_array_equal(got, [1.0, 0.5, 2.0])


def test_bias_of_a_banned_token_does_not_revive_it():
    params = SamplingParams(temperature=0.0, banned_ids=(1,), logit_bias={1: 100.0})
    assert draw(np.array([0.0, 9.0], np.float32), params, 0) == 0


def test_logprobs_are_raw_and_exact():
    logits = random_logits(8, 77)
    x = logits.astype(np.float64)
    want = x - np.log(np.exp(x).sum())
    out = token_logprob(logits, 5, 20)
    assert out.logprob == pytest.approx(want[5], abs=1e-12)
    order = np.argsort(-x, kind="stable")[:20]
    assert out.top_ids == order.tolist()
    np.testing.assert_allclose(out.top_logprobs, want[order], atol=1e-12)
    assert token_logprob(logits, 5, 0).top_ids == []
    assert len(token_logprob(logits, 5, 500).top_ids) == 77


def test_history_rolls_back():
    history = TokenHistory([7, 7, 1])
    history.extend([2, 2, 3])
    assert (history.num_tokens, history.count(2), history.count(7)) == (6, 2, 0)
    history.rollback(2)
    ids, counts = history.generated_counts()
    assert (history.generated, ids.tolist(), counts.tolist()) == ([2], [2], [1.0])
    with pytest.raises(ValueError):
        history.rollback(2)
