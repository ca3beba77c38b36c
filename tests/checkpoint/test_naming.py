"""Every spelling of the tensor names resolves to the parts the model needs."""

import pytest

from twining.checkpoint.headers import scan_folder
from twining.checkpoint.naming import TensorNames
from twining.errors import CheckpointError

P = "model.language_model."
EMBED = f"{P}embed_tokens.weight"


def test_original_checkpoint_every_name_is_found(golden):
    """Walk all parts of the tiny model: together they cover every tensor of the file."""
    tensors = scan_folder(golden / "glm5_next" / "tiny")
    names = TensorNames.find(tensors)
    assert (names.text, names.visual) == (P, "model.visual.")
    found = {names.embed, names.final_norm, f"{names.lm_head}.weight"}

    def add(part) -> None:
        for field in part.__slots__:
            for value in flatten(getattr(part, field)):
                found.update({value, f"{value}.weight"} & set(tensors))

    for i in range(9):
        found.update(names.norms(i))
        if i < 8:
            add(names.hyper(i, "attn"))
            add(names.hyper(i, "ffn"))
        if i in (3, 7, 8):
            add(names.mla(i))
            add(names.indexer(i))
        else:
            add(names.kda(i))
        if i < 3:
            add(names.mlp(i))
        else:
            moe = names.moe(i, 8)
            assert moe.stacked_gate_up is None
            for mlp in (*moe.experts, moe.shared):
                add(mlp)
            add(moe)
    add(names.mtp(8))
    assert set(tensors) - found == set(names.under("model.visual."))
    assert found <= set(tensors)
    assert names.has_layer(8)
    assert not names.has_layer(9)


def flatten(value):
    if isinstance(value, str):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            if isinstance(item, str):
                yield item


def test_exl3_pack_spelling():
    attn = f"{P}layers.0.self_attn."
    present = {
        EMBED,
        "lm_head.trellis",
        f"{attn}qkv_proj.trellis",
        f"{attn}conv1d.weight",
        f"{attn}f_a_proj.weight",
        f"{attn}A_log",
        f"{P}layers.0.hc_attn_fn",
    }
    names = TensorNames.find(present)
    kda = names.kda(0)
    assert kda.qkv == (f"{attn}qkv_proj",)
    assert kda.conv == (f"{attn}conv1d.weight",)
    assert (kda.f_a, kda.a_log) == (f"{attn}f_a_proj", f"{attn}A_log")
    assert names.has_module(names.lm_head)
    assert names.hyper(0, "attn").fn == f"{P}layers.0.hc_attn_fn"
    assert names.visual is None


def test_library_saved_spelling():
    layer = f"{P}layers.4."
    attn, gate = f"{layer}self_attn.", f"{layer}self_attn.forget_gate."
    present = {
        EMBED,
        f"{attn}q_proj.weight",
        f"{attn}conv1d.weight",
        f"{gate}f_a_proj.weight",
        f"{gate}f_b_proj.weight",
        f"{gate}dt_bias",
        f"{gate}A_log",
        *(f"{layer}{site}_hc.{p}" for site in ("attn", "ffn") for p in ("fn", "base", "scale")),
        f"{layer}mlp.experts.gate_up_proj",
        f"{layer}mlp.experts.down_proj",
    }
    names = TensorNames.find(present)
    kda = names.kda(4)
    assert kda.qkv == tuple(f"{attn}{x}_proj" for x in "qkv")
    assert kda.conv == (f"{attn}conv1d.weight",)
    assert (kda.f_a, kda.f_b) == (f"{gate}f_a_proj", f"{gate}f_b_proj")
    assert (kda.a_log, kda.dt_bias) == (f"{gate}A_log", f"{gate}dt_bias")
    assert kda.g_a == f"{attn}g_a_proj"
    assert names.hyper(4, "ffn").scale == f"{layer}ffn_hc.scale"
    moe = names.moe(4, 288)
    assert moe.experts == ()
    assert moe.stacked_gate_up == f"{layer}mlp.experts.gate_up_proj"
    assert moe.stacked_down == f"{layer}mlp.experts.down_proj"


def test_absent_parts_have_their_original_names():
    names = TensorNames.find({EMBED})
    assert names.kda(2).qkv[0] == f"{P}layers.2.self_attn.q_proj"
    assert names.kda(2).conv[2] == f"{P}layers.2.self_attn.v_conv1d.weight"
    assert names.hyper(2, "attn").base == f"{P}layers.2.hc_attn_base"
    assert names.moe(2, 2).experts[1].up == f"{P}layers.2.mlp.experts.1.up_proj"
    assert names.lm_head == "lm_head"
    assert not names.has_module(names.lm_head)


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model.", ""])
def test_prefixes(prefix):
    names = TensorNames.find({f"{prefix}embed_tokens.weight", "visual.x"})
    assert names.layer(3) == f"{prefix}layers.3."
    assert names.visual == "visual."


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (f"{P}layers.0.self_attn.o_proj.rank0.trellis", "not supported"),
        (f"{P}layers.3.mlp.experts.shared_h.up_proj.rank1.suh", "not supported"),
        (f"{P}layers.0.mlp.up_proj.slice.0.trellis", "not supported"),
    ],
)
def test_foreign_layouts_are_refused(name, words):
    with pytest.raises(CheckpointError, match=words):
        TensorNames.find({EMBED, name})


def test_no_text_model():
    with pytest.raises(CheckpointError, match="no embedding among 1 tensors"):
        TensorNames.find({"transformer.wte.weight"})
