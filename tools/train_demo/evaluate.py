"""Held-out scores of the training model without generation: teacher-forced greedy exactness.

A reply whose every token is the argmax given the reference so far is what greedy decoding would
write, so for kinds with one right reply this share is a lower bound of the greedy score. Also
usable alone: python -m tools.train_demo.evaluate --out runs/demo
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random

import numpy as np
import torch
from torch import Tensor

from tools.train_demo.arch import MARKER_BASE, Arch
from tools.train_demo.data.documents import Assembler, Document
from tools.train_demo.data.render import segments
from tools.train_demo.data.stream import ALIGN
from tools.train_demo.data.text import TextEncoder
from tools.train_demo.fla_setup import pin_kernel_configs
from tools.train_demo.loader import to_packed
from tools.train_demo.model import DemoModel, kda_fla, kda_loop
from twining.demo.tasks import MAKERS, Split, retrieval

KINDS = ("arithmetic", "strings", "json_extraction", "tool_call", "python_functions")
LENGTHS = (1024, 2048, 4096, 8192)


def pack_rows(docs: Sequence[Document], seq_len: int) -> tuple[np.ndarray, ...]:
    """First fit in order; document numbers run over the whole batch. ids, weight, doc, pos [B,
    seq_len].
    """
    rows: list[list[tuple[int, Document]]] = []
    room: list[int] = []
    for number, doc in enumerate(docs):
        need = -(-len(doc) // ALIGN) * ALIGN
        at = next((i for i, left in enumerate(room) if left >= need), -1)
        if at < 0:
            rows.append([])
            room.append(seq_len)
        rows[at].append((number, doc))
        room[at] -= need
    shape = (len(rows), seq_len)
    ids, weight = np.full(shape, MARKER_BASE), np.zeros(shape, np.float32)
    doc_id, pos = np.full(shape, -1), np.zeros(shape, np.int64)
    for row, items in enumerate(rows):
        start = 0
        for number, doc in items:
            end = start + len(doc)
            ids[row, start:end], weight[row, start:end] = doc.ids, doc.weight
            doc_id[row, start:end], pos[row, start:end] = number, np.arange(len(doc))
            start += -(-len(doc) // ALIGN) * ALIGN
    return ids, weight, doc_id, pos


@torch.no_grad()
def exact_documents(model: DemoModel, docs: Sequence[Document], seq_len: int) -> list[bool]:
    """For each document: is every supervised token the argmax?"""
    device = next(model.parameters()).device
    ids, weight, doc_id, pos = pack_rows(docs, seq_len)
    right = np.ones(len(docs), bool)
    step = max(1, 16384 // seq_len)
    for at in range(0, len(ids), step):
        part = tuple(x[at : at + step] for x in (ids, weight, doc_id, pos))
        batch = to_packed(part, device)
        with torch.autocast(device.type, torch.bfloat16):
            hidden = model(batch, sparse=True, with_mtp=False).hidden
            best: Tensor = model.lm_head(hidden).argmax(-1).view(batch.ids.shape)
        wrong = (best[:, :-1] != batch.ids[:, 1:]) & (batch.weight[:, 1:] >= 1.0)
        for number in batch.doc[:, 1:][wrong].unique().tolist():
            right[number] = False
    return right.tolist()


def score_model(model: DemoModel, *, per_kind: int, per_length: int, seed: int) -> dict[str, float]:
    """Shares by kind and effort, and retrieval by length."""
    assembler = Assembler(TextEncoder())
    result: dict[str, float] = {}
    for kind in KINDS:
        for effort in ("low", "high"):
            rng = Random(f"{seed} {kind} {effort}")
            examples = [MAKERS[kind](rng, Split.HELDOUT, effort) for _ in range(per_kind)]
            docs = assembler.documents(kind, [segments(e) for e in examples])
            right = exact_documents(model, docs, 2048)
            result[f"{kind}/{effort}"] = round(sum(right) / len(right), 4)
    for length in LENGTHS:
        rng = Random(f"{seed} retrieval {length}")
        examples = [
            retrieval.make(rng, Split.HELDOUT, "low", length, assembler.encoder.count)
            for _ in range(per_length)
        ]
        docs = assembler.documents("retrieval", [segments(e) for e in examples])
        right = exact_documents(model, docs, 8704 if length > 4096 else 4608)
        result[f"retrieval/{length}"] = round(sum(right) / len(right), 4)
    return result


def eager_twin(model: DemoModel, device: torch.device) -> DemoModel:
    """The same weights without compiled parts, so that any row length runs."""
    kda = kda_fla if device.type == "cuda" else kda_loop
    twin = DemoModel(Arch(), kda=kda, compile_mixing=False).to(device)
    twin.load_state_dict(model.state_dict())
    return twin.eval()


def report(model: DemoModel, device: torch.device) -> None:
    """Print the scores as one JSON line."""
    twin = eager_twin(model, device)
    print(json.dumps(score_model(twin, per_kind=100, per_length=16, seed=7)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", default="runs/demo")
    args = parser.parse_args()
    pin_kernel_configs()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = DemoModel(Arch(), kda=kda_loop, compile_mixing=False)
    state = torch.load(Path(args.out) / "state.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    report(model.to(device), device)


if __name__ == "__main__":
    main()
