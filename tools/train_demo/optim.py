"""Optimisers of the demo training: Muon for hidden matrices, AdamW for everything else.

Muon: momentum, then the update is replaced by its nearest semi-orthogonal matrix (Newton-Schulz
iteration of the polar factor, coefficients of Jordan et al. 2024), scaled by sqrt(max(1, out /
in)). Matrices of one shape are stacked and iterated together; stacked experts count as one matrix
each.
"""

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

NS_STEPS = 5
NS_A, NS_B, NS_C = 3.4445, -4.7750, 2.0315


def orthogonalise(g: Tensor) -> Tensor:
    """[M, out, in] -> polar factors, bf16 arithmetic."""
    x = g.bfloat16()
    wide = x.shape[-2] <= x.shape[-1]
    x = x if wide else x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(NS_STEPS):
        gram = x @ x.mT
        x = NS_A * x + (NS_B * gram + NS_C * gram @ gram) @ x
    return x if wide else x.mT


class Muon(Optimizer):
    """lr is the size of one update in units of an orthogonal matrix; weight decay is decoupled."""

    def __init__(self, params: list[nn.Parameter], lr: float, momentum: float, weight_decay: float):
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
            for p in group["params"]:
                if p.grad is not None:
                    shapes.setdefault(tuple(p.shape[-2:]), []).append(p)
            for (rows, cols), params in shapes.items():
                self.update(params, rows, cols, group)

    def update(self, params: list[nn.Parameter], rows: int, cols: int, group: dict) -> None:
        grads, counts = [], []
        for p in params:
            buf = self.state[p].setdefault("momentum", torch.zeros_like(p))
            buf.lerp_(p.grad, 1 - group["momentum"])
            nesterov = p.grad.lerp(buf, group["momentum"]).view(-1, rows, cols)
            grads.append(nesterov)
            counts.append(len(nesterov))
        step = orthogonalise(torch.cat(grads)) * max(1.0, rows / cols) ** 0.5
        for p, part in zip(params, step.split(counts), strict=True):
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(part.view_as(p).to(p.dtype) * group["lr"])


def split_parameters(model: nn.Module) -> dict[str, list[nn.Parameter]]:
    """muon: hidden matrices. embed, head, small: AdamW groups. index: the indexers, AdamW."""
    groups: dict[str, list[nn.Parameter]] = {
        k: [] for k in ("muon", "embed", "head", "index", "small")
    }
    for name, p in model.named_parameters():
        if name.startswith("embed_tokens"):
            groups["embed"].append(p)
        elif name.startswith("lm_head"):
            groups["head"].append(p)
        elif ".indexer." in name:
            groups["index"].append(p)
        elif "mlp.experts_" in name or (p.ndim == 2 and min(p.shape) >= 32 and "hc_" not in name):
            groups["muon"].append(p)
        else:
            groups["small"].append(p)
    return groups


def make_optimizers(model: nn.Module, *, muon_lr: float, adam_lr: float) -> list[Optimizer]:
    """Muon and one fused AdamW. Rates are device tensors, so that a captured step sees them change;
    every group remembers its peak rate in `peak_lr`.
    """
    groups = split_parameters(model)
    device = next(model.parameters()).device
    muon = Muon(groups["muon"], lr=muon_lr, momentum=0.95, weight_decay=0.02)
    rates = {"embed": 3 * adam_lr, "head": adam_lr, "index": 0.5 * adam_lr, "small": adam_lr}
    adam = AdamW(
        [{"params": groups[k], "lr": rate} for k, rate in rates.items()],
        betas=(0.9, 0.95),
        weight_decay=0.0,
        eps=1e-10,
        fused=device.type == "cuda",
        capturable=device.type == "cuda",
    )
    for opt in (muon, adam):
        for group in opt.param_groups:
            group["peak_lr"] = float(group["lr"])
            group["lr"] = torch.tensor(float(group["lr"]), device=device)
    return [muon, adam]
