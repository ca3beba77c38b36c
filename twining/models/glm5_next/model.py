"""The text model: prefill in 64-token blocks, verify of drafted rows, commit of what was accepted.

Source: spec/glm5_next.md sections 4, 10, 17; design.md P1, P2, P4. A pass is a Hop that runs
through the stages of its cache pool in order: here one after the other (with one stage, that is all
there is), in engine/pipeline.py each stage on a worker of its own. Both use the same code.
Letters: R rows, H hidden, N streams, V vocabulary, NT taps, T tokens.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from twining.cache.pool import CachePool, SequenceState
from twining.checkpoint.hf_config import Glm5NextConfig
from twining.checkpoint.reader import Checkpoint
from twining.config import PREFILL_BLOCK, LatentFormat
from twining.errors import CheckpointError, ConfigError
from twining.kernels.norm.reference import rms_norm
from twining.kernels.row_linear.reference import DECODE_ROWS, pad_rows, padded_rows, row_linear
from twining.models.glm5_next.batch import PrefillBlock, RowBatch, VerifyBatch
from twining.models.glm5_next.hop import Hop
from twining.models.glm5_next.layer import TrunkLayer
from twining.models.glm5_next.loading import WeightSource
from twining.models.glm5_next.mtp import MtpBlock


@dataclass(frozen=True, slots=True)
class TrunkRows:
    """Rows of one pass. hidden [R, H]: after the final norm, input of the head and of MTP.
    taps [R, NT * H]: mean of the streams after each tapped layer, or None without taps."""

    hidden: Tensor
    taps: Tensor | None


class Glm5Next:
    """Weights of the trunk, the head and, when the checkpoint has it, the MTP block."""

    def __init__(
        self, source: WeightSource, config: Glm5NextConfig, tap_layers: tuple[int, ...]
    ) -> None:
        names = source.names
        H, V = config.hidden_size, config.vocab_size
        self.config = config
        self.tap_layers = tap_layers
        self.embedding = source.tensor(names.embed, V, H)
        self.final_norm = source.tensor(names.final_norm, H)
        tied = config.tie_word_embeddings and not names.has_module(names.lm_head)
        self.head = self.embedding if tied else source.linear(names.lm_head, V, H)
        self.layers = []
        self.layer_bytes: list[int] = []
        for i in range(config.num_layers):
            before = source.num_bytes
            self.layers.append(TrunkLayer(source, config, i))
            self.layer_bytes.append(source.num_bytes - before)
        has_mtp = config.num_mtp_layers > 0 and names.has_layer(config.num_layers)
        before = source.num_bytes
        self.mtp = MtpBlock(source, config, self.embedding) if has_mtp else None
        self.head_bytes = self.head.nbytes + source.num_bytes - before  # with the MTP block

    @classmethod
    def load(
        cls, ckpt: Checkpoint, config: Glm5NextConfig, *, tap_layers: tuple[int, ...] = ()
    ) -> "Glm5Next":
        """Read all text tensors as float32.

        Raises CheckpointError for missing tensors (all at once), wrong shapes or tensors without a
        place; ConfigError for tap layers out of range.
        """
        for layer in tap_layers:
            if not 0 <= layer < config.num_layers:
                raise ConfigError(
                    f"tap layer {layer} is outside 0..{config.num_layers - 1};"
                    " the drafter belongs to another target model"
                )
        if config.num_mtp_layers > 1:
            raise CheckpointError(
                f"num_nextn_predict_layers={config.num_mtp_layers}: one MTP block is supported;"
                " set it to 0 or 1"
            )
        dry = WeightSource(ckpt, dry=True)
        cls(dry, config, tap_layers)
        dry.raise_missing()
        source = WeightSource(ckpt, dry=False)
        model = cls(source, config, tap_layers)
        source.raise_unused()
        return model

    @property
    def has_mtp(self) -> bool:
        return self.mtp is not None

    def make_pool(
        self,
        *,
        num_pages: int,
        max_seqs: int,
        max_draft: int,
        latent_format: LatentFormat = "fp32",
        index_format: str = "fp32",
        partition: Sequence[int] = (),
    ) -> CachePool:
        """Cache planes for this model (the MTP block's included), divided over stages of that many
        layers (() = one stage). Raises ConfigError.
        """
        return CachePool(
            self.config,
            num_pages=num_pages,
            max_seqs=max_seqs,
            max_draft=max_draft,
            latent_format=latent_format,
            index_format=index_format,
            has_mtp=self.has_mtp,
            partition=partition,
        )

    @torch.no_grad()  # callers may change the result in place
    def embed(self, ids: Tensor | Sequence[int]) -> Tensor:
        """Embedding rows, float32 [..., H]. Raises ValueError for an id outside the vocabulary."""
        index = torch.as_tensor(ids, dtype=torch.int64)
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(self.embedding):
            raise ValueError(
                f"embed: token ids {int(index.min())}..{int(index.max())} are outside the"
                f" vocabulary of {len(self.embedding)}"
            )
        return F.embedding(index, self.embedding)

    @torch.no_grad()  # callers may change the result in place
    def logits(self, hidden_RH: Tensor) -> Tensor:
        """Float32 [R, V]; a row's bits do not depend on the other rows."""
        R = len(hidden_RH)
        padded = pad_rows(hidden_RH, padded_rows(R))
        return row_linear(padded, self.head, block=DECODE_ROWS)[:R]

    @torch.inference_mode()
    def prefill(
        self, state: SequenceState, ids: Sequence[int], *, embeds: Tensor | None = None
    ) -> TrunkRows:
        """The next prompt tokens, from state.length on; advances state.length.

        len(ids) must be a multiple of 64 unless these tokens end the prompt, and pages must be
        reserved. Computed in 64-token blocks, so the split into calls cannot change a bit.
        embeds: float32 [T, H] rows to use instead of the ids' embeddings.
        Raises ValueError when the start is not 64-aligned, or for the reasons of prefill_block.
        """
        return join_rows([self.run(hop) for hop in self.prefill_hops(state, ids, embeds=embeds)])

    def prefill_hops(
        self, state: SequenceState, ids: Sequence[int], *, embeds: Tensor | None = None
    ) -> Iterator[Hop]:
        """The blocks of `prefill`, each to be run after the one before it. A block counts as
        computed (state.length) from the moment it is handed out.
        """
        if state.length % PREFILL_BLOCK:
            raise ValueError(
                f"prefill: starts at {state.length}, which is not a multiple of {PREFILL_BLOCK};"
                " only the end of a prompt may be unaligned"
            )
        if not ids:
            raise ValueError("prefill: no tokens")
        for i in range(0, len(ids), PREFILL_BLOCK):
            span = slice(i, i + PREFILL_BLOCK)
            rows = None if embeds is None else embeds[span]
            yield self._block_hop(state, ids[span], rows)

    def prefill_block(
        self, state: SequenceState, ids: Sequence[int], *, embeds: Tensor | None = None
    ) -> TrunkRows:
        """1 to 64 tokens from state.length, wherever that is: the arithmetic behind `prefill`,
        whose alignment is policy. Raises ValueError for more tokens, or pages not reserved."""
        return self.run(self._block_hop(state, ids, embeds))

    @torch.inference_mode()
    def _block_hop(self, state: SequenceState, ids: Sequence[int], embeds: Tensor | None) -> Hop:
        count = len(ids)
        if not 1 <= count <= PREFILL_BLOCK:
            raise ValueError(f"prefill_block: {count} tokens, expected 1 to {PREFILL_BLOCK}")
        _check_room("prefill", state, count)
        x = self.embed(ids) if embeds is None else embeds
        if x.shape != (count, self.config.hidden_size):
            raise ValueError(f"prefill: embeds are {list(x.shape)} for {count} tokens")
        hop = self._start(PrefillBlock(state, count), x)
        state.num_window = 0
        state.length += count
        return hop

    def verify(self, batch: Sequence[tuple[SequenceState, Sequence[int]]]) -> TrunkRows:
        """Rows of every sequence (anchor, then drafts, at positions from its length), concatenated.

        Committed state is left alone until `commit`; pending rows of the last verify are replayed
        first. Raises ValueError for an empty batch, no or too many rows, a repeated sequence, or
        pages not reserved.
        """
        return self.run(self.verify_hop(batch))

    @torch.inference_mode()
    def verify_hop(self, batch: Sequence[tuple[SequenceState, Sequence[int]]]) -> Hop:
        """The pass of `verify`, not yet run."""
        if not batch:
            raise ValueError("verify: empty batch")
        pool = batch[0][0].pool
        if len({state.slot for state, _ in batch}) < len(batch):
            raise ValueError("verify: the same sequence twice")
        for state, ids in batch:
            if not 1 <= len(ids) <= pool.window or state.pool is not pool:
                raise ValueError(
                    f"verify: {len(ids)} rows for slot {state.slot}, expected 1 to {pool.window}"
                    " rows of one cache pool"
                )
            _check_room("verify", state, len(ids))
        x = self.embed([token for _, ids in batch for token in ids])
        counts = [(state, len(ids)) for state, ids in batch]
        hop = self._start(VerifyBatch(pool, counts, kernel=self.config.conv_kernel), x)
        for state, count in counts:
            state.num_window = count
        return hop

    @torch.inference_mode()
    def commit(self, state: SequenceState, num_rows: int) -> None:
        """Accept the first num_rows rows of the sequence's last verify.

        Raises ValueError unless 1 <= num_rows <= rows of that verify, and it is not committed yet.
        """
        if not 1 <= num_rows <= state.num_window:
            raise ValueError(
                f"commit: {num_rows} rows for slot {state.slot}, but its last verify has"
                f" {state.num_window} rows to accept"
            )
        pool = self.config.index_pool
        first = state.length // pool
        num = (state.length + num_rows) // pool - first
        for planes in state.pool.stages:
            planes.commit_pools(state.slot, state.pages, first, num)
        state.length += num_rows
        state.num_window = 0
        state.num_pending = num_rows

    def _start(self, batch: RowBatch, x_TH: Tensor) -> Hop:
        """The embeddings as streams; pending rows become the stages' business."""
        x = pad_rows(x_TH, batch.num_rows)
        states = [s.state for s in batch.segments]
        pending = [(s.slot, s.num_pending) for s in states if s.num_pending]
        for state in states:
            state.num_pending = 0
        return Hop(batch, x.unsqueeze(1).repeat(1, self.config.hc_mult, 1), pending)

    def run(self, hop: Hop) -> TrunkRows:
        """The whole pass on the calling thread."""
        for number in range(len(hop.batch.pool.stages)):
            self.run_stage(hop, number)
        return self.finish(hop)

    @torch.inference_mode()
    def run_stage(self, hop: Hop, number: int) -> None:
        """The layers of one stage of the pool; stages must be run in order."""
        batch = hop.batch
        batch.planes = planes = batch.pool.stages[number]
        for slot, num in hop.pending:
            planes.recurrent.replay(slot, num)
        for i in planes.trunk_layers:
            hop.streams = self.layers[i].forward(batch, hop.streams)
            if i in self.tap_layers:
                hop.taps[i] = hop.streams.mean(1)[: batch.num_real]

    @torch.inference_mode()
    def finish(self, hop: Hop) -> TrunkRows:
        """What the last stage makes of streams that passed every layer."""
        hidden = rms_norm(hop.streams.mean(1), self.final_norm, self.config.rms_norm_eps)
        tapped = torch.cat([hop.taps[i] for i in self.tap_layers], 1) if hop.taps else None
        return TrunkRows(hidden[: hop.batch.num_real], tapped)


def join_rows(parts: Sequence[TrunkRows]) -> TrunkRows:
    """Rows of consecutive passes, one after the other."""
    if len(parts) == 1:
        return parts[0]
    taps = [part.taps for part in parts if part.taps is not None]
    return TrunkRows(torch.cat([part.hidden for part in parts]), torch.cat(taps) if taps else None)


def _check_room(what: str, state: SequenceState, count: int) -> None:
    if state.length + count > state.capacity:
        raise ValueError(
            f"{what}: {state.length} + {count} tokens, but pages for {state.capacity} are reserved"
        )
