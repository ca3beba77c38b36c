"""KDA, sparse MLA, pooled indexer, mHC and experts against plain loops written from the spec."""

import pytest
import torch
from torch.nn import functional as F

from twining.kernels.kda.reference import CHUNK, chunk, recurrence
from twining.kernels.kpool.reference import (
    GROUP,
    all_positions,
    attention_width,
    build_pools,
    score_pages,
    select_positions,
)
from twining.kernels.mhc.reference import sinkhorn
from twining.kernels.moe.reference import route, run_experts
from twining.kernels.sparse_mla.reference import attend


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def kda_inputs(T: int, B: int, D: int, strength: float, seed: int) -> dict[str, torch.Tensor]:
    """[T, B, D] vectors; log decays down to -strength per token."""
    g = torch.Generator().manual_seed(seed)
    return {
        "log_decay": -strength * torch.rand(T, B, D, generator=g),
        "k": F.normalize(torch.randn(T, B, D, generator=g), dim=-1),
        "q": F.normalize(torch.randn(T, B, D, generator=g), dim=-1) * D**-0.5,
        "v": torch.randn(T, B, D, generator=g),
        "beta": torch.rand(T, B, 1, generator=g),
    }


def plain_recurrence(state: torch.Tensor, x: dict[str, torch.Tensor]) -> torch.Tensor:
    """Spec 6.3 as written, float64, in place."""
    outs = []
    for t in range(len(x["k"])):
        k, q, v = (x[n][t].double() for n in ("k", "q", "v"))
        state *= x["log_decay"][t].double().exp().unsqueeze(2)
        u = x["beta"][t].double() * (v - torch.einsum("bkv,bk->bv", state, k))
        state += k.unsqueeze(2) * u.unsqueeze(1)
        outs.append(torch.einsum("bkv,bk->bv", state, q))
    return torch.stack(outs)


@pytest.mark.parametrize("strength", [0.01, 5.0, 60.0])
@pytest.mark.parametrize(("B", "D"), [(1, 128), (6, 32), (3, 64)])
def test_recurrence_and_chunks_match_the_definition(strength, B, D):
    x = kda_inputs(2 * CHUNK, B, D, strength, seed=B)
    start = randn(B, D, D, seed=9)
    exact = start.double()
    want = plain_recurrence(exact, x).float()
    state = start.clone()
    got = recurrence(state, x["log_decay"].exp(), x["k"], x["q"], x["v"], x["beta"])
    torch.testing.assert_close(got, want, rtol=1e-4, atol=3e-6)
    torch.testing.assert_close(state, exact.float(), rtol=1e-4, atol=1e-5)
    state, outs = start.clone(), []
    for i in (0, CHUNK):
        part = {n: v[i : i + CHUNK].transpose(0, 1) for n, v in x.items()}
        outs.append(chunk(state, part["log_decay"], part["k"], part["q"], part["v"], part["beta"]))
    torch.testing.assert_close(torch.cat(outs, 1).transpose(0, 1), want, rtol=1e-4, atol=3e-6)
    torch.testing.assert_close(state, exact.float(), rtol=1e-4, atol=1e-5)


def test_replay_equals_direct_steps_bit_for_bit():
    """Any split of the tokens, any company of other states, with or without queries."""
    x = kda_inputs(8, 5, 32, 5.0, seed=4)
    decay = x["log_decay"].exp()
    state = randn(5, 32, 32, seed=5)
    whole, steps = state.clone(), state.clone()
    out = recurrence(whole, decay, x["k"], x["q"], x["v"], x["beta"])
    for a, b in ((0, 1), (1, 4), (4, 8)):
        args = (decay[a:b], x["k"][a:b], None, x["v"][a:b], x["beta"][a:b])
        assert recurrence(steps, *args) is None
    assert torch.equal(whole, steps)
    for i in range(5):
        alone = state[i : i + 1].clone()
        span = slice(i, i + 1)
        got = recurrence(alone, decay[:, span], x["k"][:, span], x["q"][:, span],
                         x["v"][:, span], x["beta"][:, span])  # fmt: skip
        assert torch.equal(alone[0], whole[i]) and torch.equal(got[:, 0], out[:, i])


@pytest.mark.parametrize("count", [1, 17, 63])
def test_inert_tokens_leave_the_state_alone(count):
    x = {n: v.transpose(0, 1) for n, v in kda_inputs(CHUNK, 2, 32, 5.0, seed=count).items()}
    for name in ("k", "v", "beta", "log_decay"):
        x[name] = x[name].clone()
        x[name][:, count:] = 0
    state = randn(2, 32, 32)
    exact = state.double()
    want = plain_recurrence(exact, {n: v[:, :count].transpose(0, 1) for n, v in x.items()})
    got = chunk(state, x["log_decay"], x["k"], x["q"], x["v"], x["beta"])
    torch.testing.assert_close(got[:, :count].transpose(0, 1), want.float(), rtol=1e-4, atol=3e-6)
    torch.testing.assert_close(state, exact.float(), rtol=1e-4, atol=1e-5)


def test_attend_matches_the_expanded_form():
    """Keys and values expanded per head (spec 7) against the absorbed form, with absent slots."""
    A, dn, dv, L, W = 3, 24, 40, 32, 64
    q, c = randn(2, A, dn), randn(2, W, L, seed=1)
    wk, wv = randn(A, dn, L, seed=2), randn(A, dv, L, seed=3)
    valid = torch.ones(2, W, dtype=torch.bool)
    valid[0, 5:] = False
    valid[1, 1:] = False
    context = attend(torch.einsum("rad,adl->ral", q, wk), c, valid, dn**-0.5)
    got = torch.einsum("ral,avl->rav", context, wv)
    for r, n in ((0, 5), (1, 1)):
        keys = torch.einsum("wl,adl->awd", c[r, :n], wk)
        values = torch.einsum("wl,avl->awv", c[r, :n], wv)
        weights = (torch.einsum("ad,awd->aw", q[r], keys) * dn**-0.5).softmax(-1)
        want = torch.einsum("aw,awv->av", weights, values)
        torch.testing.assert_close(got[r], want, rtol=1e-4, atol=1e-4)


def test_build_pools_is_a_softmax_per_channel():
    keys, gates, ape = randn(5, 4, 32), randn(5, 4, 32, seed=1), randn(4, 32, seed=2)
    got = build_pools(keys, gates, ape)
    for p in range(5):
        for d in range(32):
            weight = (gates[p, :, d] + ape[:, d]).softmax(0)
            assert abs(got[p, d] - (weight * keys[p, :, d]).sum()) < 1e-5


def test_scores_do_not_depend_on_the_number_of_pages():
    q, weight = randn(16, 3, 32), randn(16, 3, seed=1)
    keys = randn(3 * GROUP, 64, 32, seed=2)
    whole = score_pages(q, weight, keys)
    want = torch.einsum("rad,gkd->ragk", q, keys).relu().mul(weight[:, :, None, None]).sum(1)
    torch.testing.assert_close(whole, want.reshape(16, -1), rtol=1e-4, atol=1e-4)
    assert torch.equal(score_pages(q, weight, keys[:GROUP]), whole[:, : GROUP * 64])
    moved = torch.cat((keys[GROUP : GROUP + 3], keys[: GROUP - 3]))
    assert torch.equal(score_pages(q, weight, moved)[:, 192:], whole[:, : (GROUP - 3) * 64])


def plain_selection(scores: list[float], t: int, budget: int, pool: int) -> list[int]:
    visible = (t + 1) // pool
    best = sorted(range(visible), key=lambda p: (-scores[p], p))[:budget]
    members = [pool * p + j for p in sorted(best) for j in range(pool)]
    return members + list(range(visible * pool, t + 1))


@pytest.mark.parametrize("pool", [1, 4, 16])
@pytest.mark.parametrize("budget", [1, 3, 8])
def test_selection(pool, budget):
    """Against sorting by hand, with many ties and garbage beyond the visible pools."""
    g = torch.Generator().manual_seed(pool * budget)
    t = torch.randint(0, 24 * pool - 1, (40,), generator=g)
    scores = torch.randint(0, 4, (40, 64), generator=g).float()
    for row, last in enumerate(t.tolist()):
        scores[row, (last + 1) // pool :] = float("nan") if row % 2 else 1e9
    width = attention_width(budget * pool, pool)
    got = select_positions(scores, t, budget=budget, pool=pool, width=width)
    assert got.shape == (40, width) and width % 32 == 0
    for row, last in enumerate(t.tolist()):
        listed = [p for p in got[row].tolist() if p >= 0]
        assert listed == plain_selection(scores[row].tolist(), last, budget, pool)


def test_all_positions():
    assert all_positions(torch.tensor([0, 2]), 5).tolist() == [
        [0, -1, -1, -1, -1],
        [0, 1, 2, -1, -1],
    ]


def test_sinkhorn_ends_with_columns():
    comb = sinkhorn(randn(7, 4, 4) * 3, 1e-3, 3)
    torch.testing.assert_close(comb.sum(1), torch.ones(7, 4), rtol=0, atol=2e-3)
    assert (comb.sum(2) - 1).abs().max() > 1e-3  # rows were normalised before, not last


def test_route_biases_the_choice_only():
    logits, bias = randn(9, 6), torch.tensor([0.0, 5.0, 0.0, 0.0, -5.0, 0.0])
    ids, weights = route(logits, bias, num_experts=2, normalise=True, scaling=2.5)
    scores = logits.sigmoid()
    for r in range(9):
        order = (scores[r] + bias).argsort(descending=True)[:2]
        assert ids[r].tolist() == order.tolist() and ids[r, 0] == 1
        want = scores[r][order] / scores[r][order].sum() * 2.5
        torch.testing.assert_close(weights[r], want)
    _, plain = route(logits, bias, num_experts=2, normalise=False, scaling=1.0)
    torch.testing.assert_close(plain, scores.gather(1, ids))


@pytest.mark.parametrize("num_real", [1, 5, 16, 40])
def test_experts(num_real):
    R, H, width, E, S = 48, 40, 24, 5, 2
    x = randn(R, H, seed=num_real)
    x[num_real:] = float("nan")  # padding must reach nothing
    gate_up, down = randn(E, 2 * width, H, seed=1), randn(E, H, width, seed=2)
    ids = torch.stack([torch.randperm(E)[:S] for _ in range(R)])
    ids[:, 0] = 3  # one expert with more rows than a block
    ids[:, 1] = torch.arange(R) % 3
    weights = torch.rand(R, S)
    got = run_experts(x, ids, weights, gate_up, down, num_real=num_real, limit=2.0)
    assert not got[num_real:].any()
    for r in range(num_real):
        want = torch.zeros(H)
        for s in range(S):
            gate, up = (gate_up[ids[r, s]] @ x[r]).chunk(2)
            hidden = F.silu(gate.clamp(max=2.0)) * up.clamp(-2.0, 2.0)
            want += weights[r, s] * (down[ids[r, s]] @ hidden)
        torch.testing.assert_close(got[r], want, rtol=1e-4, atol=1e-3)
        alone = run_experts(x[r:], ids[r:], weights[r:], gate_up, down, num_real=1, limit=2.0)
        assert torch.equal(alone[0], got[r])
