"""The training model computes what the engine computes: same weights, same logits, taps and drafts.

float32 on both sides; prompts longer than the sparse budget, so that the indexer's choice counts.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tools.train_demo.arch import Arch
from tools.train_demo.export import target_tensors, write
from tools.train_demo.loader import to_packed
from tools.train_demo.model import DemoModel, Output, kda_loop
from twining.checkpoint.hf_config import parse_glm5_next
from twining.checkpoint.reader import Checkpoint
from twining.models.glm5_next.model import Glm5Next

# Small and odd: a budget of 4 pools makes 90 tokens truly sparse.
SMALL = replace(
    Arch(),
    hidden_size=64,
    layer_kinds="KMKM",
    num_dense=1,
    intermediate_size=96,
    moe_intermediate_size=32,
    num_experts=4,
    kda_heads=2,
    kda_head_dim=32,
    num_heads=2,
    qk_head_dim=32,
    v_head_dim=32,
    q_lora_rank=32,
    kv_lora_rank=32,
    index_heads=16,  # few heads tie at zero, and ties may be broken either way
    index_head_dim=32,
    index_topk=16,
)
TAPS = (0, 2)


@pytest.fixture(scope="module")
def trained() -> DemoModel:
    torch.manual_seed(3)
    model = DemoModel(SMALL, kda=kda_loop, compile_mixing=False).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "index_kpool_compress_ape" in name or "hc_" in name:
                p.add_(0.3 * torch.randn_like(p))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.1 * torch.randn_like(buffer))
        # The checkpoint holds bf16: start from values that survive the trip.
        for name, p in model.named_parameters():
            if not name.endswith(("A_log", "dt_bias", "_base", "_scale")):
                p.copy_(p.bfloat16().float())
    return model


@pytest.fixture(scope="module")
def engine_model(trained: DemoModel, tmp_path_factory: pytest.TempPathFactory) -> Glm5Next:
    folder: Path = tmp_path_factory.mktemp("demo") / "hf"
    write(folder, target_tensors(trained.state_dict(), SMALL), SMALL.config())
    ckpt = Checkpoint.open(folder)
    return Glm5Next.load(ckpt, parse_glm5_next(ckpt.config), tap_layers=TAPS)


def packed_run(model: DemoModel, lengths: tuple[int, ...], ids: np.ndarray) -> Output:
    """One row with documents of the given lengths, each at a multiple of 4."""
    doc, pos = np.full((1, len(ids)), -1), np.zeros((1, len(ids)), np.int64)
    at = 0
    for number, length in enumerate(lengths):
        doc[0, at : at + length], pos[0, at : at + length] = number, np.arange(length)
        at += -(-length // 4) * 4
    parts = (ids[None], np.ones((1, len(ids)), np.float32), doc, pos)
    with torch.no_grad():
        return model(to_packed(parts, torch.device("cpu")), sparse=True, taps=TAPS)


def test_logits_and_taps_match_the_engine(trained: DemoModel, engine_model: Glm5Next) -> None:
    rng = np.random.default_rng(11)
    lengths = (90, 31)
    ids = rng.integers(0, SMALL.vocab_size, 92 + 32)
    out = packed_run(trained, lengths, ids)
    at = 0
    for length in lengths:
        pool = engine_model.make_pool(num_pages=1, max_seqs=1, max_draft=3, latent_format="fp32")
        state = pool.open()
        assert state is not None and pool.reserve(state, length)
        rows = engine_model.prefill(state, ids[at : at + length].tolist())
        want = out.hidden[at : at + length]
        assert (rows.hidden - want).abs().max() < 2e-4
        assert rows.taps is not None and out.taps is not None
        assert (rows.taps - out.taps[at : at + length]).abs().max() < 5e-4
        logits = engine_model.logits(rows.hidden)
        assert (logits - want @ trained.lm_head.weight.t()).abs().max() < 5e-4
        at += -(-length // 4) * 4


def test_mtp_rows_match_the_engine(trained: DemoModel, engine_model: Glm5Next) -> None:
    ids = np.random.default_rng(12).integers(0, SMALL.vocab_size, 72)
    out = packed_run(trained, (72,), ids)
    pool = engine_model.make_pool(num_pages=1, max_seqs=1, max_draft=3, latent_format="fp32")
    state = pool.open()
    assert state is not None and pool.reserve(state, 72)
    rows = engine_model.prefill(state, ids.tolist())
    assert engine_model.mtp is not None
    mtp = engine_model.mtp.rows(state, ids[1:].tolist(), rows.hidden[:-1], 0)
    assert out.mtp_hidden is not None
    assert (mtp - out.mtp_hidden[:71]).abs().max() < 5e-4
