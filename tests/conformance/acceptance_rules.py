"""Published acceptance rules as plain functions, to check the fixtures' numbers against the spec.

Source: spec/dflash2.md D.2. The engine itself uses sample-and-compare (twining/engine/verify.py).
K drafts, V vocabulary; p [K+1,V] target laws, q [K,V] draft laws, float64.
"""

import torch
from torch import Tensor


def standard_accept_prob(p: Tensor, q: Tensor, draft: Tensor) -> Tensor:
    """[K] min(1, p(d)/q(d))."""
    rows = torch.arange(len(draft))
    return (p[rows, draft] / q[rows, draft]).clamp(max=1)


def residual(p: Tensor, q: Tensor, scale: Tensor | float = 1.0) -> Tensor:
    """[V] normalised max(scale * p - q, 0)."""
    rest = (scale * p - q).clamp(min=0)
    return rest / rest.sum()


def standard_accepted(p: Tensor, q: Tensor, draft: Tensor, uniforms: Tensor) -> int:
    """Drafts accepted for given uniforms: the test is u * q < p, strictly."""
    for i, token in enumerate(draft.tolist()):
        if not uniforms[i] * q[i, token] < p[i, token]:
            return i
    return len(draft)


def block_verification(p: Tensor, q: Tensor, draft: Tensor) -> tuple[Tensor, Tensor]:
    """(ratio [K], h [K]) of block verification; row i = 1..K at index i - 1."""
    K = len(draft)
    ratio = torch.ones((), dtype=p.dtype)
    ratios, hs = [], []
    for i in range(K):
        ratio = (ratio * p[i, draft[i]] / q[i, draft[i]]).clamp(max=1)
        ratios.append(ratio)
        if i == K - 1:
            hs.append(ratio)
            continue
        mass = (ratio * p[i + 1] - q[i + 1]).clamp(min=0).sum()
        denominator = mass + 1 - ratio
        hs.append(mass / denominator if denominator > 0 else torch.ones((), dtype=p.dtype))
    return torch.stack(ratios), torch.stack(hs)
