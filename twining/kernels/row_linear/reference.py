"""Linear layer over fixed blocks of rows, so that a row always sees a matrix product of one shape.

Source: design.md P1. Matrix libraries choose their code path by the number of rows; two paths may
round differently. The decode family multiplies 8 rows at a time (one sequence with seven drafts is
one product; on the CPU 8 rows cost 0.6 of 16), the prefill family 64.
Letters: R rows (a multiple of the block), I inputs, O outputs.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

DECODE_ROWS = 8
PREFILL_ROWS = 64
WINDOW_ROWS = 16  # most rows of one sequence in a verify


def padded_rows(num_rows: int, block: int = DECODE_ROWS) -> int:
    """The next multiple of `block`."""
    return -(-num_rows // block) * block


def row_linear(x_RI: Tensor, weight_OI: Tensor, *, block: int) -> Tensor:
    """x Wᵀ as [R, O]. Raises ValueError unless R is a multiple of block."""
    R = x_RI.shape[0]
    if R % block:
        raise ValueError(f"row_linear: {R} rows are not a multiple of {block}; pad them")
    if block == R:
        return torch.mm(x_RI, weight_OI.t())
    out = x_RI.new_empty(R, weight_OI.shape[0])
    weight_IO = weight_OI.t()
    for i in range(0, R, block):
        torch.mm(x_RI[i : i + block], weight_IO, out=out[i : i + block])
    return out


def head_linear(x_RAI: Tensor, weight_AIO: Tensor, *, block: int) -> Tensor:
    """One matrix per head: [R, A, I] x [A, I, O] -> [R, A, O]."""
    blocks = [
        torch.bmm(x_RAI[i : i + block].transpose(0, 1), weight_AIO).transpose(0, 1)
        for i in range(0, len(x_RAI), block)
    ]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks)


def pad_rows(x: Tensor, num_rows: int) -> Tensor:
    """Append zero rows up to num_rows."""
    missing = num_rows - x.shape[0]
    return x if not missing else F.pad(x, (0, 0) * (x.dim() - 1) + (0, missing))
