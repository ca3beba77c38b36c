"""Manifold-constrained hyper-connections: collapse streams before a sublayer, mix them after it.

Source: spec/glm5_next.md section 5. All float32.
Letters: R rows, N streams, H hidden, M = 2 N + N² mixing values (pre, post, comb).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twining.kernels.activation.reference import sigmoid
from twining.kernels.norm.reference import rms_norm
from twining.kernels.row_linear.reference import row_linear


@dataclass(frozen=True, slots=True)
class MhcWeights:
    """One site. fn [M, N H]; base [M]; scale [M] (the three stored values, repeated per part)."""

    fn: Tensor
    base: Tensor
    scale: Tensor
    rms_eps: float
    hc_eps: float
    iters: int


def expand_scale(scale_3: Tensor, num_streams: int) -> Tensor:
    """[3] (pre, post, comb) -> [M], one factor per mixing value."""
    counts = torch.tensor([num_streams, num_streams, num_streams**2], device=scale_3.device)
    return scale_3.repeat_interleave(counts, output_size=num_streams * (num_streams + 2))


def mhc_pre(streams_RNH: Tensor, w: MhcWeights, *, block: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (post [R, N], comb [R, N, N], hidden [R, H]); comb[i, j]: old stream i to new j."""
    R, N, _ = streams_RNH.shape
    unit = rms_norm(streams_RNH.view(R, -1), None, w.rms_eps)
    mix = row_linear(unit, w.fn, block=block).mul_(w.scale).add_(w.base)
    gates = sigmoid(mix[:, : 2 * N].contiguous())
    pre = gates[:, :N] + w.hc_eps
    post = gates[:, N:] * 2.0
    comb = sinkhorn(mix[:, 2 * N :].reshape(R, N, N), w.hc_eps, w.iters)
    hidden = torch.bmm(pre.unsqueeze(1), streams_RNH).squeeze(1)
    return post, comb, hidden


def sinkhorn(logits_RNN: Tensor, eps: float, iters: int) -> Tensor:
    """Softmax of the rows, then `iters` column and `iters - 1` row normalisations in turn."""
    margin = logits_RNN.new_full((), eps)  # as a tensor: a float would be wrapped at every use
    comb = torch.softmax(logits_RNN, dim=-1).add_(margin)
    comb.div_(comb.sum(-2, keepdim=True).add_(margin))
    for _ in range(iters - 1):
        comb.div_(comb.sum(-1, keepdim=True).add_(margin))
        comb.div_(comb.sum(-2, keepdim=True).add_(margin))
    return comb


def mhc_post(streams_RNH: Tensor, out_RH: Tensor, post_RN: Tensor, comb_RNN: Tensor) -> Tensor:
    """X'_j = post_j · y + Σ_i comb_ij X_i, as [R, N, H]."""
    mixed = torch.bmm(comb_RNN.transpose(1, 2), streams_RNH)
    return mixed.add_(post_RN.unsqueeze(2) * out_RH.unsqueeze(1))
