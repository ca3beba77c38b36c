"""The indexer: keys pooled P tokens at a time, pool scores, and the selected token positions.

Source: spec/glm5_next.md section 8.
Letters: R rows, P tokens per pool, D index head dimension, A index heads, G pages, K pools per
page, B pool budget, W attention width. Scores are computed page by page in groups of one fixed
size, so a pool's score does not depend on how many pools exist.
"""

import torch
from torch import Tensor

GROUP = 8  # pages per scoring product


def attention_width(topk: int, pool: int) -> int:
    """Width of the position lists: topk + pool - 1, rounded up to a multiple of 32."""
    return -(-(topk + pool - 1) // 32) * 32


def build_pools(keys: Tensor, gates: Tensor, ape_PD: Tensor) -> Tensor:
    """[..., P, D] raw keys and gate logits -> pooled keys [..., D]; softmax over P per channel."""
    weight = torch.softmax(gates + ape_PD, dim=-2)
    return weight.mul_(keys).sum(-2)


def score_pages(q_RAD: Tensor, head_weight_RA: Tensor, keys_GKD: Tensor) -> Tensor:
    """Scores [R, G * K]: Σ_head weight · relu(q · key). The scale factors are in the weights.

    G must be a multiple of GROUP; pools that do not exist get meaningless scores.
    """
    R, A, D = q_RAD.shape
    G, K, _ = keys_GKD.shape
    query = q_RAD.reshape(1, R * A, D).expand(GROUP, -1, -1)
    parts = []
    for g in range(0, G, GROUP):
        dots = torch.bmm(query, keys_GKD[g : g + GROUP].transpose(1, 2)).relu_()
        weighted = dots.view(GROUP, R, A, K).mul_(head_weight_RA[None, :, :, None])
        parts.append(weighted.sum(2).transpose(0, 1).reshape(R, GROUP * K))
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def all_positions(t_R: Tensor, width: int) -> Tensor:
    """Positions 0 … t, then -1, as int64 [R, W]: the list of a row that selects everything."""
    positions = torch.arange(width, device=t_R.device)
    return torch.where(positions <= t_R[:, None], positions, -1)


def select_positions(
    scores_RN: Tensor, t_R: Tensor, *, budget: int, pool: int, width: int
) -> Tensor:
    """Positions of the best `budget` visible pools in ascending order, the tail, then -1: [R, W].

    t: position of the row. Equal scores go to the earlier pool. Rows with fewer visible pools than
    the budget take all of them, which is `all_positions`.
    """
    visible = (t_R + 1) // pool
    pools = torch.arange(scores_RN.shape[1], device=t_R.device)
    hidden = pools >= visible[:, None]
    masked = scores_RN.masked_fill(hidden, float("-inf"))
    ranked = torch.sort(masked, dim=1, descending=True, stable=True).indices
    chosen = ranked[:, :budget].sort(dim=1).values
    members = (chosen.unsqueeze(2) * pool + pools[:pool]).flatten(1)
    tail = (visible * pool)[:, None] + pools[: pool - 1]
    tail = tail.masked_fill(tail > t_R[:, None], -1)
    out = members.new_full((len(t_R), width), -1)
    out[:, : members.shape[1]] = members
    out[:, budget * pool : budget * pool + pool - 1] = tail
    few = visible <= budget
    return torch.where(few[:, None], all_positions(t_R, width), out)
