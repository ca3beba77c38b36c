"""The text model against its fixtures: every recorded tensor, decode, chunks, greedy, images."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from twining.cache.pool import SequenceState
from twining.checkpoint.hf_config import parse_glm5_next
from twining.checkpoint.reader import Checkpoint
from twining.kernels.mhc.reference import mhc_post, mhc_pre
from twining.kernels.norm.reference import rms_norm
from twining.kernels.row_linear.reference import pad_rows
from twining.models.glm5_next.batch import PrefillBlock
from twining.models.glm5_next.model import Glm5Next
from twining.models.glm5_next.vision import (
    VisionTower,
    insert_embeddings,
    placeholder_positions,
    vision_embeddings,
)

BLOCK = 3e-4  # block inputs and outputs, streams, states
LOGITS = 2e-4
POOL = {"num_pages": 3, "max_seqs": 2, "max_draft": 7}


def load_model(golden: Path, name: str) -> Glm5Next:
    ckpt = Checkpoint.open(golden / "glm5_next" / name)
    return Glm5Next.load(ckpt, parse_glm5_next(ckpt.config))


@pytest.fixture(scope="module")
def tiny(golden: Path) -> Glm5Next:
    return load_model(golden, "tiny")


@pytest.fixture(scope="module")
def shared(golden: Path) -> Glm5Next:
    return load_model(golden, "tiny_shared_indexer")


@pytest.fixture(scope="module")
def text(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "glm5_next" / "text.safetensors")


def fresh(model: Glm5Next, num_tokens: int) -> SequenceState:
    pool = model.make_pool(**POOL)
    state = pool.open()
    assert state is not None and pool.reserve(state, num_tokens)
    return state


def close(got: Tensor, want: Tensor, limit: float) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max().item() <= limit


@torch.inference_mode()
def trace(model: Glm5Next, ids: list[int]) -> tuple[SequenceState, dict[str, Tensor]]:
    """Run the prompt block by block and layer by layer, keeping what the fixtures record."""
    state = fresh(model, len(ids))
    parts: dict[str, list[Tensor]] = {}

    def keep(name: str, value: Tensor, count: int) -> None:
        parts.setdefault(name, []).append(value[:count].clone())

    for start in range(0, len(ids), 64):
        block_ids = ids[start : start + 64]
        n = len(block_ids)
        batch = PrefillBlock(state, n)
        x = pad_rows(model.embed(block_ids), 64)
        streams = x.unsqueeze(1).repeat(1, model.config.hc_mult, 1)
        for i, layer in enumerate(model.layers):
            keep(f"stream{i}", streams, n)
            post, comb, hidden = mhc_pre(streams, layer.mixer_hyper, block=64)
            keep(f"layer{i}.attn_post", post, n)
            keep(f"layer{i}.attn_comb", comb, n)
            keep(f"layer{i}.attn_collapsed", hidden, n)
            hidden = rms_norm(hidden, layer.mixer_norm, layer.eps)
            keep(f"layer{i}.attn_in", hidden, n)
            out = layer.mixer.forward(batch, hidden)
            keep(f"layer{i}.attn_out", out, n)
            if batch.selection is not None:
                keep(f"layer{i}.rows", batch.selection.rows, n)
            streams = mhc_post(streams, out, post, comb)
            post, comb, hidden = mhc_pre(streams, layer.mlp_hyper, block=64)
            keep(f"layer{i}.ffn_post", post, n)
            keep(f"layer{i}.ffn_comb", comb, n)
            keep(f"layer{i}.ffn_collapsed", hidden, n)
            hidden = rms_norm(hidden, layer.mlp_norm, layer.eps)
            keep(f"layer{i}.mlp_in", hidden, n)
            out = layer.mlp.forward(batch, hidden)
            keep(f"layer{i}.mlp_out", out, n)
            if model.config.mlp_types[i] == "sparse":
                route_ids, weights = layer.mlp.route(batch, hidden)
                order = route_ids.sort(dim=-1)
                keep(f"layer{i}.route_ids", order.values, n)
                keep(f"layer{i}.route_weights", weights.gather(1, order.indices), n)
            streams = mhc_post(streams, out, post, comb)
        keep(f"stream{len(model.layers)}", streams, n)
        state.length += n
    return state, {name: torch.cat(part) for name, part in parts.items()}


@pytest.fixture(scope="module")
def traced(tiny, text):
    return trace(tiny, text["input_ids"][0].tolist())


def test_logits_and_final_norm(tiny, text):
    ids = text["input_ids"][0].tolist()
    rows = tiny.prefill(fresh(tiny, len(ids)), ids)
    close(rows.hidden, text["final_norm"], BLOCK)
    close(tiny.logits(rows.hidden), text["logits"], LOGITS)


def test_streams(traced, text):
    tokens = text["streams.tokens"].long()
    for i in range(9):
        close(traced[1][f"stream{i}"][tokens], text["streams"][i], BLOCK)


def test_taps_are_stream_means_after_the_layer(golden, traced, text):
    ckpt = Checkpoint.open(golden / "glm5_next" / "tiny")
    model = Glm5Next.load(ckpt, parse_glm5_next(ckpt.config), tap_layers=(6, 0, 3))
    ids = text["input_ids"][0].tolist()
    taps = model.prefill(fresh(model, len(ids)), ids).taps
    assert taps is not None
    want = torch.cat([traced[1][f"stream{i + 1}"].mean(1) for i in (6, 0, 3)], 1)
    close(taps, want, 0.0)


def test_block_inputs_and_outputs(traced, text):
    checked = 0
    for name, want in text.items():
        kind = name.rpartition(".")[2]
        if kind in ("attn_in", "attn_out", "mlp_in", "mlp_out", "attn_collapsed", "ffn_collapsed",
                    "attn_post", "attn_comb", "ffn_post", "ffn_comb"):  # fmt: skip
            close(traced[1][name], want, BLOCK)
            checked += 1
    assert checked == 18


def test_routing(traced, text):
    for i in range(3, 8):
        assert torch.equal(traced[1][f"layer{i}.route_ids"], text[f"layer{i}.route_ids"].long())
        close(traced[1][f"layer{i}.route_weights"], text[f"layer{i}.route_weights"], 1e-4)


@pytest.mark.parametrize(("layer", "plane"), [(3, 0), (7, 1)])
def test_indexer(tiny, traced, text, layer, plane):
    state, got = traced
    keys = state.pool.stages[0].index.read_pages(plane, torch.tensor(state.pages))[0, :26]
    close(keys, text[f"layer{layer}.index_pool_keys"], BLOCK)
    want = [set(row.tolist()) - {-1} for row in text[f"layer{layer}.topk"]]
    zero_row = state.pool.stages[0].latent.zero_row
    offset = state.pages[0] * 256
    for row, expected in zip(got[f"layer{layer}.rows"], want, strict=True):
        listed = [r - offset for r in row.tolist() if r != zero_row]
        assert listed == sorted(listed)
        assert set(listed) == expected


@pytest.mark.parametrize(("layer", "plane"), [(3, 0), (7, 1)])
@torch.inference_mode()
def test_index_rows_and_scores_from_recorded_inputs(tiny, text, layer, plane):
    """Raw keys and gates, and the scores of every visible pool, given the layer's own input."""
    mixer = tiny.layers[layer].mixer
    x = text[f"layer{layer}.attn_in"]
    state = fresh(tiny, len(x))
    packed, scores = text[f"layer{layer}.index_packed"], text[f"layer{layer}.index_scores"]
    for start in range(0, len(x), 64):
        n = min(64, len(x) - start)
        batch = PrefillBlock(state, n)
        rows = pad_rows(x[start : start + n], 64)
        proj = rows @ mixer.in_proj.t()
        r = rms_norm(proj[:, : mixer.rank], mixer.q_norm, mixer.eps)
        query = (r @ mixer.q_proj.t())[:, mixer.heads * mixer.key_dim :]
        index = mixer.indexer.rows(proj[:, mixer.rank + mixer.latent_dim :], query)
        mixer.indexer.positions(batch, index, mixer.width)
        close(index.raw[:n], packed[start : start + n, :64], 1e-4)
        got = mixer.indexer.scores(batch, index, batch.segment)[:n]
        want = scores[start : start + n]
        seen = want > float("-inf")
        close(got[:, :26][seen[:, : got.shape[1]]], want[seen], 1e-4)
        state.length += n


def run_decode(model: Glm5Next, ids: list[int], prompt: int) -> tuple[SequenceState, Tensor]:
    state = fresh(model, len(ids))
    logits = [model.logits(model.prefill(state, ids[:prompt]).hidden[-1:])]
    for token in ids[prompt:]:
        logits.append(model.logits(model.verify([(state, [token])]).hidden))
        model.commit(state, 1)
    return state, torch.cat(logits)


def test_decode_and_states(tiny, text):
    ids = text["input_ids"][0].tolist()
    state, logits = run_decode(tiny, ids, len(ids) - 24)
    close(logits, text["decode.logits"], LOGITS)
    planes = state.pool.snapshot(state)
    for plane, layer in enumerate((0, 1, 2, 4, 5, 6)):
        close(planes["kda_state"][plane], text[f"state.layer{layer}.recurrent"], BLOCK)
        ring = planes["kda_conv"][plane]
        last = ring[torch.arange(len(ids) - 3, len(ids)) % len(ring)]
        close(last.t(), text[f"state.layer{layer}.conv"][:, 1:], BLOCK)
    rows = state.pool.rows(state, 0, len(ids))
    for plane, layer in enumerate((3, 7)):
        close(
            state.pool.stages[0].latent.read(plane, rows), text[f"state.layer{layer}.latent"], BLOCK
        )


@pytest.mark.parametrize("name", ["chunks_a", "chunks_b"])
def test_chunks_at_any_boundary(tiny, text, name):
    ids = text["input_ids"][0].tolist()
    bounds = text[f"{name}.bounds"].tolist()
    edges = sorted({0, *bounds, len(ids)})
    state = fresh(tiny, len(ids))
    logits = []
    for a, b in pairwise(edges):
        for start in range(a, b, 64):
            rows = tiny.prefill_block(state, ids[start : min(b, start + 64)])
            logits.append(tiny.logits(rows.hidden))
    close(torch.cat(logits), text[f"{name}.logits"], LOGITS)


def test_greedy(tiny, text):
    prompt = text["input_ids"][0, : int(text["greedy.prompt_len"])].tolist()
    want = text["greedy.tokens"].tolist()
    state = fresh(tiny, len(prompt) + len(want))
    got = [int(tiny.logits(tiny.prefill(state, prompt).hidden[-1:]).argmax())]
    while len(got) < len(want):
        rows = tiny.verify([(state, got[-1:])])
        tiny.commit(state, 1)
        got.append(int(tiny.logits(rows.hidden).argmax()))
    assert got == want


def test_shared_indexer(golden, shared):
    want = load_file(golden / "glm5_next" / "shared_indexer.safetensors")
    ids = want["input_ids"][0].tolist()
    state, got = trace(shared, ids)
    for i in (1, 2, 3):
        close(got[f"layer{i}.attn_in"], want[f"layer{i}.attn_in"], BLOCK)
        close(got[f"layer{i}.attn_out"], want[f"layer{i}.attn_out"], BLOCK)
    offset, zero_row = state.pages[0] * 256, state.pool.stages[0].latent.zero_row
    for layer, recorded in ((1, 1), (2, 1), (3, 3)):
        for row, expected in zip(
            got[f"layer{layer}.rows"], want[f"layer{recorded}.topk"], strict=True
        ):
            listed = {r - offset for r in row.tolist() if r != zero_row}
            assert listed == set(expected.tolist()) - {-1}
    rows = shared.prefill(fresh(shared, len(ids)), ids)
    close(rows.hidden, want["final_norm"], BLOCK)
    close(shared.logits(rows.hidden), want["logits"], LOGITS)
    close(run_decode(shared, ids, 50)[1], want["decode.logits"], LOGITS)


@pytest.mark.parametrize("kind", ["mm", "video"])
def test_prompts_with_vision_rows(golden, tiny, kind):
    fixtures = load_file(golden / "glm5_next" / "vision.safetensors")
    ckpt = Checkpoint.open(golden / "glm5_next" / "tiny")
    tower = VisionTower.load(ckpt, tiny.config.vision)
    names = ["pad", "grow"] if kind == "mm" else ["video"]
    parts = []
    for name in names:
        grid = [tuple(row) for row in fixtures[f"{name}.grid_thw"].tolist()]
        parts.append(vision_embeddings(tower, fixtures[f"{name}.pixel_values"].float(), grid))
    rows = torch.cat(parts)
    ids = fixtures[f"{kind}.input_ids"][0].tolist()
    embeds = tiny.embed(ids)
    images, videos = (rows, None) if kind == "mm" else (None, rows)
    insert_embeddings(embeds, placeholder_positions(ids, tiny.config), images, videos)
    got = tiny.logits(tiny.prefill(fresh(tiny, len(ids)), ids, embeds=embeds).hidden)
    close(got, fixtures[f"{kind}.logits"], LOGITS)
