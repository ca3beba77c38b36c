"""Training losses and gradients against golden/dflash2/train.safetensors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tools.train_demo.dflash2_loss import (
    AnchorBatch,
    Drafter,
    LossConfig,
    Teacher,
    drafter_losses,
)
from twining.checkpoint.dflash2_config import parse_dflash2
from twining.drafters.dflash2.model import rms_norm


@pytest.fixture
def fixture(dflash2_train: Path):
    folder = dflash2_train
    config = parse_dflash2(json.loads((folder / "config.json").read_text()))
    weights = {k: v.float() for k, v in load_file(folder / "weights.safetensors").items()}
    embed, head = weights.pop("target.embed_tokens.weight"), weights.pop("target.lm_head.weight")
    drafter = Drafter(config)
    drafter.load_state_dict(weights)
    want = load_file(folder / "train.safetensors")
    batch = AnchorBatch(
        taps=want["taps"][None],
        input_ids=want["input_ids"][None],
        document_ids=want["document_ids"][None],
        position_ids=want["position_ids"][None],
        loss_mask=want["loss_mask"][None],
        anchors=want["anchors"][None],
        anchor_valid=want["anchor_valid"][None].bool(),
    )
    hidden = rms_norm(
        want["verifier_last_hidden"], want["verifier_norm_weight"], config.rms_norm_eps
    )[None]
    return drafter, batch, Teacher(hidden=hidden, embed=embed, head=head), want


def evaluate(fixture, missing: str):
    drafter, batch, teacher, want = fixture
    # Weights fall as exp(-distance / gamma) from the first drafted row on.
    ratio = want["position_weight"][2] / want["position_weight"][1]
    loss = LossConfig(
        unary="ce", missing=missing, window="trainer", same_document=False,
        gamma=-1 / float(ratio.log()),
    )  # fmt: skip
    return drafter_losses(drafter, batch, teacher, loss)


def test_rows_and_losses(fixture):
    want = fixture[3]
    out = evaluate(fixture, "inject")
    close = {"rtol": 0, "atol": 2e-4}
    valid = want["anchor_valid"].bool()
    torch.testing.assert_close(out.hidden[0][valid], want["block_hidden"][valid], **close)
    seen = want["supervised_mask"][:, 1:].bool()
    assert torch.equal(out.supervised[0].bool(), seen)
    assert torch.equal(out.labels[0][seen], want["labels"][:, 1:][seen])
    torch.testing.assert_close(
        out.unary_rows[0][seen], want["ce_per_position"][:, 1:][seen], **close
    )
    assert torch.equal(out.contains_label[0][seen], want["contains_target"][:, 1:].bool()[seen])
    assert torch.equal(out.target_slot[0][seen], want["target_slot"][:, 1:][seen])
    assert torch.equal(
        out.candidates[0][seen].sort(-1).values,
        want["train_candidates"][:, 1:][seen].sort(-1).values,
    )
    torch.testing.assert_close(
        out.selector_rows[0][seen], want["selector_ce_per_position"][:, 1:][seen], **close
    )
    torch.testing.assert_close(out.unary, want["unary_loss"][0], **close)
    torch.testing.assert_close(out.selector, want["selector_loss_inject"][0], **close)


def test_selector_loss_on_hits_only(fixture):
    out = evaluate(fixture, "hits_only")
    torch.testing.assert_close(
        out.selector, fixture[3]["selector_loss_hits_only"][0], rtol=0, atol=2e-4
    )


def test_gradients(fixture):
    drafter, _, _, want = fixture
    drafter.zero_grad()
    evaluate(fixture, "inject").total.backward()
    grads = {name: p.grad for name, p in drafter.named_parameters()}
    checked = 0
    for key, value in want.items():
        if key.startswith("grad_norm."):
            norm = grads[key.removeprefix("grad_norm.")].norm()
            torch.testing.assert_close(norm, value[0], rtol=2e-3, atol=1e-5)
            checked += 1
        elif key.startswith("grad."):
            torch.testing.assert_close(
                grads[key.removeprefix("grad.")], value, rtol=2e-3, atol=2e-4
            )
            checked += 1
    assert checked
