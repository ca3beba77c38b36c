"""Absorbed multi-head latent attention over selected positions, at one constant width.

Source: spec/glm5_next.md section 7 (absorbed form). Positions that fill up the width have weight 0;
the width never depends on the context, so neither does the order of any sum (design.md P1).
Letters: R rows, A heads, L latent width, W attention width.
"""

import torch
from torch import Tensor


def attend(q_RAL: Tensor, latents_RWL: Tensor, valid_RW: Tensor, scale: float) -> Tensor:
    """Softmax-weighted sum of latents, [R, A, L]. Every row needs at least one valid position.

    q is already multiplied by Wkᵀ; latents at invalid positions must be finite.
    """
    scores = torch.bmm(q_RAL, latents_RWL.transpose(1, 2)).mul_(scale)
    scores.masked_fill_(~valid_RW.unsqueeze(1), float("-inf"))
    return torch.bmm(torch.softmax(scores, dim=-1), latents_RWL)
