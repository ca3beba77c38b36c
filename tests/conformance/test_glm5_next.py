"""The text model against its fixtures: every recorded tensor, decode, chunks, greedy, images."""

from functools import lru_cache
from itertools import groupby, pairwise

import pytest
import torch
from torch import Tensor

from tests.conformance.sets import GlmSet, close, layers_with, load_model
from twining.cache.pool import SequenceState
from twining.checkpoint.reader import Checkpoint
from twining.config import PAGE_SIZE
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
RECORDED = ("attn_in", "attn_out", "mlp_in", "mlp_out", "attn_collapsed", "ffn_collapsed",
            "attn_post", "attn_comb", "ffn_post", "ffn_comb")  # fmt: skip


def fresh(model: Glm5Next, num_tokens: int) -> SequenceState:
    pages = -(-num_tokens // PAGE_SIZE)
    pool = model.make_pool(num_pages=pages + 2, max_seqs=2, max_draft=7)
    state = pool.open()
    assert state is not None and pool.reserve(state, num_tokens)
    return state


def token_ids(want: dict[str, Tensor]) -> list[int]:
    return want["input_ids"][0].tolist()


def needs(want: dict[str, Tensor], name: str) -> None:
    """A set may lack a group of tensors."""
    if name not in want:
        pytest.skip(f"this set records no {name}")


def listed(state: SequenceState, rows: Tensor) -> list[list[int]]:
    """Positions that rows of a selection stand for, in their order, without the empty ones."""
    place = {page: i for i, page in enumerate(state.pages)}
    zero_row = state.pool.zero_row
    return [
        [place[r // PAGE_SIZE] * PAGE_SIZE + r % PAGE_SIZE for r in row if r != zero_row]
        for row in rows.tolist()
    ]


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


@lru_cache(maxsize=2)
def traced(which: GlmSet) -> tuple[SequenceState, dict[str, Tensor]]:
    return trace(load_model(which.model), token_ids(which.tensors))


def test_logits_and_final_norm(text_set):
    model, want = load_model(text_set.model), text_set.tensors
    ids = token_ids(want)
    rows = model.prefill(fresh(model, len(ids)), ids)
    close(rows.hidden, want["final_norm"], BLOCK)
    close(model.logits(rows.hidden), want["logits"], LOGITS)


def test_streams(text_set):
    want = text_set.tensors
    needs(want, "streams")
    tokens = want["streams.tokens"].long()
    assert len(want["streams"]) == text_set.config.num_layers + 1
    for i, streams in enumerate(want["streams"]):
        close(traced(text_set)[1][f"stream{i}"][tokens], streams, BLOCK)


def test_taps_are_stream_means_after_the_layer(text_set):
    last = text_set.config.num_layers - 1
    layers = (max(0, last - 1), 0, last // 2)
    ckpt = Checkpoint.open(text_set.model)
    model = Glm5Next.load(ckpt, text_set.config, tap_layers=layers)
    ids = token_ids(text_set.tensors)
    taps = model.prefill(fresh(model, len(ids)), ids).taps
    assert taps is not None
    want = torch.cat([traced(text_set)[1][f"stream{i + 1}"].mean(1) for i in layers], 1)
    close(taps, want, 0.0)


def test_block_inputs_and_outputs(text_set):
    names = [n for n in text_set.tensors if n.rpartition(".")[2] in RECORDED]
    for name in names:
        close(traced(text_set)[1][name], text_set.tensors[name], BLOCK)
    assert names


def test_routing(text_set):
    want, got = text_set.tensors, traced(text_set)[1]
    layers = layers_with(text_set.path, "route_ids")
    assert layers or "sparse" not in text_set.config.mlp_types
    for i in layers:
        assert torch.equal(got[f"layer{i}.route_ids"], want[f"layer{i}.route_ids"].long())
        close(got[f"layer{i}.route_weights"], want[f"layer{i}.route_weights"], 1e-4)


def index_plane(config, layer: int) -> int:
    """Number of a layer among those that have an indexer of their own."""
    return [i for i in config.mla_layers if config.indexer_types[i] == "full"].index(layer)


def test_indexer(text_indexer):
    which, layer = text_indexer
    want, (state, got) = which.tensors, traced(which)
    if (name := f"layer{layer}.index_pool_keys") in want:
        plane = index_plane(which.config, layer)
        keys = state.pool.stages[0].index.read_pages(plane, torch.tensor(state.pages))
        close(keys.flatten(0, 1)[: len(want[name])], want[name], BLOCK)
    expected = want[f"layer{layer}.topk"]
    assert expected.shape[1] == which.config.index_topk + which.config.index_pool - 1
    for row, wanted in zip(listed(state, got[f"layer{layer}.rows"]), expected, strict=True):
        assert row == sorted(row)
        assert set(row) == set(wanted.tolist()) - {-1}


@torch.inference_mode()
def test_index_rows_and_scores_from_recorded_inputs(text_scores):
    """Raw keys and gates, and the scores of every visible pool, given the layer's own input."""
    which, layer = text_scores
    text, model = which.tensors, load_model(which.model)
    mixer = model.layers[layer].mixer
    x = text[f"layer{layer}.attn_in"]
    state = fresh(model, len(x))
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
        width = 2 * which.config.index_head_dim
        close(index.raw[:n], packed[start : start + n, :width], 1e-4)
        got = mixer.indexer.scores(batch, index, batch.segment)[:n]
        want = scores[start : start + n]
        seen = want > float("-inf")
        assert not seen[:, got.shape[1] :].any()
        got, seen = got[:, : want.shape[1]], seen[:, : got.shape[1]]
        close(got[seen], want[:, : got.shape[1]][seen], 1e-4)
        state.length += n


def run_decode(model: Glm5Next, ids: list[int], prompt: int) -> tuple[SequenceState, Tensor]:
    state = fresh(model, len(ids))
    logits = [model.logits(model.prefill(state, ids[:prompt]).hidden[-1:])]
    for token in ids[prompt:]:
        logits.append(model.logits(model.verify([(state, [token])]).hidden))
        model.commit(state, 1)
    return state, torch.cat(logits)


def test_decode_and_states(text_set):
    want, config = text_set.tensors, text_set.config
    needs(want, "decode.logits")
    ids = token_ids(want)
    steps = len(want["decode.logits"]) - 1
    state, logits = run_decode(load_model(text_set.model), ids, len(ids) - steps)
    close(logits, want["decode.logits"], LOGITS)
    planes = state.pool.snapshot(state)
    taps = config.conv_kernel - 1
    for layer in layers_with(text_set.path, "recurrent"):
        plane = config.kda_layers.index(layer)
        close(planes["kda_state"][plane], want[f"state.layer{layer}.recurrent"], BLOCK)
        ring = planes["kda_conv"][plane]
        last = ring[torch.arange(len(ids) - taps, len(ids)) % len(ring)]
        close(last.t(), want[f"state.layer{layer}.conv"][:, -taps:], BLOCK)
    rows = state.pool.rows(state, 0, len(ids))
    for layer in layers_with(text_set.path, "latent"):
        plane = config.mla_layers.index(layer)
        got = state.pool.stages[0].latent.read(plane, rows)
        close(got, want[f"state.layer{layer}.latent"], BLOCK)


def test_chunks_at_any_boundary(text_chunks):
    which, name = text_chunks
    want, model = which.tensors, load_model(which.model)
    ids = token_ids(want)
    edges = sorted({0, *want[f"{name}.bounds"].tolist(), len(ids)})
    state = fresh(model, len(ids))
    logits = []
    for a, b in pairwise(edges):
        for start in range(a, b, 64):
            rows = model.prefill_block(state, ids[start : min(b, start + 64)])
            logits.append(model.logits(rows.hidden))
    close(torch.cat(logits), want[f"{name}.logits"], LOGITS)


def test_greedy(text_set):
    needs(text_set.tensors, "greedy.tokens")
    model = load_model(text_set.model)
    prompt = token_ids(text_set.tensors)[: int(text_set.tensors["greedy.prompt_len"])]
    want = text_set.tensors["greedy.tokens"].tolist()
    state = fresh(model, len(prompt) + len(want))
    got = [int(model.logits(model.prefill(state, prompt).hidden[-1:]).argmax())]
    while len(got) < len(want):
        rows = model.verify([(state, got[-1:])])
        model.commit(state, 1)
        got.append(int(model.logits(rows.hidden).argmax()))
    assert got == want


def test_shared_indexer(shared_set):
    want, config = shared_set.tensors, shared_set.config
    model = load_model(shared_set.model)
    ids = token_ids(want)
    state, got = traced(shared_set)
    for name in (n for n in want if n.rpartition(".")[2] in RECORDED):
        close(got[name], want[name], BLOCK)
    source = None
    for layer in config.mla_layers:  # a shared layer must use the set of the one before it
        source = layer if config.indexer_types[layer] == "full" else source
        positions = listed(state, got[f"layer{layer}.rows"])
        expected = want.get(f"layer{layer}.topk", want.get(f"layer{source}.topk"))
        if expected is None:
            continue
        for row, wanted in zip(positions, expected, strict=True):
            assert set(row) == set(wanted.tolist()) - {-1}
    rows = model.prefill(fresh(model, len(ids)), ids)
    close(rows.hidden, want["final_norm"], BLOCK)
    close(model.logits(rows.hidden), want["logits"], LOGITS)
    steps = len(want["decode.logits"]) - 1
    close(run_decode(model, ids, len(ids) - steps)[1], want["decode.logits"], LOGITS)


def media_orders(runs: list[int], sizes: dict[str, int]) -> list[list[str]]:
    """Ways to fill runs of placeholders with whole media of these sizes, in order."""
    if not runs:
        return [[]]
    orders = []
    for name, size in sizes.items():
        for count in range(1, len(runs) + 1):  # a video fills several runs, one per frame
            if sum(runs[:count]) == size:
                orders += [[name, *rest] for rest in media_orders(runs[count:], sizes)]
    return orders[:24]


def test_prompts_with_vision_rows(vision_prompt):
    """The prompt's media follow from its placeholders; equal sizes leave a choice to try."""
    which, kind = vision_prompt
    want, model = which.tensors, load_model(which.model)
    tower = VisionTower.load(Checkpoint.open(which.model), model.config.vision)
    ids = want[f"{kind}.input_ids"][0].tolist()
    places = placeholder_positions(ids, model.config)
    is_video = bool(places.video)
    assert bool(places.image) != is_video, "a recorded prompt has images or videos"
    positions = places.video if is_video else places.image
    runs = [len(list(g)) for _, g in groupby(enumerate(positions), lambda x: x[1] - x[0])]
    names = [key.removesuffix(".grid_thw") for key in want if key.endswith(".grid_thw")]
    sizes = {
        name: len(want[f"{name}.tower.out"])
        for name in names
        if is_video == (f"{name}.image_u8" not in want)
    }
    orders = media_orders(runs, sizes)
    assert orders, f"no media of {sizes} fill {runs}"
    errors = []
    for order in orders:
        parts = []
        for name in order:
            grid = [tuple(row) for row in want[f"{name}.grid_thw"].tolist()]
            parts.append(vision_embeddings(tower, want[f"{name}.pixel_values"].float(), grid))
        rows = torch.cat(parts)
        embeds = model.embed(ids)
        insert_embeddings(embeds, places, None if is_video else rows, rows if is_video else None)
        got = model.logits(model.prefill(fresh(model, len(ids)), ids, embeds=embeds).hidden)
        errors.append((got - want[f"{kind}.logits"]).abs().max().item())
    assert min(errors) <= LOGITS
