"""Kimi delta attention: decay gates, the token recurrence, and the 64-token chunked form.

Source: spec/glm5_next.md 6.2, 6.3, 6.5. All float32.
Letters: T tokens, B independent states (sequence x head), D head dimension; a state is
[key channel, value channel]. Decode and replay run the recurrence token by token with the same
operations, so a replayed state has the bits of a directly computed one (design.md P4).
"""

import torch
from torch import Tensor

from twining.kernels.activation.reference import exp, sigmoid, softplus

CHUNK = 64  # tokens of the chunked form
_SUB = 16  # tokens of a sub-block: pairwise differences inside, factored exponents between


def log_decay(f: Tensor, dt_bias: Tensor, a_exp: Tensor, lower_bound: float | None) -> Tensor:
    """Log decay per key channel, same shape as f [R, heads * D]; a_exp = exp(A_log) per channel.

    lower_bound None is the softplus form; the two are different functions.
    """
    gate = f + dt_bias
    if lower_bound is None:
        return softplus(gate).mul_(-a_exp)
    return sigmoid(gate.mul_(a_exp)).mul_(lower_bound)


def recurrence(
    state_BDD: Tensor,
    decay_TBD: Tensor,
    k_TBD: Tensor,
    q_TBD: Tensor | None,
    v_TBD: Tensor,
    beta_TB1: Tensor,
) -> Tensor | None:
    """Advance the states by T tokens in place; returns outputs [T, B, D], or None without q.

    decay = exp(log decay); k and q normalised, q scaled. Written with the decay moved onto the
    vectors: Sᵀk of the decayed state is S₀ᵀ(d ⊙ k), and the output is S₀ᵀ(d ⊙ q) + u (k · q).
    """
    T = k_TBD.shape[0]
    query = torch.zeros_like(k_TBD) if q_TBD is None else q_TBD
    probe_TB2D = torch.stack((k_TBD, query), 2).mul_(decay_TBD.unsqueeze(2))
    dot_TB1 = None if q_TBD is None else (k_TBD * q_TBD).sum(-1, keepdim=True)
    outs = []
    for t in range(T):
        read = torch.bmm(probe_TB2D[t], state_BDD)
        u = (v_TBD[t] - read[:, 0]).mul_(beta_TB1[t])
        state_BDD.mul_(decay_TBD[t].unsqueeze(2))
        state_BDD.addcmul_(k_TBD[t].unsqueeze(2), u.unsqueeze(1))
        if dot_TB1 is not None:
            outs.append((u * dot_TB1[t]).add_(read[:, 1]))
    return torch.stack(outs) if q_TBD is not None else None


def chunk(
    state_BDD: Tensor, log_decay_BTD: Tensor, k: Tensor, q: Tensor, v: Tensor, beta_BT1: Tensor
) -> Tensor:
    """One chunk of 64 tokens: updates the states in place, returns outputs [B, 64, D].

    k, q, v as log_decay: [B, 64, D], k and q normalised, q scaled. Inert tokens have k = v = 0,
    beta = 0 and log decay 0. Every exponent is a difference that is <= 0, so nothing overflows
    whatever the gate.
    """
    total = log_decay_BTD.cumsum(1)
    from_start = exp(total)
    inner_A, inner_M = _pair_sums(total, k, q)
    inner_A *= beta_BT1
    rhs = torch.cat((v, k * from_start), 2).mul_(beta_BT1)
    solved = torch.linalg.solve_triangular(inner_A, rhs, upper=False, unitriangular=True)
    u, w = solved.chunk(2, dim=2)
    fresh = u - torch.bmm(w, state_BDD)
    out = torch.bmm(q * from_start, state_BDD).add_(torch.bmm(inner_M, fresh))
    to_end = exp(total[:, -1:] - total).mul_(k)
    state_BDD.mul_(from_start[:, -1].unsqueeze(2))
    state_BDD.add_(torch.bmm(to_end.transpose(1, 2), fresh))
    return out


def _pair_sums(total: Tensor, k: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """A (strictly lower) and M (lower) of 6.5 without beta, each [B, 64, 64]."""
    B, T, D = total.shape
    num = T // _SUB
    sub = (B, num, _SUB, D)
    total_s, kq = total.view(sub), torch.stack((k.view(sub), q.view(sub)), 3)
    # Inside a sub-block: one exponential per pair and channel. Pairs j > i are masked later;
    # the clamp keeps their exponents finite.
    pair = exp((total_s.unsqueeze(3) - total_s.unsqueeze(2)).clamp_(max=0.0))
    pair *= k.view(sub).unsqueeze(2)
    diagonal = torch.matmul(pair, kq.transpose(3, 4))  # [B, num, i, j, 2]
    out = total.new_zeros(2, B, T, T)
    # Between sub-blocks: relative to the end of the sub-block before, both factors are <= 1.
    reference = torch.cat((torch.zeros_like(total[:, :1]), total[:, _SUB - 1 : -1 : _SUB]), 1)
    left = exp(total_s - reference.unsqueeze(2)).unsqueeze(3).mul(kq)
    for i in range(num):
        rows = slice(i * _SUB, (i + 1) * _SUB)
        out[:, :, rows, rows] = diagonal[:, i].permute(3, 0, 1, 2)
        if i:
            before = slice(0, i * _SUB)
            right = exp(reference[:, i : i + 1] - total[:, before]).mul_(k[:, before])
            pairs = torch.bmm(left[:, i].reshape(B, 2 * _SUB, D), right.transpose(1, 2))
            out[:, :, rows, before] = pairs.view(B, _SUB, 2, i * _SUB).permute(2, 0, 1, 3)
    return out[0].tril_(-1), out[1].tril_()
