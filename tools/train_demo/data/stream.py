"""The packed training stream: whole documents back to back in rows of fixed length.

Kinds are chosen so that each keeps its stated share of all tokens. A row is filled by best fit over
a small buffer, so no document is ever cut; what remains is padding (<|endoftext|>, weight 0,
document -1). The stream is a pure function of its arguments: worker w of n makes its own rows.

    stream = PackedStream(seed=1, worker=0, num_workers=8, seq_len=2048, mix=DEFAULT_MIX,
                          retrieval_lengths=(200, 1900), corpus_path=Path("build/demo/corpus.bin"))
    ids, weight, doc, pos = next(stream)
"""

import os
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import numpy as np

from tools.train_demo.data.corpus import Corpus
from tools.train_demo.data.documents import Document, make_sources
from tools.train_demo.data.text import TextEncoder
from twining.demo.tasks import MAKERS

# Shares of tokens. Prompts of tool calls and retrieval are long: their share of learned tokens is
# smaller than it looks.
DEFAULT_MIX: dict[str, float] = {
    "corpus": 0.20,
    "tool_call": 0.16,
    "retrieval": 0.14,
    "json_extraction": 0.11,
    "arithmetic": 0.10,
    "python_functions": 0.08,
    "multi_turn": 0.05,
    "strings": 0.04,
    "json_records": 0.03,
    "stories": 0.03,
    "lists": 0.03,
    "chat": 0.02,
    "raw_structured": 0.01,
}
DEFAULT_CORPUS = Path("build/demo/corpus.bin")  # under the repository root
KINDS = (*MAKERS, "multi_turn", "corpus", "raw_structured", "retrieval")

# Documents start at multiples of the indexer's pool size, so that pools are whole groups of a row.
ALIGN = 4

Row = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def _aligned(length: int) -> int:
    return -(-length // ALIGN) * ALIGN


class PackedStream(Iterator[Row]):
    """Endless rows (ids int32, weight float32, doc int32, pos int32), each [seq_len].

    mix: kind -> share of tokens (scaled to 1), DEFAULT_MIX if None. retrieval_lengths: shortest and
    longest retrieval text in tokens, questions included. pos counts from 0 in every document.
    Raises ValueError for an unknown kind, shares that are not positive, or texts longer than a row.
    """

    def __init__(
        self,
        seed: int,
        worker: int,
        num_workers: int,
        seq_len: int,
        mix: Mapping[str, float] | None = None,
        retrieval_lengths: tuple[int, int] = (200, 900),
        corpus_path: Path | str = DEFAULT_CORPUS,
        *,
        buffer_docs: int = 256,
    ) -> None:
        mix = DEFAULT_MIX if mix is None else mix
        if unknown := sorted(set(mix) - set(KINDS)):
            raise ValueError(f"unknown kinds {unknown}; known: {', '.join(KINDS)}")
        if not mix or min(mix.values()) <= 0:
            raise ValueError(f"shares must be positive, got {dict(mix)}")
        low, high = retrieval_lengths
        if "retrieval" in mix and not 100 <= low <= high <= seq_len:
            raise ValueError(f"retrieval_lengths {low}..{high} must lie in 100..seq_len={seq_len}")
        # Workers are processes of their own; the tokenizer's threads would only fight over cores.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self.seq_len = seq_len
        self._rng = Random(f"{seed} {worker} {num_workers}")
        encoder = TextEncoder()
        self._pad = encoder.markers["<|endoftext|>"]
        self._sources = make_sources(
            tuple(mix), encoder, Corpus(Path(corpus_path)), seq_len, retrieval_lengths, self._rng
        )
        total = sum(mix.values())
        self._share = {kind: share / total for kind, share in mix.items()}
        self._made = dict.fromkeys(mix, 0)
        self._ready: dict[str, deque[Document]] = {kind: deque() for kind in mix}
        self._buffer_docs = buffer_docs
        self._buffer: list[Document] = []
        self.num_dropped = 0  # documents longer than a row

    def __next__(self) -> Row:
        left = self.seq_len
        row: list[Document] = []
        while left > 0:
            self._refill()
            # The oldest document first (nothing waits for ever); then the longest that fits.
            index = 0 if not row else self._best_fit(left)
            if index < 0:
                break
            doc = self._buffer.pop(index)
            row.append(doc)
            left -= _aligned(len(doc))
        # Long documents come first by construction; a shuffle takes the meaning out of it.
        self._rng.shuffle(row)
        return self._pack(row)

    def _best_fit(self, left: int) -> int:
        best, size = -1, 0
        for i, doc in enumerate(self._buffer):
            n = len(doc)
            if size < n <= left:
                best, size = i, n
        return best

    def _refill(self) -> None:
        while len(self._buffer) < self._buffer_docs:
            total = sum(self._made.values())
            kind = max(self._share, key=lambda k: self._share[k] * (total + 1) - self._made[k])
            if not self._ready[kind]:
                self._ready[kind].extend(self._sources[kind](self._rng))
            doc = self._ready[kind].popleft()
            if len(doc) > self.seq_len:
                self.num_dropped += 1
                continue
            self._made[kind] += len(doc)
            self._buffer.append(doc)

    def _pack(self, row: list[Document]) -> Row:
        ids = np.full(self.seq_len, self._pad, dtype=np.int32)
        weight = np.zeros(self.seq_len, dtype=np.float32)
        doc_id = np.full(self.seq_len, -1, dtype=np.int32)
        position = np.zeros(self.seq_len, dtype=np.int32)
        at = 0
        for i, doc in enumerate(row):
            end = at + len(doc)
            ids[at:end], weight[at:end], doc_id[at:end] = doc.ids, doc.weight, i
            position[at:end] = np.arange(len(doc))
            at = min(_aligned(end), self.seq_len)
        return ids, weight, doc_id, position
