"""MLA mixer without positions, reading only the tokens its indexer selects.

Source: spec/glm5_next.md sections 7 and 8.
Letters: R rows, H hidden, A heads, L latent width, W attention width, X index heads, D index dim.
Projections that read the same input are one matrix: q_a, kv_a, then the indexer's wk, gate and
weights; and q_b, then the indexer's wq_b.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twining.checkpoint.hf_config import Glm5NextConfig
from twining.kernels.kpool.reference import attention_width
from twining.kernels.norm.reference import rms_norm
from twining.kernels.row_linear.reference import head_linear, row_linear
from twining.kernels.sparse_mla.reference import attend
from twining.models.glm5_next.batch import RowBatch
from twining.models.glm5_next.indexer import Indexer
from twining.models.glm5_next.loading import WeightSource

_ATTEND_ROWS = 16  # rows whose latents are gathered at once; bounds memory


@dataclass(frozen=True, slots=True)
class PlaneNumbers:
    """Where a layer's rows live: its number in the latent plane, and in the index plane if any;
    both count the layers of the whole model (see cache/stage.py)."""

    latent: int
    index: int | None


def plane_numbers(config: Glm5NextConfig, index: int) -> PlaneNumbers:
    """Of a trunk layer, or of the MTP block (index num_layers), which comes last in both planes."""
    full = [i for i in config.mla_layers if config.indexer_types[i] == "full"]
    if index == config.num_layers:
        return PlaneNumbers(len(config.mla_layers), len(full))
    own = full.index(index) if index in full else None
    return PlaneNumbers(config.mla_layers.index(index), own)


class MlaMixer:
    """One layer's weights."""

    def __init__(self, source: WeightSource, config: Glm5NextConfig, index: int) -> None:
        names = source.names.mla(index)
        H, A, L = config.hidden_size, config.num_heads, config.kv_lora_rank
        dn, dv = config.qk_head_dim, config.v_head_dim
        self.heads, self.key_dim, self.latent_dim = A, dn, L
        self.rank = config.q_lora_rank
        self.eps = config.rms_norm_eps
        self.planes = plane_numbers(config, index)
        self.width = attention_width(config.index_topk, config.index_pool)
        inputs = [source.linear(names.q_a, self.rank, H), source.linear(names.kv_a, L, H)]
        queries = [source.linear(names.q_b, A * dn, self.rank)]
        self.indexer: Indexer | None = None
        if self.planes.index is not None:
            self.indexer = Indexer(source, config, index, self.planes.index)
            inputs += self.indexer.input_weights(source)
            queries.append(self.indexer.query_weight(source))
        self.in_proj = torch.cat(inputs)
        self.q_proj = torch.cat(queries)
        self.q_norm = source.tensor(names.q_a_norm, self.rank)
        self.kv_norm = source.tensor(names.kv_a_norm, L)
        kv_b = source.linear(names.kv_b, A * (dn + dv), L).view(A, dn + dv, L)
        self.absorb_key = kv_b[:, :dn].contiguous()  # [A, dn, L]
        self.expand_value = kv_b[:, dn:].transpose(1, 2).contiguous()  # [A, L, dv]
        self.o_proj = source.linear(names.o, H, A * dv)

    def forward(self, batch: RowBatch, x_RH: Tensor) -> Tensor:
        """[R, H]. Writes the latents of real rows to their pages."""
        R, A, L = x_RH.shape[0], self.heads, self.latent_dim
        proj = row_linear(x_RH, self.in_proj, block=batch.block)
        r = rms_norm(proj[:, : self.rank], self.q_norm, self.eps)
        latent = rms_norm(proj[:, self.rank : self.rank + L], self.kv_norm, self.eps)
        plane = batch.planes.latent
        plane.write(self.planes.latent - plane.first, batch.write_rows, latent[: batch.num_real])
        queries = row_linear(r, self.q_proj, block=batch.block)
        if self.indexer is not None:
            rows = self.indexer.rows(proj[:, self.rank + L :], queries[:, A * self.key_dim :])
            batch.select(self.indexer.positions(batch, rows, self.width))
        q = queries[:, : A * self.key_dim].reshape(R, A, self.key_dim)
        context = self._attend(batch, head_linear(q, self.absorb_key, block=batch.block))
        out = head_linear(context, self.expand_value, block=batch.block)
        return row_linear(out.reshape(R, -1), self.o_proj, block=batch.block)

    def _attend(self, batch: RowBatch, q_RAL: Tensor) -> Tensor:
        selection = batch.selection
        assert selection is not None, "the first MLA layer has an indexer of its own"
        plane, parts = batch.planes.latent, []
        step = min(batch.block, _ATTEND_ROWS)
        for i in range(0, batch.num_rows, step):
            span = slice(i, i + step)
            latents = plane.read(self.planes.latent - plane.first, selection.rows[span])
            parts.append(attend(q_RAL[span], latents, selection.valid[span], self.key_dim**-0.5))
        return parts[0] if len(parts) == 1 else torch.cat(parts)
