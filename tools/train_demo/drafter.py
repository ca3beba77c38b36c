"""Train the demo's DFlash2 drafter on the frozen target (spec/dflash2.md G).

python -m tools.train_demo.drafter --out runs/demo      (after tools.train_demo.train) Taps and
teacher come from the target's forward over the same kind of packed rows the target was trained on;
KL to the target's distribution, selector on hits only. Prints the acceptance length by loss step
and at the end.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.optim import AdamW

from tools.train_demo.arch import Arch, DrafterArch
from tools.train_demo.data.stream import DEFAULT_CORPUS
from tools.train_demo.dflash2_loss import (
    AnchorBatch,
    Drafter,
    LossConfig,
    LossOutput,
    Teacher,
    acceptance_length,
    drafter_losses,
    sample_anchors,
)
from tools.train_demo.fla_setup import pin_kernel_configs
from tools.train_demo.loader import Loader
from tools.train_demo.model import DemoModel, Packed, kda_fla, kda_loop
from tools.train_demo.train import Losses, Phase, Stepper, rows_of
from twining.checkpoint.dflash2_config import parse_dflash2

PHASE = Phase(seq_len=1024, rows=32, steps=2500, sparse=True, retrieval=(100, 900))
ANCHORS = 64  # per row
WARM_STEPS, DECAY = 100, 0.5


def load_target(path: Path, device: torch.device) -> DemoModel:
    """The trained target in evaluation mode, mixing compiled on CUDA."""
    cuda = device.type == "cuda"
    model = DemoModel(Arch(), kda=kda_fla if cuda else kda_loop, compile_mixing=cuda)
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True)["model"])
    return model.to(device).eval().requires_grad_(False)


class DrafterRun:
    """Drafter, optimiser and the update that a Stepper repeats."""

    def __init__(self, target: DemoModel, device: torch.device, lr: float, seed: int) -> None:
        torch.manual_seed(seed)
        self.arch = DrafterArch()
        self.target, self.device, self.lr = target, device, lr
        self.drafter = Drafter(parse_dflash2(self.arch.config(target.arch))).to(device)
        cuda = device.type == "cuda"
        self.rate = torch.tensor(lr, device=device)
        self.optimizer = AdamW(
            self.drafter.parameters(),
            lr=self.rate,
            betas=(0.9, 0.95),
            weight_decay=0.0,
            fused=cuda,
            capturable=cuda,
        )
        cuda_generators = torch.cuda.default_generators if cuda else ()
        self.generator = cuda_generators[0] if cuda else torch.default_generator

    def losses(self, batch: Packed) -> tuple[LossOutput, Tensor]:
        """Loss of one batch and its acceptance length against the text itself."""
        with torch.autocast(self.device.type, torch.bfloat16):
            with torch.no_grad():
                out = self.target(batch, sparse=True, with_mtp=False, taps=self.arch.taps)
            b, t = batch.ids.shape
            mask = (batch.weight >= 1.0).long()
            anchors, valid = sample_anchors(
                mask, batch.doc, self.arch.block, ANCHORS, self.generator
            )
            anchor_batch = AnchorBatch(
                taps=out.taps.view(b, t, -1),
                input_ids=batch.ids,
                document_ids=batch.doc,
                position_ids=batch.pos,
                loss_mask=mask,
                anchors=anchors,
                anchor_valid=valid,
            )
            teacher = Teacher(
                hidden=out.hidden.view(b, t, -1),
                embed=self.target.embed_tokens.weight,
                head=self.target.lm_head.weight,
            )
            result = drafter_losses(self.drafter, anchor_batch, teacher, LossConfig())
        wanted = anchors[..., None] + torch.arange(1, self.arch.block, device=anchors.device)
        text = batch.ids.gather(1, wanted.clamp(max=t - 1).view(b, -1)).view(wanted.shape)
        return result, acceptance_length(result.path, text, result.supervised)

    def update(self, batch: Packed) -> Losses:
        self.optimizer.zero_grad(set_to_none=True)
        out, length = self.losses(batch)
        out.total.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), 1.0)
        self.optimizer.step()
        parts = {"unary": out.unary, "selector": out.selector, "length": length, "norm": norm}
        return {k: v.detach().float() for k, v in parts.items()}

    def set_rate(self, step: int, total: int) -> None:
        warm = min(1.0, (step + 1) / WARM_STEPS)
        self.rate.fill_(self.lr * min(warm, (total - step) / (DECAY * total)))


def train(args: argparse.Namespace) -> None:
    begun = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    out = Path(args.out)
    run = DrafterRun(load_target(out / "state.pt", device), device, args.lr, args.seed)
    total = max(1, round(PHASE.steps * args.scale))
    make = partial(rows_of, PHASE, args.seed + 777, args.corpus)
    loader = Loader(make, rows=PHASE.rows, num_workers=args.workers, device=device)
    stepper = Stepper(run.update, [run.optimizer], device)
    mean_length = 0.0
    for step, batch in enumerate(loader):
        run.set_rate(step, total)
        losses = stepper(batch)
        if step % 100 == 99:
            mean_length = float(losses["length"])
            values = {k: round(float(v), 4) for k, v in losses.items()}
            each = (time.monotonic() - begun) / (step + 1) * 1e3
            print(f"drafter step {step + 1}/{total} {each:.0f} ms on average {values}", flush=True)
        if step + 1 >= total:
            break
    loader.close()
    torch.save(run.drafter.state_dict(), out / "drafter.pt")
    print(f"drafter saved, acceptance length on text {mean_length:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/demo")
    parser.add_argument("--corpus", default=str(DEFAULT_CORPUS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the number of steps")
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--lr", type=float, default=2e-3)
    args = parser.parse_args()
    pin_kernel_configs()
    torch.set_float32_matmul_precision("high")
    train(args)


if __name__ == "__main__":
    main()
