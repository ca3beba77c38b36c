"""The whole recipe: corpus, target, drafter, export, EXL3 package data.

python -m tools.train_demo --out runs/demo         (one CUDA GPU; about 20 minutes on an H200)
Every part can be run alone and resumes where it was; see README.md beside this file.
"""

import argparse
import subprocess
import sys
from pathlib import Path

from tools.train_demo.data.corpus import build_corpus
from tools.train_demo.data.stream import DEFAULT_CORPUS


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/demo")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    if not DEFAULT_CORPUS.exists():
        DEFAULT_CORPUS.parent.mkdir(parents=True, exist_ok=True)
        build_corpus(DEFAULT_CORPUS)
    common = ["--out", args.out]
    seeded = [*common, "--seed", str(args.seed)]
    parts = (
        ("train", seeded),
        ("drafter", seeded),
        ("export", common),
        ("pack", [*common, "--device", "cuda", "--install"]),
    )
    for part, options in parts:
        # A process each: every part starts from files alone, as it does when run by hand.
        done = subprocess.run(
            [sys.executable, "-m", f"tools.train_demo.{part}", *options],
            cwd=Path(__file__).resolve().parents[2],
            check=False,
        )
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
