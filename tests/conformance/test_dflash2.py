"""DFlash2 forward, context ring and selector against golden/dflash2 (block, rounds, variants)."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.drafters.dflash2_tools import (
    Rows,
    State,
    block_hidden,
    checkpoint_of,
    draft_one,
    drafter_of,
    extend,
)
from twining.checkpoint.dflash2_config import parse_dflash2
from twining.checkpoint.reader import Checkpoint
from twining.drafters.dflash2.load import load_dflash2
from twining.drafters.dflash2.model import (
    block_forward,
    context_kv,
    dynamic_kernels,
    encode_taps,
    grouped_attention,
    grouped_conv,
    pair_scores,
    rms_norm,
    rope_tables,
    selector_walk,
)
from twining.exl3.codec import MARKERS, Codebook
from twining.exl3.linear import Exl3Tensor

HIDDEN = {"rtol": 0, "atol": 2e-4}
FEATURES = {"rtol": 0, "atol": 5e-5}


@pytest.fixture
def block(dflash2_block):
    return load_file(dflash2_block / "block.safetensors")


def test_context_rows(dflash2_block, tmp_path, block):
    drafter = drafter_of(dflash2_block, tmp_path)
    weights, config = drafter._weights, drafter._config
    torch.testing.assert_close(F.linear(block["taps"], weights.fc), block["fc_out"], **FEATURES)
    features = encode_taps(weights, config, block["taps"])
    torch.testing.assert_close(features, block["features"], **FEATURES)
    tables = rope_tables(torch.arange(len(features)), config.head_dim, config.rope_theta)
    for i, layer in enumerate(weights.layers):
        k, v = context_kv(layer, config, features, tables)
        torch.testing.assert_close(k, block["ctx_k"][i], **FEATURES)
        torch.testing.assert_close(v, block["ctx_v"][i], **FEATURES)


def test_block_stage_by_stage(dflash2_block, tmp_path, block):
    drafter = drafter_of(dflash2_block, tmp_path)
    weights, config = drafter._weights, drafter._config
    embeds = drafter._target.embed(block["block_ids"])
    torch.testing.assert_close(embeds, block["block_embed"], rtol=0, atol=0)
    layer, eps = weights.layers[0], config.rms_norm_eps
    h = rms_norm(embeds, layer.input_norm, eps)
    torch.testing.assert_close(h, block["l0_attn_norm"], **HIDDEN)
    kernels = dynamic_kernels(layer.attention_conv, h[None])
    torch.testing.assert_close(kernels[0], block["l0_attn_dyn"], **HIDDEN)
    seen = {}
    S, B = len(block["taps"]), len(embeds)
    first = max(0, S - config.sliding_window + 1)
    mask = drafter._mask(first, S, S, B)

    def attend(index, q, k, v):
        out = grouped_attention(
            q,
            torch.cat([block["ctx_k"][index][first:], k[0]]).transpose(0, 1)[None],
            torch.cat([block["ctx_v"][index][first:], v[0]]).transpose(0, 1)[None],
            mask[int(config.is_causal[index])][None],
        )
        seen[index] = (q[0], k[0], v[0], out[0].reshape(B, -1))
        return out

    positions = torch.arange(S, S + B)[None]
    hidden = block_forward(weights, config, embeds[None], positions, attend)
    for got, name in zip(seen[0], ("q_roped", "block_k", "block_v", "attn_ctx"), strict=True):
        torch.testing.assert_close(got, block[f"l0_{name}"], **HIDDEN)
    a = grouped_conv(h[None], kernels[:, :, 0], layer.attention_conv.base[0])
    torch.testing.assert_close(a[0], block["l0_attn_conv_in"], **HIDDEN)
    out = F.linear(seen[0][3], layer.o)
    torch.testing.assert_close(out, block["l0_o_proj"], **HIDDEN)
    out = grouped_conv(out[None], kernels[:, :, 1], layer.attention_conv.base[1])[0]
    torch.testing.assert_close(out, block["l0_attn_conv_out"], **HIDDEN)
    torch.testing.assert_close(embeds + out, block["l0_resid_attn"], **HIDDEN)
    h = rms_norm(embeds + out, layer.post_norm, eps)
    torch.testing.assert_close(h, block["l0_mlp_norm"], **HIDDEN)
    kernels = dynamic_kernels(layer.mlp_conv, h[None])
    torch.testing.assert_close(kernels[0], block["l0_mlp_dyn"], **HIDDEN)
    torch.testing.assert_close(hidden[0], block["final_hidden"], **HIDDEN)


def test_selector(dflash2_block, tmp_path, block):
    drafter = drafter_of(dflash2_block, tmp_path)
    weights, config = drafter._weights, drafter._config
    hidden = block["final_hidden"][1:]
    logits = drafter._target.logits(hidden)
    torch.testing.assert_close(logits, block["logits"], **HIDDEN)
    unary, candidates = logits.topk(config.selector_top_k)
    assert torch.equal(candidates, block["candidates"])
    torch.testing.assert_close(unary, block["unary"], **HIDDEN)
    gate = F.linear(hidden, weights.selector)
    torch.testing.assert_close(gate, block["selector_gate"], **HIDDEN)
    k = config.selector_top_k
    for step in range(len(hidden)):
        previous = candidates[step - 1] if step else block["anchor"].expand(k)
        lattice = pair_scores(
            weights,
            gate[step].expand(k, -1),
            previous,
            candidates[step].expand(k, -1),
            unary[step].expand(k, -1),
        )
        torch.testing.assert_close(lattice, block["selector_lattice"][step], **HIDDEN)
    path, scores = selector_walk(weights, config, hidden[None], logits[None], block["anchor"])
    assert torch.equal(path[0], block["path"])
    torch.testing.assert_close(scores[0], block["path_score"], **HIDDEN)
    assert torch.equal(logits.argmax(-1), block["argmax_path"])


def test_drafter_on_the_block(dflash2_block, tmp_path, block):
    drafter = drafter_of(dflash2_block, tmp_path)
    state = State(1)
    drafter.open(state)
    extend(drafter, state, block["taps"], 0, len(block["taps"]))
    anchor, longest = int(block["anchor"]), drafter.max_draft
    torch.testing.assert_close(
        block_hidden(drafter, state, anchor, longest), block["final_hidden"], **HIDDEN
    )
    for num_draft in (longest, max(1, longest // 2), 1):
        assert draft_one(drafter, state, anchor, num_draft) == block["path"].tolist()[:num_draft]


@pytest.mark.parametrize("chunk", ["whole", 16, 1])
@pytest.mark.parametrize("extra", ["", "rejected rows"])
def test_rounds(dflash2_rounds, tmp_path, chunk, extra):
    """Window below the context; the ring holds more rows and is filled in several ways."""
    want = load_file(dflash2_rounds / "rounds.safetensors")
    starts = want["starts"].tolist()
    drafter = drafter_of(dflash2_rounds, tmp_path, max_chunk=max(64, len(want["taps"])))
    config, longest = drafter._config, drafter.max_draft
    state = State(2)
    drafter.open(state)
    size = starts[0] if chunk == "whole" else chunk
    for first in range(0, starts[0], size):
        extend(drafter, state, want["taps"], first, min(starts[0], first + size))
    done = starts[0]
    for i, start in enumerate(starts):
        if start > done:
            extend(drafter, state, want["taps"], done, start)
            done = start
        assert state.length == start
        anchor = int(want["anchors"][i])
        hidden = block_hidden(drafter, state, anchor, longest)
        torch.testing.assert_close(hidden, want[f"round{i}_hidden"], **HIDDEN)
        assert draft_one(drafter, state, anchor, longest) == want[f"round{i}_path"].tolist()
        if extra:  # rows past the commit that a later extend replaces
            end = min(done + config.block_size, len(want["taps"]))
            drafter.extend(state, done, [0] * (end - done), Rows(-want["taps"][done:end]))
    for layer in range(config.num_layers):
        k, v = drafter.ring.read(2, layer, 0, starts[-1])
        torch.testing.assert_close(k.transpose(0, 1), want["ctx_k"][layer], **FEATURES)
        torch.testing.assert_close(v.transpose(0, 1), want["ctx_v"][layer], **FEATURES)


@pytest.mark.parametrize("causal", [False, True])
def test_variants(dflash2_variants, tmp_path, causal):
    """`{kind}_full_*`: the native block; `{kind}_short4_*`: a block of 4 rows."""
    want = load_file(dflash2_variants / "variants.safetensors")
    kind = "causal" if causal else "bidir"
    names = [n.removesuffix("_hidden") for n in want if n.startswith(kind) and "hidden" in n]
    for name in names:
        native_block = name.endswith("_full")
        drafter = drafter_of(dflash2_variants, tmp_path, native_block=native_block)
        num_layers = drafter._config.num_layers
        drafter = drafter_of(
            dflash2_variants, tmp_path, is_causal=(causal,) * num_layers, native_block=native_block
        )
        state = State(0)
        drafter.open(state)
        extend(drafter, state, want["taps"], 0, int(want["start_position"]))
        anchor = int(want["anchor"])
        num_draft = len(want[f"{name}_hidden"]) - 1
        hidden = block_hidden(drafter, state, anchor, num_draft)
        torch.testing.assert_close(hidden, want[f"{name}_hidden"], **HIDDEN)
        for path in (key for key in want if key.startswith(f"{name}_path")):
            length = len(want[path])
            assert draft_one(drafter, state, anchor, length) == want[path].tolist()
    assert names


def test_drawn_walk_has_the_selector_law(dflash2_variants, tmp_path):
    """q of a drawn walk: softmax of the selector's scores over temperature, given its own
    prefix."""
    want = load_file(dflash2_variants / "variants.safetensors")
    if "sample_path" not in want:
        pytest.skip("this set has no drawn walk")
    drafter = drafter_of(dflash2_variants, tmp_path)
    weights, config = drafter._weights, drafter._config
    state = State(0)
    drafter.open(state)
    extend(drafter, state, want["taps"], 0, int(want["start_position"]))
    hidden = block_hidden(drafter, state, int(want["anchor"]), drafter.max_draft)[1:]
    unary, candidates = drafter._target.logits(hidden).topk(config.selector_top_k)
    assert torch.equal(candidates, want["sample_candidates"])
    previous = torch.cat([want["anchor"], want["sample_path"][:-1]])
    gate = F.linear(hidden, weights.selector)
    scores = pair_scores(weights, gate, previous, candidates, unary)
    q = (scores / want["sample_temperature"]).softmax(-1)
    torch.testing.assert_close(q, want["sample_q"], rtol=0, atol=2e-4)


def test_quantised_linears_are_read_per_tensor(dflash2_block, tmp_path):
    """fc as an EXL3 set, everything else plain: the dense weight of the stored codes is used."""
    ckpt, _ = checkpoint_of(dflash2_block, tmp_path)
    tensors = {name: ckpt.read(name) for name in ckpt.tensors if name != "fc.weight"}
    outputs, inputs = ckpt.shape("fc.weight")
    n, k = (-(-size // 128) * 128 for size in (outputs, inputs))
    generator = torch.Generator().manual_seed(3)
    packed = {
        "trellis": torch.randint(
            -(2**15), 2**15, (k // 16, n // 16, 48), generator=generator, dtype=torch.int16
        ),
        "suh": torch.rand(k, generator=generator).half(),
        "svh": torch.rand(n, generator=generator).half(),
        "mcg": torch.tensor(MARKERS[Codebook.MCG] - 2**32, dtype=torch.int32),
    }
    tensors |= {f"fc.{name}": value for name, value in packed.items()}
    # A projection that a pack pads to 128 rows.
    name = "candidate_selector.hidden_projection.weight"
    plain = tensors[name]
    tensors[name] = F.pad(plain, (0, 0, 0, -len(plain) % 128)).half()
    save_file(tensors, tmp_path / "model.safetensors")
    ckpt = Checkpoint.open(tmp_path)
    weights = load_dflash2(ckpt, parse_dflash2(ckpt.config))
    want = Exl3Tensor(packed["trellis"], packed["suh"], packed["svh"], Codebook.MCG).dense()
    assert torch.equal(weights.fc, want[:outputs, :inputs])
    assert torch.equal(weights.selector, plain.half().float())
