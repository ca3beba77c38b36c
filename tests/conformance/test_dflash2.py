"""DFlash2 forward, context ring and selector against golden/dflash2 (block, rounds, variants)."""

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file

from tests.drafters.dflash2_tools import (
    Rows,
    State,
    block_hidden,
    draft_one,
    extend,
    golden_checkpoint,
    golden_drafter,
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
def block(golden):
    return load_file(golden / "dflash2" / "block.safetensors")


def test_context_rows(golden, tmp_path, block):
    drafter = golden_drafter(golden, tmp_path)
    weights, config = drafter._weights, drafter._config
    torch.testing.assert_close(F.linear(block["taps"], weights.fc), block["fc_out"], **FEATURES)
    features = encode_taps(weights, config, block["taps"])
    torch.testing.assert_close(features, block["features"], **FEATURES)
    tables = rope_tables(torch.arange(20), config.head_dim, config.rope_theta)
    for i, layer in enumerate(weights.layers):
        k, v = context_kv(layer, config, features, tables)
        torch.testing.assert_close(k, block["ctx_k"][i], **FEATURES)
        torch.testing.assert_close(v, block["ctx_v"][i], **FEATURES)


def test_block_stage_by_stage(golden, tmp_path, block):
    drafter = golden_drafter(golden, tmp_path)
    weights, config = drafter._weights, drafter._config
    embeds = drafter._target.embed(block["block_ids"])
    torch.testing.assert_close(embeds, block["block_embed"], rtol=0, atol=0)
    layer, eps = weights.layers[0], config.rms_norm_eps
    h = rms_norm(embeds, layer.input_norm, eps)
    torch.testing.assert_close(h, block["l0_attn_norm"], **HIDDEN)
    kernels = dynamic_kernels(layer.attention_conv, h[None])
    torch.testing.assert_close(kernels[0], block["l0_attn_dyn"], **HIDDEN)
    seen = {}

    def attend(index, q, k, v):
        out = grouped_attention(
            q,
            torch.cat([block["ctx_k"][index], k[0]]).transpose(0, 1)[None],
            torch.cat([block["ctx_v"][index], v[0]]).transpose(0, 1)[None],
            torch.ones(1, 8, 28, dtype=torch.bool),
        )
        seen[index] = (q[0], k[0], v[0], out[0].reshape(8, -1))
        return out

    positions = torch.arange(20, 28)[None]
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


def test_selector(golden, tmp_path, block):
    drafter = golden_drafter(golden, tmp_path)
    weights, config = drafter._weights, drafter._config
    hidden = block["final_hidden"][1:]
    logits = drafter._target.logits(hidden)
    torch.testing.assert_close(logits, block["logits"], **HIDDEN)
    unary, candidates = logits.topk(config.selector_top_k)
    assert torch.equal(candidates, block["candidates"])
    torch.testing.assert_close(unary, block["unary"], **HIDDEN)
    gate = F.linear(hidden, weights.selector)
    torch.testing.assert_close(gate, block["selector_gate"], **HIDDEN)
    for step in range(7):
        previous = candidates[step - 1] if step else block["anchor"].expand(8)
        lattice = pair_scores(
            weights,
            gate[step].expand(8, -1),
            previous,
            candidates[step].expand(8, -1),
            unary[step].expand(8, -1),
        )
        torch.testing.assert_close(lattice, block["selector_lattice"][step], **HIDDEN)
    path, scores = selector_walk(weights, config, hidden[None], logits[None], block["anchor"])
    assert torch.equal(path[0], block["path"])
    torch.testing.assert_close(scores[0], block["path_score"], **HIDDEN)
    assert not torch.equal(path[0], block["argmax_path"])


def test_drafter_on_the_block(golden, tmp_path, block):
    drafter = golden_drafter(golden, tmp_path)
    state = State(1)
    drafter.open(state)
    extend(drafter, state, block["taps"], 0, 20)
    anchor = int(block["anchor"])
    torch.testing.assert_close(
        block_hidden(drafter, state, anchor, 7), block["final_hidden"], **HIDDEN
    )
    for num_draft in (7, 3, 1):
        assert draft_one(drafter, state, anchor, num_draft) == block["path"].tolist()[:num_draft]


@pytest.mark.parametrize("chunks", [(45,), (16, 16, 13), (1,) * 45])
@pytest.mark.parametrize("extra", ["", "rejected rows"])
def test_rounds(golden, tmp_path, chunks, extra):
    """Window 32 below the context; the ring holds 256 rows and is filled in several ways."""
    want = load_file(golden / "dflash2" / "rounds.safetensors")
    drafter = golden_drafter(golden, tmp_path)
    state = State(2)
    drafter.open(state)
    done = 0
    for size in chunks:
        extend(drafter, state, want["taps"], done, done + size)
        done += size
    for i, start in enumerate(want["starts"].tolist()):
        if start > done:
            extend(drafter, state, want["taps"], done, start)
            done = start
        assert state.length == start
        anchor = int(want["anchors"][i])
        hidden = block_hidden(drafter, state, anchor, 7)
        torch.testing.assert_close(hidden, want[f"round{i}_hidden"], **HIDDEN)
        assert draft_one(drafter, state, anchor, 7) == want[f"round{i}_path"].tolist()
        if extra:  # rows past the commit that a later extend replaces
            end = min(done + 8, len(want["taps"]))
            drafter.extend(state, done, [0] * (end - done), Rows(-want["taps"][done:end]))
    for layer in range(3):
        k, v = drafter.ring.read(2, layer, 0, 62)
        torch.testing.assert_close(k.transpose(0, 1), want["ctx_k"][layer], **FEATURES)
        torch.testing.assert_close(v.transpose(0, 1), want["ctx_v"][layer], **FEATURES)


@pytest.mark.parametrize("causal", [False, True])
def test_variants(golden, tmp_path, causal):
    want = load_file(golden / "dflash2" / "variants.safetensors")
    kind = "causal" if causal else "bidir"
    for native_block, name in ((True, "full"), (False, "short4")):
        drafter = golden_drafter(
            golden, tmp_path, is_causal=(causal,) * 3, native_block=native_block
        )
        state = State(0)
        drafter.open(state)
        extend(drafter, state, want["taps"], 0, int(want["start_position"]))
        anchor = int(want["anchor"])
        hidden = block_hidden(drafter, state, anchor, 3)
        torch.testing.assert_close(hidden, want[f"{kind}_{name}_hidden"], **HIDDEN)
        assert draft_one(drafter, state, anchor, 3) == want[f"{kind}_{name}_path3"].tolist()


def test_drawn_walk_has_the_selector_law(golden, tmp_path):
    """q of a drawn walk: softmax of the selector's scores over temperature, given its own
    prefix."""
    want = load_file(golden / "dflash2" / "variants.safetensors")
    drafter = golden_drafter(golden, tmp_path)
    weights, config = drafter._weights, drafter._config
    state = State(0)
    drafter.open(state)
    extend(drafter, state, want["taps"], 0, int(want["start_position"]))
    hidden = block_hidden(drafter, state, int(want["anchor"]), 7)[1:]
    unary, candidates = drafter._target.logits(hidden).topk(config.selector_top_k)
    assert torch.equal(candidates, want["sample_candidates"])
    previous = torch.cat([want["anchor"], want["sample_path"][:-1]])
    gate = F.linear(hidden, weights.selector)
    scores = pair_scores(weights, gate, previous, candidates, unary)
    q = (scores / want["sample_temperature"]).softmax(-1)
    torch.testing.assert_close(q, want["sample_q"], rtol=0, atol=2e-4)


def test_quantised_linears_are_read_per_tensor(golden, tmp_path):
    """fc as an EXL3 set, everything else plain: the dense weight of the stored codes is used."""
    ckpt, _ = golden_checkpoint(golden, tmp_path)
    tensors = {name: ckpt.read(name) for name in ckpt.tensors if name != "fc.weight"}
    generator = torch.Generator().manual_seed(3)
    packed = {
        "trellis": torch.randint(
            -(2**15), 2**15, (24, 8, 48), generator=generator, dtype=torch.int16
        ),
        "suh": torch.rand(384, generator=generator).half(),
        "svh": torch.rand(128, generator=generator).half(),
        "mcg": torch.tensor(MARKERS[Codebook.MCG] - 2**32, dtype=torch.int32),
    }
    tensors |= {f"fc.{name}": value for name, value in packed.items()}
    # A projection that a pack pads to 128 rows.
    name = "candidate_selector.hidden_projection.weight"
    plain = tensors[name]
    tensors[name] = F.pad(plain, (0, 0, 0, 128 - len(plain))).half()
    save_file(tensors, tmp_path / "model.safetensors")
    ckpt = Checkpoint.open(tmp_path)
    weights = load_dflash2(ckpt, parse_dflash2(ckpt.config))
    want = Exl3Tensor(packed["trellis"], packed["suh"], packed["svh"], Codebook.MCG).dense()
    assert torch.equal(weights.fc, want)
    assert torch.equal(weights.selector, plain.half().float())
