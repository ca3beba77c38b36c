"""Mixture of experts: routing in float32, expert MLPs over fixed 8-row blocks.

Source: spec/glm5_next.md section 9. Letters: R rows, H hidden, E experts, S experts per token,
I expert width. Outputs are summed in the order of the routing, so a row's sum has a fixed order.
"""

import torch
from torch import Tensor

from twining.kernels.activation.reference import sigmoid, swiglu
from twining.kernels.row_linear.reference import DECODE_ROWS, row_linear


def route(
    logits_RE: Tensor, bias_E: Tensor, *, num_experts: int, normalise: bool, scaling: float
) -> tuple[Tensor, Tensor]:
    """Expert ids [R, S] by descending biased score, and their unbiased, scaled weights [R, S]."""
    scores = sigmoid(logits_RE)
    ids = torch.topk(scores + bias_E, num_experts, dim=-1).indices
    weights = scores.gather(1, ids)
    if normalise:
        weights = weights / weights.sum(-1, keepdim=True).add_(1e-20)
    return ids, weights.mul_(scaling)


def run_experts(
    x_RH: Tensor,
    ids_RS: Tensor,
    weights_RS: Tensor,
    gate_up_EJH: Tensor,
    down_EHI: Tensor,
    *,
    num_real: int,
    limit: float,
) -> Tensor:
    """Weighted sum of the experts' outputs, [R, H]; rows from num_real on are padding and get 0.

    gate_up is [E, 2 I, H], gate rows first. Each expert's rows are gathered into blocks of 8,
    filled up with row 0; only experts that were chosen run.
    """
    R, H = x_RH.shape
    S = ids_RS.shape[1]
    rows, spans, source = _group(ids_RS[:num_real].tolist())
    index = torch.tensor(rows, device=x_RH.device)
    gathered = x_RH.index_select(0, index)
    hidden = x_RH.new_empty(len(rows), gate_up_EJH.shape[1])
    for expert, start, stop in spans:
        _blocks(gathered, gate_up_EJH[expert], hidden, start, stop)
    hidden = swiglu(hidden, limit)
    for expert, start, stop in spans:
        _blocks(hidden, down_EHI[expert], gathered, start, stop)
    picked = gathered.index_select(0, torch.tensor(source, device=x_RH.device))
    picked = picked.view(num_real, S, H).mul_(weights_RS[:num_real].unsqueeze(2))
    out = x_RH.new_zeros(R, H)
    for s in range(S):
        out[:num_real] += picked[:, s]
    return out


def _blocks(x: Tensor, weight: Tensor, out: Tensor, start: int, stop: int) -> None:
    weight_t = weight.t()
    for i in range(start, stop, DECODE_ROWS):
        torch.mm(x[i : i + DECODE_ROWS], weight_t, out=out[i : i + DECODE_ROWS])


def _group(ids: list[list[int]]) -> tuple[list[int], list[tuple[int, int, int]], list[int]]:
    """Sort (row, slot) pairs by expert: gathered row numbers, (expert, start, stop) spans in whole
    blocks, and for each (row, slot) its place among the gathered rows."""
    members: dict[int, list[tuple[int, int]]] = {}
    for row, experts in enumerate(ids):
        for slot, expert in enumerate(experts):
            members.setdefault(expert, []).append((row, slot))
    width = len(ids[0])
    rows: list[int] = []
    spans = []
    source = [0] * (len(ids) * width)
    for expert in sorted(members):
        start = len(rows)
        for row, slot in members[expert]:
            source[row * width + slot] = len(rows)
            rows.append(row)
        rows += [0] * (-len(members[expert]) % DECODE_ROWS)
        spans.append((expert, start, len(rows)))
    return rows, spans, source


def dense_mlp(
    x_RH: Tensor, gate_up_JH: Tensor, down_HI: Tensor, *, limit: float, block: int
) -> Tensor:
    """One clamped SwiGLU MLP, [R, H]."""
    hidden = swiglu(row_linear(x_RH, gate_up_JH, block=block), limit)
    return row_linear(hidden, down_HI, block=block)
