"""The DFlash2 drafter: context rows in a ring, one block pass per draft, greedy selector walk.

Source: spec/dflash2.md sections B, C and I. Sequences of a step share one block pass; each attends
to its own ring. The native block is always computed and cropped to the drafts wanted, which is
what the drafter was trained on; `native_block=False` computes only 1 + K rows (section B.6).

Letters: N sequences, B block rows, K drafts, T tokens, W window, H hidden, L layers, S position of
the anchor (tokens whose target state is final).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from twining.cache.ring import RingCache
from twining.checkpoint.dflash2_config import DFlash2Config
from twining.drafters.base import DraftItem, HeadAndEmbedding
from twining.drafters.dflash2.model import (
    DFlash2Weights,
    block_forward,
    context_kv,
    encode_taps,
    grouped_attention,
    rope_tables,
    scale_logits,
    selector_walk,
)
from twining.errors import ConfigError

if TYPE_CHECKING:
    from twining.cache.pool import SequenceState
    from twining.models.glm5_next.model import TrunkRows


def check_ring_fits(config: DFlash2Config) -> int:
    """The window of a drafter that a ring can serve. Raises ConfigError for full attention."""
    if config.sliding_window is None or "full" in config.layer_types:
        raise ConfigError(
            "the drafter has full-attention layers, which need the whole context; only drafters"
            " with sliding layers are supported, choose another drafter_dir or drafter"
        )
    return config.sliding_window


class DFlash2Drafter:
    """Drafts up to block_size - 1 tokens per sequence in one pass."""

    name = "dflash2"
    needs_taps = True
    needs_hidden = False
    plane_names: tuple[str, ...] = ("ring_k", "ring_v")
    rewrites_last_page = False

    def __init__(
        self,
        config: DFlash2Config,
        weights: DFlash2Weights,
        target: HeadAndEmbedding,
        *,
        max_seqs: int,
        max_chunk: int,
        native_block: bool = True,
    ) -> None:
        """max_chunk: tokens of the longest `extend` or rewind that keeps the whole window."""
        self._window = check_ring_fits(config)
        self._config, self._weights, self._target = config, weights, target
        self._native_block = native_block
        self.max_draft = config.block_size - 1
        num_rows = RingCache.rows_needed(
            window=self._window, chunk=max_chunk, block=config.block_size
        )
        self.ring = RingCache(
            num_layers=config.num_layers,
            num_slots=max_seqs,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            num_rows=num_rows,
        )

    def open(self, state: "SequenceState") -> None:
        """Start with an empty context."""
        self.ring.reset(state.slot)

    def close(self, state: "SequenceState") -> None:
        """Drop the context."""
        self.ring.reset(state.slot)

    @torch.inference_mode()
    def extend(
        self, state: "SequenceState", start: int, ids: Sequence[int], rows: "TrunkRows"
    ) -> None:
        """Write K and V of committed tokens from their taps [T, NT*H]."""
        assert rows.taps is not None, "the model was loaded without the drafter's tap layers"
        skip = self.ring.first_kept(len(ids))
        features = encode_taps(self._weights, self._config, rows.taps[skip : len(ids)])
        positions = torch.arange(start + skip, start + len(ids))
        tables = rope_tables(positions, self._config.head_dim, self._config.rope_theta)
        kv = [context_kv(layer, self._config, features, tables) for layer in self._weights.layers]
        k, v = (torch.stack(part) for part in zip(*kv, strict=True))
        self.ring.write(state.slot, start + skip, k, v)

    def snapshot(self, state: "SequenceState", length: int) -> dict[str, Tensor] | None:
        """K and V of the W - 1 rows below `length` [L, T, KV, D], all that a draft can see."""
        oldest, end = self.ring.readable(state.slot)
        if end < length:
            return None
        first = min(length, max(oldest, length - self._window + 1))
        k, v = self.ring.export(state.slot, first, length)
        return {"ring_k": k, "ring_v": v}

    def restore(self, state: "SequenceState", planes: dict[str, Tensor], length: int) -> None:
        """Rows below the snapshot's are not readable."""
        k, v = planes["ring_k"], planes["ring_v"]
        self.ring.write(state.slot, length - k.shape[1], k, v)

    @torch.inference_mode()
    def draft(self, items: Sequence[DraftItem]) -> list[list[int]]:
        """Greedy selector walks after each anchor; items that want no draft cost nothing."""
        active = [i for i, item in enumerate(items) if item.num_draft > 0]
        drafts: list[list[int]] = [[] for _ in items]
        if not active:
            return drafts
        chosen = [items[i] for i in active]
        longest = min(self.max_draft, max(item.num_draft for item in chosen))
        hidden = self._block_pass(chosen, longest)[:, 1 : longest + 1]
        N, K, H = hidden.shape
        logits = self._target.logits(hidden.reshape(N * K, H)).view(N, K, -1)
        anchors = torch.tensor([item.tokens[-1] for item in chosen])
        path, _ = selector_walk(
            self._weights, self._config, hidden, scale_logits(self._config, logits), anchors
        )
        for i, item, ids in zip(active, chosen, path.tolist(), strict=True):
            drafts[i] = ids[: item.num_draft]
        return drafts

    def _block_pass(self, items: Sequence[DraftItem], longest: int) -> Tensor:
        """Normed hidden rows [N,B,H] of one block per item."""
        B = self._config.block_size if self._native_block else longest + 1
        ids = torch.full((len(items), B), self._config.mask_token_id)
        ids[:, 0] = torch.tensor([item.tokens[-1] for item in items])
        starts = torch.tensor([item.state.length for item in items])
        positions = starts[:, None] + torch.arange(B)
        slots = [item.state.slot for item in items]
        spans = [self._context_span(item.state) for item in items]
        masks = [
            self._mask(*span, item.state.length, B) for span, item in zip(spans, items, strict=True)
        ]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            causal = self._config.is_causal[layer]
            out = torch.empty_like(q)
            for n, (slot, (first, end)) in enumerate(zip(slots, spans, strict=True)):
                context_k, context_v = self.ring.read(slot, layer, first, end)
                out[n] = grouped_attention(
                    q[n : n + 1],
                    torch.cat([context_k, k[n].transpose(0, 1)], 1)[None],
                    torch.cat([context_v, v[n].transpose(0, 1)], 1)[None],
                    masks[n][int(causal)][None],
                )[0]
            return out

        embeds = self._target.embed(ids)
        return block_forward(self._weights, self._config, embeds, positions, attend)

    def _context_span(self, state: "SequenceState") -> tuple[int, int]:
        """Positions [first, end) that some block row may see and the ring still has."""
        oldest, end = self.ring.readable(state.slot)
        end = min(end, state.length)
        return min(end, max(oldest, state.length - self._window + 1)), end

    def _mask(self, first: int, end: int, anchor: int, B: int) -> tuple[Tensor, Tensor]:
        """Bool [B, end - first + B], bidirectional and causal inside the block (section B.4)."""
        rows = torch.arange(B)
        # Row i stands at anchor + i and sees positions above anchor + i - W.
        context = torch.arange(first, end) > anchor + rows[:, None] - self._window
        near = (rows[:, None] - rows).abs() < self._window
        both = torch.cat([context, near], 1)
        return both, torch.cat([context, near & (rows <= rows[:, None])], 1)
