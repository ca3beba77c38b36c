"""The MTP block: one attention layer that drafts from the trunk's last hidden state.

Source: spec/glm5_next.md section 11 (plain form). Row i combines the embedding of token i + 1 with
h_i, the trunk's state of position i after the final norm, and predicts token i + 2. Rows are stored
at index i of the block's own planes, in the pages of the sequence. Nothing here can change a token.
Letters: R rows, H hidden, T rows of one sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from twining.cache.pool import SequenceState
from twining.checkpoint.hf_config import Glm5NextConfig
from twining.config import PREFILL_BLOCK
from twining.kernels.norm.reference import rms_norm
from twining.kernels.row_linear.reference import (
    DECODE_ROWS,
    WINDOW_ROWS,
    pad_rows,
    row_linear,
)
from twining.models.glm5_next.batch import RowBatch, Segment
from twining.models.glm5_next.loading import WeightSource
from twining.models.glm5_next.mla import MlaMixer
from twining.models.glm5_next.mlp import make_mlp


@dataclass(frozen=True, slots=True)
class MtpRows:
    """Rows start … start + T - 1 of one sequence: tokens at positions start + 1 … and h [T, H]."""

    state: SequenceState
    start: int
    ids_next: Sequence[int]
    hidden: Tensor


class MtpBlock:
    """Weights of the block; the embedding and the head are the trunk's.

    The block keeps no length. Rows may be recomputed from any earlier start that lies at most one
    verify window back (rejected drafts): what is above a row's own index is never visible.
    """

    def __init__(self, source: WeightSource, config: Glm5NextConfig, embedding: Tensor) -> None:
        index = config.num_layers
        names, norms = source.names.mtp(index), source.names.norms(index)
        H = config.hidden_size
        self.eps = config.rms_norm_eps
        self.embedding = embedding
        self.embed_norm = source.tensor(names.enorm, H)
        self.hidden_norm = source.tensor(names.hnorm, H)
        self.in_proj = source.linear(names.eh_proj, H, 2 * H)
        self.mixer_norm = source.tensor(norms[0], H)
        self.mlp_norm = source.tensor(norms[1], H)
        self.mixer = MlaMixer(source, config, index)
        self.mlp = make_mlp(source, config, index)
        self.head_norm = source.tensor(names.head_norm, H)

    @torch.inference_mode()
    def rows(
        self, state: SequenceState, ids_next: Sequence[int], hidden: Tensor, start: int
    ) -> Tensor:
        """Any number of rows of one sequence, [T, H] after shared_head.norm; see MtpRows."""
        parts = []
        for i in range(0, len(ids_next), PREFILL_BLOCK):
            span = slice(i, i + PREFILL_BLOCK)
            part = MtpRows(state, start + i, ids_next[span], hidden[span])
            parts.append(self.rows_batch([part]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    @torch.inference_mode()
    def rows_batch(self, items: Sequence[MtpRows]) -> Tensor:
        """Rows of several sequences in one pass, concatenated [R, H] (after shared_head.norm).

        At most 64 rows per sequence. Raises ValueError for an empty item, a count of hidden rows
        that differs from the ids, or rows beyond the pages of the sequence.
        """
        segments, offset = [], 0
        for item in items:
            count = len(item.ids_next)
            if not 1 <= count <= PREFILL_BLOCK or len(item.hidden) != count or item.start < 0:
                raise ValueError(
                    f"MtpBlock: {count} ids and {len(item.hidden)} hidden rows from row"
                    f" {item.start}; expected equal counts of 1 to {PREFILL_BLOCK}"
                )
            if item.start + count > item.state.capacity:
                raise ValueError(
                    f"MtpBlock: rows up to {item.start + count}, but pages for"
                    f" {item.state.capacity} are reserved"
                )
            segments.append(Segment(item.state, offset, count, item.start))
            offset += count
        small = all(segment.count <= WINDOW_ROWS for segment in segments)
        batch = RowBatch(
            items[0].state.pool,
            segments,
            block=DECODE_ROWS if small else PREFILL_BLOCK,
            commits=True,
        )
        batch.planes = batch.pool.stages[-1]
        ids = torch.tensor([token for item in items for token in item.ids_next])
        hidden = torch.cat([item.hidden for item in items])
        return self._forward(batch, F.embedding(ids, self.embedding), hidden)

    def _forward(self, batch: RowBatch, embeds: Tensor, hidden: Tensor) -> Tensor:
        return self._finish(batch, self.combine(batch, embeds, hidden))[: batch.num_real]

    def combine(self, batch: RowBatch, embeds: Tensor, hidden: Tensor) -> Tensor:
        """eh_proj of both normed inputs, embedding first; padded to the batch's rows [R, H]."""
        both = torch.cat(
            (
                rms_norm(embeds, self.embed_norm, self.eps),
                rms_norm(hidden, self.hidden_norm, self.eps),
            ),
            1,
        )
        return row_linear(pad_rows(both, batch.num_rows), self.in_proj, block=batch.block)

    def _finish(self, batch: RowBatch, x_RH: Tensor) -> Tensor:
        y = x_RH + self.mixer.forward(batch, rms_norm(x_RH, self.mixer_norm, self.eps))
        z = y + self.mlp.forward(batch, rms_norm(y, self.mlp_norm, self.eps))
        return rms_norm(z, self.head_norm, self.eps)
