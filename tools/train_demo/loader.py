"""Batches for training: worker processes make packed rows, the main process moves them to the
device.

Workers are spawned, each with its own slice of the stream; a batch is taken round robin, so the
sequence of batches depends on (seed, part, number of workers) only.
"""

import multiprocessing as mp
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from tools.train_demo.model import MAX_SEGMENTS, Packed

Row = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # ids, weight, doc, pos; each [T]
StreamFactory = Callable[[int, int], Iterator[Row]]  # (worker, num_workers) -> rows


def _work(make: StreamFactory, worker: int, num_workers: int, rows: int, queue: Any) -> None:
    torch.set_num_threads(1)
    stream = make(worker, num_workers)
    while True:
        taken = [next(stream) for _ in range(rows)]
        queue.put(tuple(np.stack(part) for part in zip(*taken, strict=True)))


def to_packed(parts: tuple[np.ndarray, ...], device: torch.device) -> Packed:
    """Rows [B, T] -> device tensors; padding (weight 0 behind the last document) has doc -1."""
    ids, weight, doc, pos = parts
    flat = doc.reshape(-1).astype(np.int64)
    row_start = np.arange(flat.size) % doc.shape[1] == 0
    edges = np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]]) | row_start)
    if len(edges) > MAX_SEGMENTS:
        raise ValueError(f"{len(edges)} segments in a batch; MAX_SEGMENTS is {MAX_SEGMENTS}")
    cu = np.full(MAX_SEGMENTS + 1, flat.size, np.int32)
    cu[: len(edges)] = edges

    def put(x: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        t = torch.from_numpy(np.ascontiguousarray(x)).to(dtype)
        return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t

    return Packed(
        ids=put(ids.astype(np.int64), torch.int64),
        doc=put(doc.astype(np.int64), torch.int64),
        pos=put(pos.astype(np.int64), torch.int64),
        weight=put(weight, torch.float32),
        cu_seqlens=put(cu, torch.int32),
    )


class Loader:
    """Infinite iterator of Packed batches of `rows` rows."""

    def __init__(self, make: StreamFactory, *, rows: int, num_workers: int, device: torch.device):
        self.device = device
        context = mp.get_context("spawn")
        self.queues = [context.Queue(maxsize=4) for _ in range(num_workers)]
        self.processes = [
            context.Process(target=_work, args=(make, i, num_workers, rows, q), daemon=True)
            for i, q in enumerate(self.queues)
        ]
        for process in self.processes:
            process.start()
        self.turn = 0

    def __iter__(self) -> "Loader":
        return self

    def __next__(self) -> Packed:
        parts = self.queues[self.turn % len(self.queues)].get(timeout=120)
        self.turn += 1
        return to_packed(parts, self.device)

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
