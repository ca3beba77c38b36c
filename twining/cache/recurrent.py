"""Planes of KDA layers, per slot: base state, the log of the last verify window, convolution rows.

Source: spec/glm5_next.md 6.6; spec/dflash2.md D.6 (replay, variant 1); design.md P4.
Letters: L layers, A heads, D head dimension, Q = A D, M most rows of one verify, K taps.
The base is the state after every committed token but the last `num_pending` ones; those are in the
log and are replayed into the base before anything else reads it. The convolution inputs live in a
ring addressed by position, so accepting part of a window needs no shift.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twining.kernels.kda.reference import recurrence


@dataclass(frozen=True, slots=True)
class WindowLog:
    """What replay needs of one layer's window: k, v, decay [R, Q], beta [R, A]."""

    k: Tensor
    v: Tensor
    decay: Tensor
    beta: Tensor


class RecurrentPlane:
    """base [slots, L, A, D, D]; log k, v, decay [slots, L, M, Q], beta [slots, L, M, A];
    conv [slots, L, K - 1 + M, 3 Q]. All float32."""

    __slots__ = ("base", "conv", "first", "log_beta", "log_decay", "log_k", "log_v", "ring")

    def __init__(
        self,
        num_slots: int,
        num_layers: int,
        *,
        heads: int,
        dim: int,
        kernel: int,
        window: int,
        first: int = 0,
    ) -> None:
        """window: most rows of one verify; first: see cache/stage.py."""
        width = heads * dim
        self.first = first
        self.ring = kernel - 1 + window
        self.base = torch.zeros(num_slots, num_layers, heads, dim, dim)
        self.log_k = torch.zeros(num_slots, num_layers, window, width)
        self.log_v = torch.zeros_like(self.log_k)
        self.log_decay = torch.zeros_like(self.log_k)
        self.log_beta = torch.zeros(num_slots, num_layers, window, heads)
        self.conv = torch.zeros(num_slots, num_layers, self.ring, 3 * width)

    def reset(self, slot: int) -> None:
        """State and convolution inputs of an empty sequence."""
        self.base[slot].zero_()
        self.conv[slot].zero_()

    def write_log(self, layer: int, slots_T: Tensor, rows_T: Tensor, log: WindowLog) -> None:
        """Store a window: row i goes to (slots[i], rows[i]). The tensors may have padding rows."""
        num = len(slots_T)
        at = (slots_T, torch.full_like(slots_T, layer), rows_T)
        self.log_k.index_put_(at, log.k[:num])
        self.log_v.index_put_(at, log.v[:num])
        self.log_decay.index_put_(at, log.decay[:num])
        self.log_beta.index_put_(at, log.beta[:num])

    def replay(self, slot: int, num_rows: int) -> None:
        """Advance the base of all layers by the first num_rows logged rows."""
        if self.base.shape[1] == 0 or num_rows == 0:
            return
        _, L, A, D, _ = self.base.shape

        def by_time(log: Tensor, width: int) -> Tensor:
            return log[slot, :, :num_rows].transpose(0, 1).reshape(num_rows, L * A, width)

        recurrence(
            self.base[slot].view(L * A, D, D),
            by_time(self.log_decay, D),
            by_time(self.log_k, D),
            None,
            by_time(self.log_v, D),
            by_time(self.log_beta, 1),
        )

    @property
    def layers(self) -> slice:
        """Which of the whole model's layers of this kind are here."""
        return slice(self.first, self.first + self.base.shape[1])

    @property
    def nbytes(self) -> int:
        logs = (self.log_k, self.log_v, self.log_decay, self.log_beta)
        return self.base.nbytes + self.conv.nbytes + sum(log.nbytes for log in logs)
