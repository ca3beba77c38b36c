"""Depthwise causal convolution followed by SiLU (KDA short convolution).

Source: spec/glm5_next.md 6.1. Letters: K taps (tap K-1 is the current token), R rows, C channels.
"""

from torch import Tensor

from twining.kernels.activation.reference import silu


def causal_conv(taps_RKC: Tensor, weight_KC: Tensor) -> Tensor:
    """silu(Σ_j w[j] · z[t - K + 1 + j]) as [R, C]; taps are added in order.

    Row r of `taps` holds its K inputs, oldest first; it may be a strided view of one run of rows.
    """
    acc = taps_RKC[:, 0] * weight_KC[0]
    for j in range(1, weight_KC.shape[0]):
        acc += taps_RKC[:, j] * weight_KC[j]
    return silu(acc)


def windows(z_TC: Tensor, kernel: int) -> Tensor:
    """View [T - K + 1, K, C] of a run of rows that starts with K - 1 history rows."""
    return z_TC.unfold(0, kernel, 1).transpose(1, 2)
