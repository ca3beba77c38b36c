"""Error feedback with an input Hessian (LDLQ), and the closing refit of the scales.

Source: spec/exl3.md 5.1, 5.2, 5.5 and 5.8 (LDLQ: QuIP, arXiv:2307.13304).
Letters: k padded in_features, n padded out_features, R a group of 16 input rows.
Matrices are inputs x outputs, in the rotated and scaled basis unless said otherwise.
"""

import torch
from torch import Tensor

from twining.exl3.codec import TILE, from_tiles, to_tiles
from twining.exl3.encoder import TileEncoder
from twining.exl3.hadamard import hadamard128

SIGMA_REG = 0.025  # share of the mean diagonal that is added to the Hessian
_SPAN = 128  # rows between updates with everything already coded


def damp(hessian: Tensor) -> Tensor | None:
    """fp32 H0 + 0.025 mean(diag) I, or None when H0 is empty or not finite (then use none)."""
    mean = hessian.diagonal().double().mean()
    if not bool(torch.isfinite(hessian).all()) or float(mean) < 1e-20:
        return None
    damped = hessian.float().clone()
    damped.diagonal().add_(SIGMA_REG * float(mean))
    return damped


def feedback_matrix(damped: Tensor, signs: Tensor) -> Tensor | None:
    """fp32 [k, k], strictly block-lower L of the rotated Hessian (I + L) Dblk (I + L)^T.

    damped: H0 after `damp`, original basis. signs: the +-1 input signs [k].
    Returns None when no Cholesky factor is found after ten rounds of more damping.
    """
    rotated = hadamard128(hadamard128(damped * signs * signs[:, None], 0), 1)
    extra = 0.05 * float(rotated.diagonal().mean())
    for _ in range(11):
        factor, info = torch.linalg.cholesky_ex(rotated)
        if int(info) == 0:
            break
        rotated.diagonal().add_(extra)
    else:
        return None
    k = len(factor)
    blocks = torch.arange(k // TILE, device=factor.device)
    by_block = factor.view(k // TILE, TILE, k // TILE, TILE)
    diagonal = by_block[blocks, :, blocks, :]
    eye = torch.eye(TILE, device=factor.device).expand_as(diagonal)
    inverse = torch.linalg.solve_triangular(diagonal, eye, upper=False)
    lower = torch.einsum("rbi,bij->rbj", factor.view(k, k // TILE, TILE), inverse).reshape(k, k)
    lower.view(k // TILE, TILE, k // TILE, TILE)[blocks, :, blocks, :] = 0.0
    return lower


def encode_with_feedback(weight: Tensor, lower: Tensor, encoder: TileEncoder) -> Tensor:
    """int32 [k/16, n/16, 256] states of weight fp32 [k, n], last input rows first.

    Every group of 16 rows is coded after the weighted errors of all later rows were added to it.
    """
    k, n = weight.shape
    error = torch.zeros_like(weight)
    states = torch.empty(k // TILE, n // TILE, 256, dtype=torch.int32, device=weight.device)
    for begin in range(k - _SPAN, -1, -_SPAN):
        end = begin + _SPAN
        target = weight[begin:end] + lower[end:, begin:end].T @ error[end:]
        for start in range(end - TILE, begin - 1, -TILE):
            stop = start + TILE
            rows = target[start - begin : stop - begin]
            rows = rows + lower[stop:end, start:stop].T @ error[stop:end]
            coded = encoder.encode(to_tiles(rows)[0])
            states[start // TILE] = coded
            error[start:stop] = weight[start:stop] - from_tiles(encoder.values(coded)[None])
    return states


def refit_scales(
    weight: Tensor, coded: Tensor, damped: Tensor, rounds: int = 2
) -> tuple[Tensor, Tensor, float]:
    """Best per-input and per-output factors of a coded weight under the Hessian.

    weight, coded: original basis [k, n]. damped: H0 after `damp` [k, k].
    Returns (input factors fp32 [k], output factors fp32 [n], relative output error after them).
    """
    w, q, h = weight.double(), coded.double().clone(), damped.double()
    hw = h @ w
    by_in = torch.ones(len(w), dtype=torch.float64, device=w.device)
    by_out = torch.ones(w.shape[1], dtype=torch.float64, device=w.device)
    for _ in range(rounds):
        energy = (q * (h @ q)).sum(0)
        column = torch.where(energy > 1e-30, (q * hw).sum(0) / energy.clamp(min=1e-30), 1.0)
        q *= column
        by_out *= column
        gram = (q @ q.T) * h
        gram.diagonal().add_(1e-6 * gram.diagonal().mean())
        row, info = torch.linalg.solve_ex(gram, (q * hw).sum(1))
        if int(info) != 0:
            break
        row = torch.where(torch.isfinite(row) & (row > 0), row, 1.0)
        q *= row[:, None]
        by_in *= row
    plain = h.clone()
    plain.diagonal().sub_(SIGMA_REG / (1 + SIGMA_REG) * float(h.diagonal().mean()))
    difference = w - q
    error = (difference * (plain @ difference)).sum() / (w * (plain @ w)).sum()
    return by_in.float(), by_out.float(), float(error)
