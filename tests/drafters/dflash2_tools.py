"""Helpers of the DFlash2 tests: a target of two matrices, golden drafters, random drafters."""

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from twining.checkpoint.dflash2_config import parse_dflash2
from twining.checkpoint.reader import Checkpoint
from twining.drafters.base import DraftItem
from twining.drafters.dflash2.drafter import DFlash2Drafter
from twining.drafters.dflash2.load import load_dflash2


@dataclass
class State:
    slot: int
    length: int = 0


@dataclass
class Rows:
    taps: Tensor
    hidden: Tensor = field(default_factory=lambda: torch.empty(0))


@dataclass
class Target:
    embedding: Tensor
    head: Tensor

    def embed(self, ids: Tensor) -> Tensor:
        return F.embedding(ids, self.embedding)

    def logits(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.head)


def golden_checkpoint(golden: Path, tmp_path: Path) -> tuple[Checkpoint, Target]:
    """The fixture's drafter as a checkpoint folder of its own, and the fake target."""
    return checkpoint_of(golden / "dflash2", tmp_path)


def checkpoint_of(folder: Path, tmp_path: Path) -> tuple[Checkpoint, Target]:
    """The same from the fixture's own folder."""
    tensors = load_file(folder / "weights.safetensors")
    embed = tensors.pop("target.embed_tokens.weight").float()
    head = tensors.pop("target.lm_head.weight").float()
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    return Checkpoint.open(tmp_path), Target(embed, head)


def golden_drafter(golden: Path, tmp_path: Path, **options) -> DFlash2Drafter:
    """options: see drafter_of."""
    return drafter_of(golden / "dflash2", tmp_path, **options)


def drafter_of(folder: Path, tmp_path: Path, **options) -> DFlash2Drafter:
    """options: fields of DFlash2Config to replace, native_block, max_seqs, max_chunk."""
    ckpt, target = checkpoint_of(folder, tmp_path)
    settings = {"max_seqs": 3, "max_chunk": 64}
    settings |= {k: options.pop(k) for k in ("native_block", *settings) if k in options}
    config = dataclasses.replace(parse_dflash2(ckpt.config), **options)
    return DFlash2Drafter(config, load_dflash2(ckpt, config), target, **settings)


def golden_config(golden: Path) -> dict:
    return json.loads((golden / "dflash2" / "config.json").read_text())


def extend(drafter: DFlash2Drafter, state: State, taps: Tensor, start: int, end: int) -> None:
    drafter.extend(state, start, [0] * (end - start), Rows(taps[start:end]))
    state.length = end


def draft_one(drafter, state: State, anchor: int, num_draft: int) -> list[int]:
    tokens = [0] * state.length + [anchor]
    return drafter.draft([DraftItem(state, tokens, num_draft)])[0]


def block_hidden(drafter: DFlash2Drafter, state: State, anchor: int, num_draft: int) -> Tensor:
    """Normed hidden rows [B, H] of one draft pass."""
    tokens = [0] * state.length + [anchor]
    with torch.inference_mode():
        return drafter._block_pass([DraftItem(state, tokens, num_draft)], num_draft)[0]
