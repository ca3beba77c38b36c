"""Trellis search: the ring of states whose values lie closest to 256 given weights.

Source: spec/exl3.md 5.7 (two Viterbi passes for an almost optimal tail-biting path).
Letters: N tiles, i ring position, Kin = D(i) bits that position i adds, Kout = D(i + 1).
A state of 16 bits is [top: Kout | mid | new: Kin]; it leads from in-node (top, mid) to out-node
(mid, new). Costs are laid out [N, new, top, mid], so that the in-node cost is broadcast over the
outermost dimension and the minimum over `top` reads long contiguous runs.

The forward pass keeps only the node costs; the winning `top` is recomputed along the one path that
is traced back, which is far cheaper than storing back-pointers for every node.
Runs on CPU and CUDA with the same operations.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twining.exl3.codec import RING, Codebook, codebook_values, is_rate, new_bits

_CPU_FORWARD_TILES = 4  # 4 tiles x 65536 candidates x 4 bytes stay in the second-level cache


@dataclass(frozen=True, slots=True)
class _Step:
    """Bit widths of one ring position."""

    new: int
    top: int

    @property
    def mid(self) -> int:
        return 16 - self.new - self.top

    @property
    def shape(self) -> tuple[int, int, int]:
        """(new, top, mid) sizes of the 65536 candidates."""
        return 1 << self.new, 1 << self.top, 1 << self.mid


class TileEncoder:
    """Encodes tiles at one rate with one codebook on one device.

    half_costs: keep costs in fp16 as the reference does (only needed for equal bits); default fp32.
    memory: bytes the search may use; sets how many tiles are searched at a time.
    """

    def __init__(
        self,
        bits: float,
        codebook: Codebook,
        *,
        device: torch.device | str = "cpu",
        half_costs: bool = False,
        memory: int | None = None,
    ) -> None:
        """Raises ValueError for a rate that the codebook lacks."""
        if not is_rate(bits, codebook):
            raise ValueError(f"bits={bits} with codebook {codebook} is no rate of the format")
        self.bits = bits
        self.codebook = codebook
        self.device = torch.device(device)
        self.half_costs = half_costs
        delta = new_bits(bits)
        self._steps = [_Step(delta[i], delta[(i + 1) % RING]) for i in range(RING)]
        self._values = codebook_values(codebook, self.device).float()
        # One table per parity of the position: half rates alternate between two layouts.
        self._tables = [self._layout(self._steps[parity]) for parity in (0, 1)]
        self._nodes = 1 << (16 - min(delta))
        budget = memory if memory is not None else self._default_memory()
        self.max_tiles = max(1, budget // (4 * (RING * self._nodes + 3 * 65536)))

    def _default_memory(self) -> int:
        if self.device.type != "cuda":
            return 256 << 20
        free, _ = torch.cuda.mem_get_info(self.device)
        return min(free // 2, 24 << 30)

    def _layout(self, step: _Step) -> Tensor:
        """Codebook values as [1, new, top, mid]."""
        new, top, mid = step.shape
        return self._values.view(top, mid, new).permute(2, 0, 1).contiguous()[None]

    def encode(self, tiles: Tensor) -> Tensor:
        """int32 [N, 256] states in ring order for weights [N, 256] in ring order (any float dtype).

        The weights are rounded to fp16 first, as the format's own encoder does.
        """
        weights = tiles.to(self.device).half().float()
        parts = [self._search(part) for part in torch.split(weights, self.max_tiles)]
        if not parts:
            return torch.empty(0, RING, dtype=torch.int32, device=self.device)
        return torch.cat(parts)

    def values(self, states: Tensor) -> Tensor:
        """fp32 codebook values of integer states, same shape."""
        return self._values.index_select(0, states.reshape(-1)).view(states.shape)

    def _search(self, weights: Tensor) -> Tensor:
        """States of at most `max_tiles` tiles."""
        half = RING // 2
        num = len(weights)
        history = torch.empty(RING, num, self._nodes, dtype=torch.float32, device=self.device)
        order = [*range(half, RING), *range(half)]
        free_start = torch.zeros(num, self._nodes, device=self.device)
        final = self._forward(weights, order, free_start, history)
        start = self._best_node(final[:, : self._in_nodes(half)])
        boundary, _ = self._trace(weights, range(half - 1, -1, -1), start, history)

        forced = torch.full_like(free_start, torch.inf)
        forced.scatter_(1, boundary[:, None], 0.0)
        self._forward(weights, list(range(RING)), forced, history)
        _, states = self._trace(weights, range(RING - 1, -1, -1), boundary, history)
        return states

    def _in_nodes(self, position: int) -> int:
        """Number of nodes in front of a ring position."""
        return 1 << (16 - self._steps[position % RING].new)

    def _forward(self, weights: Tensor, order: list[int], start: Tensor, history: Tensor) -> Tensor:
        """Fill history[i] with the node costs in front of position i; return the final costs."""
        final = torch.empty_like(start)
        on_cpu = self.device.type == "cpu"
        size = _CPU_FORWARD_TILES if on_cpu else len(weights)
        for first in range(0, len(weights), size):
            tiles = slice(first, first + size)
            part = weights[tiles]
            work = torch.empty(len(part), 65536, dtype=torch.float32, device=self.device)
            history[order[0], tiles] = start[tiles]
            for count, i in enumerate(order):
                is_last = count + 1 == len(order)
                out = final[tiles] if is_last else history[order[count + 1], tiles]
                self._step(part[:, i], i, history[i, tiles], out, work)
        return final

    def _step(self, w: Tensor, i: int, cost_in: Tensor, cost_out: Tensor, work: Tensor) -> None:
        """Costs behind position i from those in front of it; w fp32 [N]."""
        step = self._steps[i]
        new, top, mid = step.shape
        num = len(w)
        error = work.view(num, new, top, mid)
        torch.sub(self._tables[i & 1], w[:, None, None, None], out=error)
        cost = cost_in[:, : top * mid].view(num, 1, top, mid)
        if self.half_costs:
            error = _round_half(error)
            error = _round_half(torch.addcmul(cost, error, error))
        else:
            torch.addcmul(cost, error, error, out=error)
        # A reduction with a short inner dimension is slow; halving keeps the runs long.
        while mid < 64 and top > 1:
            top //= 2
            error = torch.minimum(error[:, :, :top], error[:, :, top:])
        best = error.amin(2) if top > 1 else error[:, :, 0]
        cost_out[:, : mid * new].view(num, mid, new).copy_(best.transpose(1, 2))

    def _trace(
        self, weights: Tensor, order: range, node: Tensor, history: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Walk back from the nodes behind order[0]: (nodes in front of order[-1], states)."""
        states = torch.zeros(len(weights), RING, dtype=torch.int32, device=self.device)
        node = node[:, None]
        tops = torch.arange(1 << max(s.top for s in self._steps[:2]), device=self.device)
        for i in order:
            step = self._steps[i]
            candidate = (tops[: 1 << step.top] << (16 - step.top)) | node
            error = self.values(candidate) - weights[:, i, None]
            cost = history[i].gather(1, candidate >> step.new)
            if self.half_costs:
                error = _round_half(error)
                total = _round_half(torch.addcmul(cost, error, error))
            else:
                total = torch.addcmul(cost, error, error)
            state = candidate.gather(1, _first_minimum(total))
            states[:, i] = state[:, 0]
            node = state >> step.new
        return node[:, 0], states

    def _best_node(self, cost: Tensor) -> Tensor:
        """int64 [N]: cheapest node; ties are broken in the order of the reference's reduction."""
        node = torch.arange(cost.shape[1], device=self.device)
        low = node & 1023
        rank = (_reverse5(low >> 5) << 10) | (_reverse5(low & 31) << 5) | (node >> 10)
        is_best = cost == cost.amin(1, keepdim=True)
        return torch.where(is_best, rank, 1 << 16).argmin(1)


def _first_minimum(cost: Tensor) -> Tensor:
    """int64 [N, 1]: index of the first smallest entry of each row, on every device."""
    index = torch.arange(cost.shape[1], device=cost.device)
    is_best = cost == cost.amin(1, keepdim=True)
    return torch.where(is_best, index, cost.shape[1]).amin(1, keepdim=True)


def _round_half(x: Tensor) -> Tensor:
    return x.half().float()


def _reverse5(x: Tensor) -> Tensor:
    """Reversal of the low five bits."""
    return ((x & 1) << 4) | ((x & 2) << 2) | (x & 4) | ((x & 8) >> 2) | ((x & 16) >> 4)
