"""Train the demo target.  python -m tools.train_demo.train --out runs/demo  (README.md has the
whole recipe)

Phases grow the row length (1k dense, 2k sparse, 8k sparse) under one learning-rate schedule:
warm-up, constant, linear decay over the last 40 % of the steps. Resumable: `--stop-after-s` saves
and leaves, the same command goes on. Prints a line every 50 steps and the held-out scores at the
end of each part.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer

from tools.train_demo.arch import Arch
from tools.train_demo.data.stream import DEFAULT_CORPUS, DEFAULT_MIX, PackedStream
from tools.train_demo.fla_setup import pin_kernel_configs
from tools.train_demo.loader import Loader, Row
from tools.train_demo.model import DemoModel, Moe, Packed, kda_fla, kda_loop
from tools.train_demo.optim import make_optimizers

INDEX_QUERIES = 128  # sampled queries per 1,024 tokens for the indexer's loss
MTP_WEIGHT = 0.2
BALANCE_RATE = 1e-3
Losses = dict[str, Tensor]
FIELDS = ("ids", "doc", "pos", "weight", "cu_seqlens")


@dataclass(frozen=True)
class Phase:
    """Rows of one length. retrieval: token lengths and share of the find-a-fact documents."""

    seq_len: int
    rows: int
    steps: int
    sparse: bool
    retrieval: tuple[int, int]
    retrieval_share: float = 0.14


PHASES = (
    Phase(seq_len=1024, rows=32, steps=3600, sparse=False, retrieval=(100, 900)),
    Phase(
        seq_len=2048, rows=16, steps=2400, sparse=True, retrieval=(200, 1900), retrieval_share=0.2
    ),
    Phase(
        seq_len=8192, rows=4, steps=1500, sparse=True, retrieval=(500, 8100), retrieval_share=0.35
    ),
)


def rows_of(phase: Phase, seed: int, corpus: str, worker: int, num_workers: int) -> Iterator[Row]:
    """The data stream of one worker (top level, so that it can be sent to a spawned process)."""
    mix = {**DEFAULT_MIX, "retrieval": phase.retrieval_share}
    return iter(
        PackedStream(
            seed=seed,
            worker=worker,
            num_workers=num_workers,
            seq_len=phase.seq_len,
            mix=mix,
            retrieval_lengths=phase.retrieval,
            corpus_path=corpus,
        )
    )


def weighted_ce(model: DemoModel, hidden: Tensor, labels: Tensor, weight: Tensor) -> Tensor:
    """Weighted mean cross-entropy. hidden [N, H]; bf16 product, fp32 softmax."""
    losses = F.cross_entropy(model.lm_head(hidden).float(), labels, reduction="none")
    return (losses * weight).sum() / weight.sum().clamp(min=1.0)


def targets(batch: Packed, ahead: int) -> tuple[Tensor, Tensor]:
    """Labels and weights [N] of the token `ahead` places on; 0 across a document's end."""
    ids, doc, weight = batch.ids, batch.doc, batch.weight
    label = torch.roll(ids, -ahead, 1)
    same = (torch.roll(doc, -ahead, 1) == doc) & (doc >= 0)
    same[:, -ahead:] = False
    return label.flatten(), (torch.roll(weight, -ahead, 1) * same).flatten()


def sample_queries(batch: Packed) -> Tensor:
    """[B, Q] row indices: half from answers (full weight), half from anywhere (Gumbel top-k)."""
    b, t = batch.ids.shape
    count = max(32, INDEX_QUERIES * t // 1024 // 2)
    noise = -torch.log(-torch.log(torch.rand(2, b, t, device=batch.ids.device) + 1e-20) + 1e-20)
    answers = torch.log((batch.weight >= 1.0).float() + 1e-6)
    picks = torch.cat(
        [(answers + noise[0]).topk(count, 1).indices, noise[1].topk(count, 1).indices], 1
    )
    return picks


def step_loss(model: DemoModel, batch: Packed, sparse: bool) -> Losses:
    with torch.autocast(batch.ids.device.type, torch.bfloat16):
        out = model(batch, sparse=sparse, query=sample_queries(batch))
        label, weight = targets(batch, 1)
        main = weighted_ce(model, out.hidden, label, weight)
        label, weight = targets(batch, 2)
        mtp = weighted_ce(model, out.mtp_hidden, label, weight)
    return {
        "loss": main + MTP_WEIGHT * mtp + out.index_loss,
        "main": main.detach(),
        "mtp": mtp.detach(),
        "index": out.index_loss.detach(),
    }


def rate_at(step: int, total: int) -> float:
    warm, decay = 100, 0.4
    if step < warm:
        return (step + 1) / warm
    return min(1.0, (total - step) / (decay * total))


class Run:
    """Model, optimisers and position; knows how to save and resume itself."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        torch.manual_seed(args.seed)
        cuda = self.device.type == "cuda"
        kda = kda_fla if cuda else kda_loop
        self.model = DemoModel(Arch(), kda=kda, compile_mixing=cuda).to(self.device)
        self.optimizers = make_optimizers(self.model, muon_lr=args.muon_lr, adam_lr=args.adam_lr)
        self.step, self.part = 0, 0
        self.path = Path(args.out) / "state.pt"
        if self.path.exists():
            state = torch.load(self.path, map_location=self.device, weights_only=True)
            self.model.load_state_dict(state["model"])
            for opt, saved in zip(self.optimizers, state["optimizers"], strict=True):
                opt.load_state_dict(saved)
            self.step, self.part = state["step"], state["part"] + 1

    def save(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        state = {
            "model": self.model.state_dict(),
            "optimizers": [opt.state_dict() for opt in self.optimizers],
            "step": self.step,
            "part": self.part,
        }
        torch.save(state, self.path.with_suffix(".tmp"))
        self.path.with_suffix(".tmp").replace(self.path)

    def update(self, batch: Packed, sparse: bool) -> Losses:
        """Forward, backward and optimiser step; nothing in it waits for the device."""
        for opt in self.optimizers:
            opt.zero_grad(set_to_none=True)
        losses = step_loss(self.model, batch, sparse)
        losses["loss"].backward()
        losses["norm"] = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for opt in self.optimizers:
            opt.step()
        for module in self.model.modules():
            if isinstance(module, Moe):
                module.balance(BALANCE_RATE)
        return {k: v.detach() for k, v in losses.items()}

    def set_rate(self, total: int) -> None:
        for opt in self.optimizers:
            for group in opt.param_groups:
                group["lr"].fill_(group["peak_lr"] * rate_at(self.step, total))


class Stepper:
    """Runs `update`; on CUDA the fourth call is captured as one graph and replayed from then on.

    update: forward, backward, optimiser; it must not wait for the device and always sees the
    same tensors.
    """

    WARM_STEPS = 3

    def __init__(
        self,
        update: Callable[[Packed], Losses],
        optimizers: Sequence[Optimizer],
        device: torch.device,
    ) -> None:
        self.update, self.optimizers, self.device = update, optimizers, device
        self.graph: torch.cuda.CUDAGraph | None = None
        self.batch: Packed | None = None
        self.losses: Losses = {}
        self.done = 0

    def load(self, batch: Packed) -> Packed:
        if self.batch is None:
            self.batch = Packed(*(getattr(batch, f).clone() for f in FIELDS))
        for name in FIELDS:
            getattr(self.batch, name).copy_(getattr(batch, name), non_blocking=True)
        return self.batch

    def __call__(self, batch: Packed) -> Losses:
        static = self.load(batch)
        if self.device.type != "cuda":
            self.losses = self.update(static)
        elif self.graph is None and self.done < self.WARM_STEPS:
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self.losses = self.update(static)
            torch.cuda.current_stream().wait_stream(side)
        else:
            if self.graph is None:
                self.graph = torch.cuda.CUDAGraph()
                for opt in self.optimizers:
                    opt.zero_grad(set_to_none=True)
                with torch.cuda.graph(self.graph):
                    self.losses = self.update(static)
            self.graph.replay()
        self.done += 1
        return self.losses


def train(args: argparse.Namespace) -> None:
    begun = time.monotonic()
    run = Run(args)
    phases = [replace(p, steps=max(1, round(p.steps * args.scale))) for p in PHASES]
    total, first = sum(p.steps for p in phases), 0
    print(json.dumps({"arch": asdict(Arch()), "steps": total, "at": run.step, "part": run.part}))
    for index, phase in enumerate(phases):
        last = first + phase.steps
        if run.step < last:
            seed = args.seed + 1000 * index + 100_000 * run.part
            make = partial(rows_of, phase, seed, args.corpus)
            loader = Loader(make, rows=phase.rows, num_workers=args.workers, device=run.device)
            stepper = Stepper(partial(run.update, sparse=phase.sparse), run.optimizers, run.device)
            mark, mark_step = time.monotonic(), run.step
            for batch in loader:
                run.set_rate(total)
                losses = stepper(batch)
                run.step += 1
                if run.step % 50 == 0:
                    values = {k: round(float(v), 4) for k, v in losses.items()}
                    now = time.monotonic()
                    each = (now - mark) / (run.step - mark_step) * 1e3
                    mark, mark_step = now, run.step
                    print(
                        f"step {run.step}/{total} len {phase.seq_len} {each:.0f} ms {values}",
                        flush=True,
                    )
                out_of_time = time.monotonic() - begun > args.stop_after_s
                if run.step >= last or out_of_time:
                    break
            loader.close()
            del stepper
            if time.monotonic() - begun > args.stop_after_s:
                break
        first = last
    run.save()
    print(f"saved step {run.step} of {total} after {time.monotonic() - begun:.0f} s", flush=True)
    if args.evaluate:
        from tools.train_demo.evaluate import report

        report(run.model, run.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/demo")
    parser.add_argument("--corpus", default=str(DEFAULT_CORPUS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="factor on every phase's steps")
    parser.add_argument("--stop-after-s", type=float, default=1e9)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--muon-lr", type=float, default=0.02)
    parser.add_argument("--adam-lr", type=float, default=3e-3)
    parser.add_argument("--evaluate", action=argparse.BooleanOptionalAction, default=True)
    args = parser.parse_args()
    pin_kernel_configs()
    torch.set_float32_matmul_precision("high")
    train(args)


if __name__ == "__main__":
    main()
