"""Acceptance equals one-by-one decoding for every draft, setting and stop condition."""

import itertools

import numpy as np
import pytest
import torch

from twining.engine.request import Request, SamplingParams
from twining.engine.sampler import LogitsError, TokenHistory, gumbel_noise
from twining.engine.verify import accept

VOCAB = 7


def target_logits(prefix: tuple[int, ...], vocab: int = VOCAB) -> np.ndarray:
    """A fake target: logits are a function of the whole prefix."""
    rng = np.random.default_rng([len(prefix), *prefix])
    return (2.0 * rng.standard_normal(vocab)).astype(np.float32)


def make_request(prompt, **fields) -> Request:
    sampling = fields.pop("sampling", {})
    fields = {"max_tokens": 64} | fields
    return Request(id="r", prompt_ids=list(prompt), sampling=SamplingParams(**sampling), **fields)


def run_plain(request: Request, num_tokens: int) -> tuple[list[int], str | None, list]:
    history, logprobs, finish = TokenHistory(request.prompt_ids), [], None
    while len(history.generated) < num_tokens and finish is None:
        prefix = (*request.prompt_ids, *history.generated)
        out = accept(torch.from_numpy(target_logits(prefix))[None], [], request, history)
        assert len(out.token_ids) == 1 and out.num_accepted == 0
        history.extend(out.token_ids)
        logprobs += out.logprobs
        finish = out.finish_reason
    return history.generated, finish, logprobs


def verify_once(request: Request, generated: list[int], drafts: list[int]):
    history = TokenHistory(request.prompt_ids)
    history.extend(generated)
    rows = [
        target_logits((*request.prompt_ids, *generated, *drafts[:i]))
        for i in range(len(drafts) + 1)
    ]
    out = accept(torch.from_numpy(np.stack(rows)), drafts, request, history)
    assert history.generated == generated  # untouched
    return out


SETTINGS = {
    "greedy": {"sampling": {"temperature": 0.0}},
    "sampled": {"sampling": {"temperature": 1.3, "seed": 5}},
    "penalties": {
        "sampling": {
            "temperature": 0.9,
            "seed": -3,
            "presence_penalty": 1.1,
            "frequency_penalty": 0.7,
            "repetition_penalty": 1.4,
            "penalty_exempt_ids": (2,),
            "top_p": 0.9,
        }
    },
    "stops": {"sampling": {"temperature": 1.0, "seed": 11}, "stop_ids": (0, 4), "logprobs": 3},
    "min_tokens": {
        "sampling": {"temperature": 1.5, "seed": 2},
        "stop_ids": (0, 1, 2, 3),
        "min_tokens": 3,
    },
    "max_tokens": {"sampling": {"temperature": 0.0}, "max_tokens": 3},
    "forced": {
        "sampling": {"temperature": 1.0, "seed": 8},
        "force_after": 2,
        "force_id": 6,
        "stop_ids": (5,),
    },
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("prompt", [(1,), (3, 3, 2, 0, 5)])
def test_every_draft_gives_the_plain_stream(name, prompt):
    request = make_request(prompt, **SETTINGS[name])
    plain, finish, logprobs = run_plain(request, 6)
    for start in range(min(2, len(plain) - 1) + 1):
        if start == len(plain):
            continue
        for drafts in itertools.product(range(VOCAB), repeat=3):
            out = verify_once(request, plain[:start], list(drafts))
            n = len(out.token_ids)
            assert out.token_ids == plain[start : start + n]
            assert out.num_accepted == n - 1
            ended = start + n == len(plain) and finish is not None
            assert out.finish_reason == (finish if ended else None)
            if not ended:  # as long as possible: stopped only by a mismatch or the last row
                assert n == 4 or drafts[n - 1] != out.token_ids[-1]
            assert list(drafts[: n - 1]) == out.token_ids[:-1]
            assert out.logprobs == logprobs[start : start + len(out.logprobs)]
            assert len(out.logprobs) == (n if request.logprobs >= 0 else 0)


def test_stop_wins_over_length_and_names_the_token():
    request = make_request((1,), sampling={"temperature": 0.0})
    token = run_plain(request, 1)[0][0]
    request = make_request((1,), sampling={"temperature": 0.0}, max_tokens=1, stop_ids=(token,))
    out = verify_once(request, [], [token, 0])
    assert (out.finish_reason, out.stop_id, out.token_ids) == ("stop", token, [token])


def test_forced_token_comes_once_at_its_place():
    for force_after in range(4):
        request = make_request(
            (2, 4), sampling={"seed": 1}, force_after=force_after, force_id=6, max_tokens=9
        )
        free = run_plain(make_request((2, 4), sampling={"seed": 1}, max_tokens=9), 9)[0]
        forced = run_plain(request, 9)[0]
        place = forced.index(6)
        assert place <= force_after
        assert forced[:place] == free[:place]
        if place < force_after:
            assert forced == free  # came by itself: nothing was forced


def test_only_reached_rows_are_looked_at():
    request = make_request((1,), sampling={"temperature": 0.0})
    rows = torch.from_numpy(np.stack([target_logits((1,)), np.full(VOCAB, np.nan, np.float32)]))
    token = int(rows[0].argmax())
    wrong = (token + 1) % VOCAB
    assert accept(rows, [wrong], request, TokenHistory([1])).token_ids == [token]
    history = TokenHistory([1])
    out = accept(rows, [token], request, history)  # the good token stands, one row is committed
    assert (out.token_ids, out.num_accepted, out.finish_reason) == ([token], 0, None)
    assert history.generated == []
    with pytest.raises(LogitsError):
        accept(rows[1:], [], request, history)
    assert history.generated == []


def test_forced_token_still_refuses_bad_logits():
    request = make_request((1,), force_after=0, force_id=3)
    with pytest.raises(LogitsError):
        accept(torch.full((1, VOCAB), torch.inf), [], request, TokenHistory([1]))


def test_rows_and_drafts_must_fit():
    request = make_request((1,))
    with pytest.raises(ValueError, match="2 drafts need 3 rows"):
        accept(torch.zeros(2, VOCAB), [1, 2], request, TokenHistory([1]))


def test_no_stop_token_before_min_tokens():
    for seed in range(20):
        free = make_request((seed,), sampling={"seed": seed}, stop_ids=(0, 1, 2, 3, 4))
        bound = make_request(
            (seed,), sampling={"seed": seed}, stop_ids=(0, 1, 2, 3, 4), min_tokens=4
        )
        stream, finish, _ = run_plain(bound, 30)
        assert all(token in (5, 6) for token in stream[:4])
        assert finish == "stop" and len(stream) >= 5
        assert len(run_plain(free, 30)[0]) <= len(stream)


def test_noise_uses_the_absolute_position():
    flat = torch.zeros(1, 500)
    params = SamplingParams(seed=77)
    for prompt in ([1], [1, 2, 3]):
        history = TokenHistory(prompt)
        for position in range(len(prompt), 12):
            request = make_request(prompt, sampling={"seed": 77})
            token = accept(flat, [], request, history).token_ids[0]
            assert token == int(gumbel_noise(params.seed, position, np.arange(500)).argmax())
            history.extend([token])


class FailingGrammar:
    """Allows everything, and gives up when it is asked whether it is over."""

    def allowed(self, generated, vocab_size):
        return None

    def is_complete(self, generated):
        raise LogitsError("the grammar gave up")


def test_a_grammar_that_gives_up_after_a_token_leaves_that_token():
    request = make_request([1, 2])
    history = TokenHistory(request.prompt_ids)
    logits = torch.from_numpy(target_logits((1, 2)))[None]
    want = accept(logits, [], request, history)
    assert accept(logits, [], request, history, FailingGrammar()) == want
    assert want.finish_reason is None
