"""Loading the text model: every spelling gives the same bits, and errors name what is wrong."""

import pytest
import torch

from tests.models.synthetic import PREFIX, SMALL, random_tensors, write_model
from twining.checkpoint.hf_config import parse_glm5_next
from twining.errors import CheckpointError, ConfigError
from twining.exl3.codec import MARKERS, Codebook
from twining.exl3.linear import Exl3Tensor, padded
from twining.models.glm5_next.model import Glm5Next

IDS = list(range(70))


@pytest.fixture(scope="module")
def tensors():
    return random_tensors(SMALL, seed=5)


def load(folder, tensors, sizes=SMALL, **kw) -> Glm5Next:
    ckpt = write_model(folder, sizes, tensors)
    return Glm5Next.load(ckpt, parse_glm5_next(ckpt.config), **kw)


def logits(model: Glm5Next) -> torch.Tensor:
    state = model.make_pool(num_pages=1, max_seqs=1, max_draft=0).open()
    assert state.pool.reserve(state, 80)
    return model.logits(model.prefill(state, IDS).hidden)


@pytest.fixture(scope="module")
def want(tensors, tmp_path_factory):
    return logits(load(tmp_path_factory.mktemp("plain"), tensors))


def fused_kda(tensors: dict, conv_dims: int = 3) -> dict:
    """qkv_proj and conv1d as EXL3 packs spell them."""
    out = dict(tensors)
    for name in tensors:
        if name.endswith("self_attn.q_proj.weight"):
            attn = name.removesuffix("q_proj.weight")
            for kind, fused in (("_proj", "qkv_proj"), ("_conv1d", "conv1d")):
                parts = [out.pop(f"{attn}{x}{kind}.weight") for x in "qkv"]
                out[f"{attn}{fused}.weight"] = torch.cat(parts)
            if conv_dims == 2:
                out[f"{attn}conv1d.weight"] = out[f"{attn}conv1d.weight"].squeeze(1)
    return out


def library_saved(tensors: dict) -> dict:
    """forget_gate, attn_hc / ffn_hc, conv1d, stacked experts."""
    out = {}
    for name, value in fused_kda(tensors).items():
        for part in ("f_a_proj", "f_b_proj", "dt_bias", "A_log"):
            name = name.replace(f"self_attn.{part}", f"self_attn.forget_gate.{part}")
        for site in ("attn", "ffn"):
            name = name.replace(f"hc_{site}_", f"{site}_hc.")
        out[name] = value
    for name in list(out):
        if name.endswith("experts.0.gate_proj.weight"):
            experts = name.removesuffix("0.gate_proj.weight")
            gate, up, down = (
                torch.stack([out.pop(f"{experts}{e}.{x}_proj.weight") for e in range(6)])
                for x in ("gate", "up", "down")
            )
            out[f"{experts}gate_up_proj"] = torch.cat((gate, up), 1)
            out[f"{experts}down_proj"] = down
    # The library keeps q, k and v apart; only the convolutions are joined.
    for name in list(out):
        if name.endswith("qkv_proj.weight"):
            for x, part in zip("qkv", out.pop(name).chunk(3), strict=True):
                out[name.replace("qkv_proj", f"{x}_proj")] = part.clone()
    return out


@pytest.mark.parametrize("spelling", ["fused", "fused_flat_conv", "library", "bare_prefix"])
def test_spellings(tmp_path, tensors, want, spelling):
    changed = {
        "fused": lambda: fused_kda(tensors),
        "fused_flat_conv": lambda: fused_kda(tensors, 2),
        "library": lambda: library_saved(tensors),
        "bare_prefix": lambda: {n.replace(PREFIX, "model."): t for n, t in tensors.items()},
    }[spelling]()
    assert torch.equal(logits(load(tmp_path, changed)), want)


def test_without_mtp(tmp_path, tensors, want):
    trunk = {n: t for n, t in tensors.items() if f"{PREFIX}layers.5." not in n}
    model = load(tmp_path, trunk)
    assert not model.has_mtp and torch.equal(logits(model), want)


def test_missing_tensors_are_named_at_once(tmp_path, tensors):
    names = [
        f"{PREFIX}layers.0.hc_attn_base",
        f"{PREFIX}layers.1.self_attn.indexer.wk.weight",
        f"{PREFIX}layers.2.mlp.experts.4.up_proj.weight",
    ]
    part = {n: t for n, t in tensors.items() if n not in names}
    with pytest.raises(CheckpointError) as err:
        load(tmp_path, part)
    assert "3 tensors are missing" in str(err.value) and "\n" not in str(err.value)
    for name in names:
        assert name in str(err.value)


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ("layers.0.self_attn.rotary.weight", "1 tensors that this model has no place for"),
        ("layers.3.self_attn.indexer.wk.weight", "no place for"),  # a layer that shares
        ("layers.6.enorm.weight", "no place for"),  # beyond the MTP block
    ],
)
def test_tensors_without_a_place(tmp_path, tensors, extra, words):
    with pytest.raises(CheckpointError, match=words) as err:
        load(tmp_path, tensors | {f"{PREFIX}{extra}": torch.zeros(4)})
    assert extra in str(err.value)


def test_wrong_shapes_and_types(tmp_path, tensors):
    for i, (name, bad) in enumerate(
        (
            (f"{PREFIX}layers.0.self_attn.A_log", torch.zeros(4)),
            (f"{PREFIX}layers.0.self_attn.dt_bias", torch.zeros(96, dtype=torch.int32)),
            (f"{PREFIX}layers.1.self_attn.q_a_proj.weight", torch.zeros(48, 95)),
            ("lm_head.weight", torch.zeros(96, 203)),
        )
    ):
        with pytest.raises(CheckpointError) as err:
            load(tmp_path / str(i), tensors | {name: bad})
        assert name in str(err.value) and "\n" not in str(err.value)


def test_bias_is_refused_unless_zero(tmp_path, tensors, want):
    name = f"{PREFIX}layers.0.self_attn.o_proj.bias"
    assert torch.equal(logits(load(tmp_path / "a", tensors | {name: torch.zeros(96)})), want)
    with pytest.raises(CheckpointError, match=r"o_proj\.bias"):
        load(tmp_path / "b", tensors | {name: torch.ones(96)})


def test_half_precision_storage_is_upcast(tmp_path, tensors):
    half = {n: t.bfloat16() for n, t in tensors.items()}
    up = {n: t.float() for n, t in half.items()}
    got = [logits(load(tmp_path / str(i), x)) for i, x in enumerate((half, up))]
    assert torch.equal(*got)


@pytest.mark.parametrize("layer", [-1, 5])
def test_tap_layers_out_of_range(tmp_path, tensors, layer):
    with pytest.raises(ConfigError, match=f"tap layer {layer}"):
        load(tmp_path, tensors, tap_layers=(0, layer))


def test_more_than_one_mtp_block_is_refused(tmp_path, tensors):
    with pytest.raises(CheckpointError, match="num_nextn_predict_layers=2"):
        load(tmp_path, tensors, SMALL | {"num_nextn_predict_layers": 2})


def test_softplus_gate_loads_and_differs(tmp_path, tensors, want):
    """A config without a lower bound selects the other gate function."""
    ckpt = write_model(tmp_path, SMALL, tensors)
    del ckpt.config["text_config"]["linear_attn_config"]["gate_lower_bound"]
    model = Glm5Next.load(ckpt, parse_glm5_next(ckpt.config))
    got = logits(model)
    assert bool(got.isfinite().all()) and not torch.allclose(got, want, atol=0.1)


def quantised(tensors: dict, modules: list[str]) -> tuple[dict, dict]:
    """The same model twice: modules as random EXL3 tensors, and as the matrices they decode to."""
    packed, plain = dict(tensors), dict(tensors)
    g = torch.Generator().manual_seed(3)
    for module in modules:
        out_features, in_features = tensors[f"{module}.weight"].shape
        k, n = padded(in_features), padded(out_features)
        trellis = torch.randint(-32768, 32768, (k // 16, n // 16, 64), generator=g)
        signs = [torch.randint(0, 2, (size,), generator=g) * 2 - 1 for size in (k, n)]
        exl3 = Exl3Tensor(
            trellis.to(torch.int16), signs[0].half(), (signs[1] * 0.05).half(), Codebook.MUL1
        )
        del packed[f"{module}.weight"]
        packed |= {
            f"{module}.trellis": exl3.trellis,
            f"{module}.suh": exl3.suh,
            f"{module}.svh": exl3.svh,
            f"{module}.mul1": torch.tensor(MARKERS[Codebook.MUL1]).to(torch.int32),
        }
        plain[f"{module}.weight"] = exl3.dense()[:out_features, :in_features].contiguous()
    return packed, plain


def test_quantised_modules_anywhere(tmp_path, tensors):
    """Widths here are no multiples of 128, so every one of these is padded in the file."""
    fused = fused_kda(tensors)
    modules = ["lm_head"] + [
        f"{PREFIX}layers.{m}"
        for m in (
            "0.self_attn.qkv_proj",
            "0.mlp.down_proj",
            "1.self_attn.q_b_proj",
            "1.self_attn.indexer.wq_b",
            "2.mlp.experts.3.up_proj",
            "4.mlp.shared_experts.gate_proj",
            "5.eh_proj",
        )
    ]
    got = [load(tmp_path / str(i), t) for i, t in enumerate(quantised(fused, modules))]
    assert torch.equal(*(logits(model) for model in got))
    assert torch.equal(got[0].mtp.in_proj, got[1].mtp.in_proj)
