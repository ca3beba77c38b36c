"""Elementwise functions whose result for a row does not depend on the rows around it.

Source: design.md P1. torch evaluates transcendental functions on full vector registers and the last
few values of a loop with scalar code of other rounding. So every call here sees a multiple of
LANES values, in spans that one thread handles alone; then each value goes through vector code.
Shapes are free; everything is float32.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional as F

LANES = 32  # floats: two 512-bit registers, the widest unrolled step of torch's CPU loops
SPAN = 16384  # values; below torch's threshold for splitting a loop over threads


def _in_spans(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    num = x.numel()
    if num <= SPAN and num % LANES == 0 and x.is_contiguous():
        return function(x)
    flat = F.pad(x.reshape(-1), (0, -num % LANES))
    out = torch.cat([function(flat[i : i + SPAN]) for i in range(0, len(flat), SPAN)])
    return out[:num].view(x.shape)


def sigmoid(x: Tensor) -> Tensor:
    return _in_spans(torch.sigmoid, x)


def silu(x: Tensor) -> Tensor:
    return _in_spans(F.silu, x)


def exp(x: Tensor) -> Tensor:
    return _in_spans(torch.exp, x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + e^x), linear above 20."""
    return _in_spans(F.softplus, x)


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """Clamped SwiGLU (spec/glm5_next.md section 9): [R, 2 I] (gate columns first) -> [R, I].

    The gate is clamped from above only, before the SiLU; the up half on both sides.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate.clamp(max=limit)).mul_(up.clamp(-limit, limit))
