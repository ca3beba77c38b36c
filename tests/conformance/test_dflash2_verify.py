"""Acceptance rules against golden/dflash2/verify.safetensors, and the engine's own rule beside
them.

The engine samples the target and compares: its chance to accept a draft is p(draft), which is the
one-hot ratio rule of the fixture.
"""

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.conformance.acceptance_rules import (
    block_verification,
    residual,
    standard_accept_prob,
    standard_accepted,
)
from twining.engine.request import Request, SamplingParams
from twining.engine.sampler import TokenHistory
from twining.engine.verify import accept

CLOSE = {"rtol": 0, "atol": 1e-7}


@pytest.fixture
def want(verify_file):
    return load_file(verify_file)


def test_standard_rejection_sampling(want):
    p, q, draft = want["p"], want["q"], want["draft"]
    torch.testing.assert_close(
        standard_accept_prob(p, q, draft), want["accept_prob_standard"], **CLOSE
    )
    for i in range(len(draft)):
        torch.testing.assert_close(residual(p[i], q[i]), want["residual_standard"][i], **CLOSE)
    accepted = [standard_accepted(p, q, draft, u) for u in want["uniforms"]]
    assert accepted == want["accepted_for_uniforms"].tolist()


def test_block_verification(want):
    p, q, draft = want["p"], want["q"], want["draft"]
    ratio, h = block_verification(p, q, draft)
    torch.testing.assert_close(ratio, want["ratio_block"], **CLOSE)
    torch.testing.assert_close(h, want["h_block"], **CLOSE)
    for i, scale in enumerate([1.0, *ratio[:-1]]):
        torch.testing.assert_close(residual(p[i], q[i], scale), want["residual_block"][i], **CLOSE)


def test_sample_and_compare_accepts_with_the_target_probability(want):
    """Shares of accepted prefixes over seeds equal the running products of p(draft)."""
    p, draft = want["p"], want["draft"].tolist()
    logits = p.log().float()
    num, lengths = 6000, np.zeros(len(draft) + 1)
    for seed in range(num):
        sampling = SamplingParams(seed=seed)
        request = Request(id="r", prompt_ids=[0], sampling=sampling, max_tokens=len(draft) + 6)
        lengths[accept(logits, draft, request, TokenHistory([0])).num_accepted] += 1
    survival = np.cumprod([float(p[i, d]) for i, d in enumerate(draft)])
    got = np.array([lengths[i + 1 :].sum() / num for i in range(len(draft))])
    assert np.abs(got - survival).max() < 4.5 * 0.5 / np.sqrt(num)
