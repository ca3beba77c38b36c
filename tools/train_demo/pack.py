"""Quantise the exported demo checkpoints into the package data: EXL3 model and drafter, 24 MB at
most.

python -m tools.train_demo.pack --out runs/demo [--device cuda] [--install]
Routed experts take 3.5 bits, attention 6, shared and dense MLPs 4, the head 5, the MTP block 3; the
drafter takes 4 with its k and v projections left in 16 bit. Resumable like every conversion.
"""

import argparse
import json
import shutil
from pathlib import Path

from rich.progress import Progress

from twining.exl3.convert import ConvertReport, convert_model

BITS = 3.5
BITS_FOR = (
    ("*self_attn*", 6.0),
    ("*shared_experts*", 4.0),
    ("*layers.0.mlp*", 4.0),
    ("*layers.1.mlp*", 4.0),
)
HEAD_BITS, MTP_BITS, DRAFTER_BITS = 5.0, 3.0, 4.0
LIMIT_BYTES = 24_000_000
PACKAGE_DATA = Path(__file__).resolve().parents[2] / "twining" / "demo"


def convert(out: Path, device: str) -> None:
    """runs/demo/hf -> pack, hf_drafter -> pack_drafter, with report.json beside them."""
    reports: dict[str, ConvertReport] = {}
    with Progress() as progress:
        for name, source, options in (
            ("pack_drafter", "hf_drafter", {"bits": DRAFTER_BITS}),
            (
                "pack",
                "hf",
                {
                    "bits": BITS,
                    "bits_for": BITS_FOR,
                    "head_bits": HEAD_BITS,
                    "mtp_bits": MTP_BITS,
                },
            ),
        ):
            task = progress.add_task(name)

            def tick(done: int, total: int, module: str, task: object = task) -> None:
                progress.update(task, completed=done, total=total)  # type: ignore[arg-type]

            reports[name] = convert_model(
                out / source, out / name, device=device, progress=tick, **options
            )
    text = json.dumps({name: r.to_dict() for name, r in reports.items()}, indent=1)
    (out / "report.json").write_text(text + "\n")


def install(out: Path) -> None:
    """Copy the packs into the package data. Raises ValueError when they exceed the limit."""
    folders = {"pack": PACKAGE_DATA / "model", "pack_drafter": PACKAGE_DATA / "drafter"}
    size = sum(f.stat().st_size for name in folders for f in (out / name).iterdir())
    if size > LIMIT_BYTES:
        raise ValueError(f"model and drafter take {size} bytes; the limit is {LIMIT_BYTES}")
    for name, target in folders.items():
        target.mkdir(parents=True, exist_ok=True)
        for old in target.glob("*.safetensors"):
            old.unlink()
        for file in (out / name).iterdir():
            shutil.copy(file, target / file.name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/demo")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--install", action="store_true", help="copy into twining/demo")
    args = parser.parse_args()
    convert(Path(args.out), args.device)
    if args.install:
        install(Path(args.out))


if __name__ == "__main__":
    main()
