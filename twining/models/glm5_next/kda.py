"""KDA mixer: projections, short convolution, decay recurrence, gated output.

Source: spec/glm5_next.md section 6. Letters: R rows, H hidden, A heads, D head dim, Q = A D.
Projections that read the same input are one matrix: q, k, v, then f_a, g_a, b.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twining.cache.recurrent import RecurrentPlane, WindowLog
from twining.checkpoint.hf_config import Glm5NextConfig
from twining.kernels.activation.reference import exp, sigmoid
from twining.kernels.causal_conv.reference import causal_conv, windows
from twining.kernels.kda.reference import chunk, log_decay, recurrence
from twining.kernels.norm.reference import l2_norm, rms_norm
from twining.kernels.row_linear.reference import head_linear, row_linear
from twining.models.glm5_next.batch import PrefillBlock, RowBatch, VerifyBatch
from twining.models.glm5_next.loading import WeightSource


@dataclass(frozen=True, slots=True)
class KdaRows:
    """Inputs of the recurrence: decay exponents and vectors, all [R, A, D]; beta [R, A, 1]."""

    log_decay: Tensor
    k: Tensor
    q: Tensor
    v: Tensor
    beta: Tensor


class KdaMixer:
    """One layer's weights; `plane` is its number among the KDA layers."""

    def __init__(self, source: WeightSource, config: Glm5NextConfig, index: int) -> None:
        names = source.names.kda(index)
        H, A, D, Q = config.hidden_size, config.kda_heads, config.kda_head_dim, config.kda_width
        self.heads, self.dim, self.width = A, D, Q
        self.lower_bound = config.gate_lower_bound
        self.eps = config.rms_norm_eps
        self.plane = config.kda_layers.index(index)
        qkv = [source.linear(name, 3 * Q // len(names.qkv), H) for name in names.qkv]
        gates = [source.linear(names.f_a, D, H), source.linear(names.g_a, D, H)]
        self.in_proj = torch.cat([*qkv, *gates, source.linear(names.b, A, H)])
        gate_b = [source.linear(name, Q, D).t() for name in (names.f_b, names.g_b)]
        self.gate_b = torch.stack(gate_b)  # [2, D, Q]
        self.conv = source.conv(names.conv, Q, config.conv_kernel)
        self.a_exp = source.tensor(names.a_log, A).exp().repeat_interleave(D)
        self.dt_bias = source.tensor(names.dt_bias, Q)
        self.o_norm = source.tensor(names.o_norm, D)
        self.o_proj = source.linear(names.o, H, Q)

    def forward(self, batch: RowBatch, x_RH: Tensor) -> Tensor:
        """[R, H]. A prefill block advances the slot's state; verify rows only fill its log."""
        R, A, D, Q = x_RH.shape[0], self.heads, self.dim, self.width
        proj = row_linear(x_RH, self.in_proj, block=batch.block)
        low = proj[:, 3 * Q : 3 * Q + 2 * D].reshape(R, 2, D)
        gate = head_linear(low, self.gate_b, block=batch.block)
        decay = log_decay(gate[:, 0], self.dt_bias, self.a_exp, self.lower_bound)
        beta = sigmoid(proj[:, 3 * Q + 2 * D :].contiguous())
        plane = batch.planes.recurrent
        if isinstance(batch, VerifyBatch):
            conv = self._conv_verify(plane, batch, proj[:, : 3 * Q])
        else:
            assert isinstance(batch, PrefillBlock)
            conv = self._conv_prefill(plane, batch, proj[:, : 3 * Q])
        qk = l2_norm(conv[:, : 2 * Q].reshape(R, 2 * A, D))
        rows = KdaRows(
            log_decay=decay.view(R, A, D),
            k=qk[:, A:],
            q=qk[:, :A] * D**-0.5,
            v=conv[:, 2 * Q :].view(R, A, D),
            beta=beta.unsqueeze(2),
        )
        if isinstance(batch, VerifyBatch):
            out = self._verify(plane, batch, rows)
        else:
            out = self._prefill(plane, batch, rows)
        out = rms_norm(out, self.o_norm, self.eps).mul_(sigmoid(gate[:, 1]).view(R, A, D))
        return row_linear(out.view(R, Q), self.o_proj, block=batch.block)

    def _conv_verify(self, plane: RecurrentPlane, batch: VerifyBatch, z: Tensor) -> Tensor:
        ring = plane.conv[:, self.plane - plane.first]
        ring.index_put_((batch.slots, batch.ring_rows), z[: batch.num_real])
        return causal_conv(ring[batch.tap_slots, batch.taps], self.conv)

    def _conv_prefill(self, plane: RecurrentPlane, batch: PrefillBlock, z: Tensor) -> Tensor:
        segment, kernel = batch.segment, self.conv.shape[0]
        ring = plane.conv[segment.state.slot, self.plane - plane.first]
        history = torch.arange(segment.start - kernel + 1, segment.start).remainder_(plane.ring)
        conv = causal_conv(windows(torch.cat((ring[history], z)), kernel), self.conv)
        first = max(0, segment.count - kernel + 1)
        last = torch.arange(segment.start + first, segment.start + segment.count)
        ring[last.remainder_(plane.ring)] = z[first : segment.count]
        return conv

    def _verify(self, plane: RecurrentPlane, batch: VerifyBatch, rows: KdaRows) -> Tensor:
        """Outputs [R, A, D] of every window, run on a copy of the settled base states."""
        R, A, D, Q = batch.num_rows, self.heads, self.dim, self.width
        decay = exp(rows.log_decay)
        log = WindowLog(
            rows.k.reshape(R, Q), rows.v.reshape(R, Q), decay.view(R, Q), rows.beta.view(R, A)
        )
        layer = self.plane - plane.first
        plane.write_log(layer, batch.slots, batch.window_rows, log)
        n = len(batch.segments)

        def by_time(x: Tensor) -> Tensor:
            return x.index_select(0, batch.by_time).view(batch.longest, n * A, -1)

        state = plane.base[batch.sequence_slots, layer].view(n * A, D, D)
        out = recurrence(
            state, by_time(decay), by_time(rows.k), by_time(rows.q), by_time(rows.v),
            by_time(rows.beta),
        )  # fmt: skip
        assert out is not None
        return out.view(batch.longest * n, A, D).index_select(0, batch.from_time)

    def _prefill(self, plane: RecurrentPlane, batch: RowBatch, rows: KdaRows) -> Tensor:
        """Outputs [64, A, D]; inert rows leave the state alone."""
        segment = batch.segments[0]

        def by_head(x: Tensor, *, inert: bool = True) -> Tensor:
            x = x.transpose(0, 1).contiguous()
            if inert and segment.count < x.shape[1]:
                x[:, segment.count :] = 0.0
            return x

        state = plane.base[segment.state.slot, self.plane - plane.first]
        out = chunk(
            state,
            by_head(rows.log_decay),
            by_head(rows.k),
            by_head(rows.q, inert=False),
            by_head(rows.v),
            by_head(rows.beta),
        )
        return out.transpose(0, 1).contiguous()
