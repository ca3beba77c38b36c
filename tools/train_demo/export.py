"""Write the trained target and drafter as ordinary checkpoints (bf16 safetensors, published tensor
names).

python -m tools.train_demo.export --out runs/demo makes runs/demo/hf (target with MTP block) and
runs/demo/hf_drafter, ready for `twining convert`.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
from torch import Tensor

from tools.train_demo.arch import Arch, DrafterArch
from twining.checkpoint.writer import write_safetensors

FP32_ENDINGS = ("A_log", "dt_bias", "_base", "_scale", "e_score_correction_bias")
TOKENIZER_DIR = Path(__file__).resolve().parents[2] / "twining" / "demo" / "model"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "generation_config.json",
)
MAX_SHARD_BYTES = 15 << 20
TEXT = "model.language_model."


def target_tensors(state: dict[str, Tensor], arch: Arch) -> dict[str, Tensor]:
    """Training names -> checkpoint names: experts split, MTP as layer `num_layers`."""
    out: dict[str, Tensor] = {}
    for name, value in state.items():
        if name.startswith("mtp."):
            name = f"layers.{arch.num_layers}." + name.removeprefix("mtp.")
        if name == "lm_head.weight":
            out[name] = value
        elif name.endswith("mlp.experts_gate_up"):
            prefix = TEXT + name.removesuffix("experts_gate_up")
            for e, both in enumerate(value):
                gate, up = both.chunk(2, 0)
                out[f"{prefix}experts.{e}.gate_proj.weight"] = gate
                out[f"{prefix}experts.{e}.up_proj.weight"] = up
        elif name.endswith("mlp.experts_down"):
            prefix = TEXT + name.removesuffix("experts_down")
            for e, down in enumerate(value):
                out[f"{prefix}experts.{e}.down_proj.weight"] = down
        else:
            out[TEXT + name] = value
    return {
        k: (v.float() if k.endswith(FP32_ENDINGS) else v.bfloat16()).contiguous().cpu()
        for k, v in out.items()
    }


def write(folder: Path, tensors: dict[str, Tensor], config: dict[str, object]) -> None:
    """An empty folder with config.json and shards."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_safetensors(folder, tensors, max_shard_bytes=MAX_SHARD_BYTES)


def export(out: Path) -> None:
    """Both checkpoints. Raises FileNotFoundError when the training has not been run."""
    arch = Arch()
    state = torch.load(out / "state.pt", map_location="cpu", weights_only=True)["model"]
    write(out / "hf", target_tensors(state, arch), arch.config())
    for name in TOKENIZER_FILES:
        shutil.copy(TOKENIZER_DIR / name, out / "hf" / name)
    drafter = torch.load(out / "drafter.pt", map_location="cpu", weights_only=True)
    tensors = {k: v.bfloat16().contiguous() for k, v in drafter.items()}
    write(out / "hf_drafter", tensors, DrafterArch().config(arch))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/demo")
    args = parser.parse_args()
    export(Path(args.out))


if __name__ == "__main__":
    main()
