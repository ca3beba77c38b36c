"""The MTP block against its fixtures: rows, logits, selections, chained drafts."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from twining.checkpoint.hf_config import parse_glm5_next
from twining.checkpoint.reader import Checkpoint
from twining.kernels.norm.reference import rms_norm
from twining.models.glm5_next.batch import RowBatch, Segment
from twining.models.glm5_next.model import Glm5Next

# Row 0 of `keep` is left out after the router: two of its experts are 3e-5 apart (report.json).
LOGITS = 2e-4
BLOCK = 3e-4


@pytest.fixture(scope="module")
def model(golden: Path) -> Glm5Next:
    ckpt = Checkpoint.open(golden / "glm5_next" / "tiny")
    return Glm5Next.load(ckpt, parse_glm5_next(ckpt.config))


@pytest.fixture(scope="module")
def want(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "glm5_next" / "mtp.safetensors")


@pytest.fixture(scope="module")
def text(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "glm5_next" / "text.safetensors")


def close(got: Tensor, expected: Tensor, limit: float) -> None:
    assert got.shape == expected.shape
    assert (got - expected).abs().max().item() <= limit


def fresh(model: Glm5Next):
    pool = model.make_pool(num_pages=2, max_seqs=2, max_draft=3)
    state = pool.open()
    assert pool.reserve(state, 120)
    return state


def test_rows_and_logits(model, want, text):
    ids = text["input_ids"][0].tolist()
    rows = model.mtp.rows(fresh(model), ids[1:], text["final_norm"][:-1], 0)
    close(rows[1:], want["keep.head_norm"][1:], BLOCK)
    close(model.logits(rows)[1:], want["keep.logits"][1:], LOGITS)


def test_rows_do_not_depend_on_the_split(model, want, text):
    ids = text["input_ids"][0].tolist()
    state = fresh(model)
    parts, start = [], 0
    for size in (3, 1, 30, 16, 5, 48):
        span = slice(start, start + size)
        parts.append(model.mtp.rows(state, ids[1:][span], text["final_norm"][:-1][span], start))
        start += size
    assert start == len(ids) - 1
    close(torch.cat(parts)[1:], want["keep.head_norm"][1:], BLOCK)


@torch.inference_mode()
def test_stages_and_selection(model, want, text):
    ids, mtp = text["input_ids"][0].tolist(), model.mtp
    state = fresh(model)
    listed = []
    for start in range(0, 103, 64):
        n = min(64, 103 - start)
        batch = RowBatch(state.pool, [Segment(state, 0, n, start)], block=64, commits=True)
        embeds = model.embed(ids[start + 1 : start + 1 + n])
        eh = mtp.combine(batch, embeds, text["final_norm"][start : start + n])
        close(eh[:n], want["keep.eh"][start : start + n], BLOCK)
        y = eh + mtp.mixer.forward(batch, rms_norm(eh, mtp.mixer_norm, mtp.eps))
        close(y[:n], want["keep.attn_residual"][start : start + n], BLOCK)
        z = y + mtp.mlp.forward(batch, rms_norm(y, mtp.mlp_norm, mtp.eps))
        first = int(start == 0)
        close(z[first:n], want["keep.block_out"][start + first : start + n], BLOCK)
        listed += batch.selection.rows[:n].tolist()
    zero_row, offset = state.pool.stages[0].latent.zero_row, state.pages[0] * 256
    for row, expected in zip(listed, want["keep.selected"].tolist(), strict=True):
        assert {r - offset for r in row if r != zero_row} == set(expected) - {-1}


def test_zeroed_first_embedding(model, want, text):
    """The other public form of row 0, fed through the same block."""
    ids, mtp = text["input_ids"][0].tolist(), model.mtp
    state = fresh(model)
    parts = []
    for start in range(0, 103, 64):
        n = min(64, 103 - start)
        batch = RowBatch(state.pool, [Segment(state, 0, n, start)], block=64, commits=True)
        embeds = model.embed(ids[start + 1 : start + 1 + n]).clone()
        if start == 0:
            embeds[0] = 0
        parts.append(mtp._forward(batch, embeds, text["final_norm"][start : start + n]))
    rows = torch.cat(parts)
    close(rows, want["zero0.head_norm"], BLOCK)
    close(model.logits(rows[-8:]), want["zero0.logits"], LOGITS)


@pytest.mark.parametrize("detour", [False, True])
def test_chained_drafts_and_rollback(model, want, text, detour):
    """Greedy chain after the prompt; with a detour, rejected drafts were written there before."""
    ids, mtp = text["input_ids"][0].tolist(), model.mtp
    state = fresh(model)
    rows = mtp.rows(state, ids[1:], text["final_norm"][:-1], 0)
    if detour:
        h = rows[-1:]
        for i, token in enumerate((7, 300, 41)):
            h = mtp.rows(state, [token], h, 103 + i)
        # Rows of the last accepted tokens are recomputed from the trunk's states.
        rows = mtp.rows(state, ids[100:], text["final_norm"][99:-1], 99)
    h = rows[-1:]
    tokens, logits = [], []
    token = int(model.logits(h).argmax())
    for i in range(3):
        tokens.append(token)
        h = mtp.rows(state, [token], h, 103 + i)
        logits.append(model.logits(h))
        token = int(logits[-1].argmax())
    assert tokens == want["keep.chain_tokens"].tolist()
    close(torch.cat(logits), want["keep.chain_logits"], LOGITS)
