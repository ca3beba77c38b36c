"""The indexer of one MLA layer: raw keys, pools, scores, and the positions each row attends to.

Source: spec/glm5_next.md section 8; design.md P4 for candidates.
Letters: R rows, X index heads, D index dim, P tokens per pool, W attention width.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twining.checkpoint.hf_config import Glm5NextConfig
from twining.kernels.kpool.reference import (
    GROUP,
    all_positions,
    build_pools,
    score_pages,
    select_positions,
)
from twining.kernels.norm.reference import layer_norm
from twining.kernels.row_linear.reference import WINDOW_ROWS, pad_rows
from twining.models.glm5_next.batch import RowBatch, Segment
from twining.models.glm5_next.loading import WeightSource


@dataclass(frozen=True, slots=True)
class IndexRows:
    """Per row: raw [R, 2 D] (key, then pool gate logits), query [R, X, D], head weights [R, X].

    The head weights carry both scale factors of the score, X^-0.5 and D^-0.5."""

    raw: Tensor
    query: Tensor
    head_weight: Tensor


class Indexer:
    """Weights of one layer's indexer; `plane` is its number among the index planes."""

    def __init__(
        self, source: WeightSource, config: Glm5NextConfig, index: int, plane: int
    ) -> None:
        names = source.names.indexer(index)
        self._names = names
        self._hidden, self._rank = config.hidden_size, config.q_lora_rank
        self.heads, self.dim = config.index_heads, config.index_head_dim
        self.pool = config.index_pool
        self.budget = config.index_topk // config.index_pool
        self.plane = plane
        self.norm_weight = source.tensor(names.k_norm_weight, self.dim)
        self.norm_bias = source.tensor(names.k_norm_bias, self.dim)
        self.ape = source.tensor(names.pool_ape, self.pool, self.dim)

    def input_weights(self, source: WeightSource) -> list[Tensor]:
        """Matrices that read the layer's input: wk, pool gate, head weights."""
        names = self._names
        return [
            source.linear(names.wk, self.dim, self._hidden),
            source.tensor(names.pool_gate, self.dim, self._hidden),
            source.linear(names.weights, self.heads, self._hidden),
        ]

    def query_weight(self, source: WeightSource) -> Tensor:
        """The matrix that reads the normed query latent."""
        return source.linear(self._names.wq_b, self.heads * self.dim, self._rank)

    def rows(self, inputs: Tensor, query: Tensor) -> IndexRows:
        """From the products with `input_weights` and `query_weight`."""
        R, D = len(inputs), self.dim
        key = layer_norm(inputs[:, :D].contiguous(), self.norm_weight, self.norm_bias)
        return IndexRows(
            raw=torch.cat((key, inputs[:, D : 2 * D]), 1),
            query=query.reshape(R, self.heads, D),
            head_weight=inputs[:, 2 * D :] * (self.heads**-0.5 * D**-0.5),
        )

    def positions(self, batch: RowBatch, rows: IndexRows, width: int) -> Tensor:
        """Positions [R, W] of every row, -1 where none; stores raw rows and pools on the way."""
        out = all_positions(batch.positions, width)
        for segment in batch.segments:
            self._append(batch, rows, segment)
            # With no more visible pools than the budget, everything visible is selected.
            if (segment.start + segment.count) // self.pool > self.budget:
                span = slice(segment.offset, segment.offset + segment.count)
                scores = self.scores(batch, rows, segment)
                out[span] = select_positions(
                    scores[: segment.count],
                    batch.positions[span],
                    budget=self.budget,
                    pool=self.pool,
                    width=width,
                )
        return out

    def _append(self, batch: RowBatch, rows: IndexRows, segment: Segment) -> None:
        """Store the segment's raw rows and build the pools they complete."""
        plane, slot = batch.planes.index, segment.state.slot
        layer = self.plane - plane.first
        span = slice(segment.offset, segment.offset + segment.count)
        plane.write_raw(slot, layer, segment.start, rows.raw[span])
        first = segment.start // self.pool
        num = (segment.start + segment.count) // self.pool - first
        if not num:
            return
        # Always as many pools as a full block or window can complete: one shape, see design.md P1.
        longest = max(batch.block, WINDOW_ROWS) if batch.commits else batch.pool.window
        raw = plane.read_raw(slot, layer, first, -(-longest // self.pool))
        keys = build_pools(raw[..., : self.dim], raw[..., self.dim :], self.ape)[:num]
        if batch.commits:
            plane.write_pools(layer, segment.state.pages, first, keys)
        else:
            plane.candidates[slot, layer, :num] = keys.to(plane.candidates.dtype)

    def scores(self, batch: RowBatch, rows: IndexRows, segment: Segment) -> Tensor:
        """Scores [padded rows, pools] of a segment against every pool, hidden ones included."""
        plane, pages = batch.planes.index, segment.state.pages
        layer = self.plane - plane.first
        span = slice(segment.offset, segment.offset + segment.count)
        first = segment.start // self.pool
        end = (segment.start + segment.count) // self.pool
        num_pages = -(-end // plane.pools_per_page)
        listed = pages[:num_pages] + [pages[0]] * (-num_pages % GROUP)
        keys = plane.read_pages(layer, torch.tensor(listed))
        if not batch.commits:
            candidates = plane.candidates[segment.state.slot, layer, : end - first]
            keys.view(-1, self.dim)[first:end] = candidates.float()
        # One shape per family, whatever the number of rows.
        num_rows = max(batch.block, WINDOW_ROWS)
        return score_pages(
            pad_rows(rows.query[span], num_rows),
            pad_rows(rows.head_weight[span], num_rows),
            keys,
        )
