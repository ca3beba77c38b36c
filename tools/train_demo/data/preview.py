"""Show samples of every kind and measure the stream.

Run: python -m tools.train_demo.data.preview [--corpus PATH] [--samples N] [--seconds S] [--seq-len
T] Builds the corpus first when PATH does not exist.
"""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tools.train_demo.data.corpus import build_corpus
from tools.train_demo.data.stream import DEFAULT_MIX, PackedStream
from tools.train_demo.data.text import TextEncoder


def show_samples(corpus: Path, count: int, seq_len: int) -> None:
    """Print `count` documents per kind; text between angle quotes carries full loss."""
    encoder = TextEncoder()
    for kind in DEFAULT_MIX:
        stream = PackedStream(7, 0, 1, seq_len, {kind: 1.0}, (200, min(600, seq_len)), corpus)
        ids, weight, doc, _ = next(stream)
        for i in range(min(count, int(doc.max()) + 1)):
            own = np.flatnonzero(doc == i)
            cut = np.flatnonzero(np.diff(weight[own] == 1.0)) + 1
            runs = np.split(own, cut)
            text = "".join(
                f"\u00ab{encoder.decode(ids[r])}\u00bb"
                if weight[r[0]] == 1.0
                else encoder.decode(ids[r])
                for r in runs
            )
            print(f"--- {kind}, {len(own)} tokens\n{text}\n")


def measure(corpus: Path, seconds: float, seq_len: int) -> None:
    """Print tokens per second of one worker and the share of padding and of learned tokens."""
    stream = PackedStream(1, 0, 1, seq_len, DEFAULT_MIX, (200, seq_len - 100), corpus)
    next(stream)
    begin = time.perf_counter()
    rows = padding = learned = 0
    while time.perf_counter() - begin < seconds:
        _, weight, doc, _ = next(stream)
        rows += 1
        padding += int((doc < 0).sum())
        learned += int((weight == 1.0).sum())
    total = rows * seq_len
    rate = total / (time.perf_counter() - begin)
    print(
        f"seq_len {seq_len}: {rate:,.0f} tokens/s per worker, padding {padding / total:.2%},"
        f" full loss on {learned / total:.1%}, dropped {stream.num_dropped}"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description="samples and throughput of the training stream")
    parser.add_argument("--corpus", type=Path, default=Path("build/demo/corpus.bin"))
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--seq-len", type=int, default=2048)
    args = parser.parse_args(argv)
    if not args.corpus.exists():
        print(build_corpus(args.corpus))
    show_samples(args.corpus, args.samples, args.seq_len)
    measure(args.corpus, args.seconds, args.seq_len)


if __name__ == "__main__":
    main()
