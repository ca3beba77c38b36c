"""Normalisations over the last dimension, statistics in float32.

Source: spec/glm5_next.md (notation, 6.3, 8.1). Letters: W normalised width.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

L2_EPS = 1e-6  # inside the root; a constant of KDA, not a config value
LAYER_NORM_EPS = 1e-6  # of the indexer's key norm


def rms_norm(x: Tensor, weight_W: Tensor | None, eps: float) -> Tensor:
    """x / sqrt(mean(x²) + eps) ⊙ weight over the last dimension."""
    return F.rms_norm(x, x.shape[-1:], weight_W, eps)


def layer_norm(x: Tensor, weight_W: Tensor, bias_W: Tensor) -> Tensor:
    """Mean-subtracting LayerNorm with bias, eps 1e-6."""
    return F.layer_norm(x, x.shape[-1:], weight_W, bias_W, LAYER_NORM_EPS)


def l2_norm(x: Tensor) -> Tensor:
    """x / sqrt(sum(x²) + 1e-6) over the last dimension."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True).add_(L2_EPS))
