"""DFlash2 drafter: ring against full recompute, batches, odd contexts, options, damaged files."""

import dataclasses
import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.drafters.dflash2_tools import (
    State,
    Target,
    block_hidden,
    draft_one,
    extend,
)
from tools.train_demo.dflash2_loss import (
    AnchorBatch,
    Drafter,
    LossConfig,
    anchor_block_hidden,
)
from twining.checkpoint.dflash2_config import DFlash2Config, parse_dflash2
from twining.checkpoint.reader import Checkpoint
from twining.drafters.base import DraftItem
from twining.drafters.dflash2.drafter import DFlash2Drafter
from twining.drafters.dflash2.load import load_dflash2
from twining.drafters.dflash2.model import grouped_conv, rope_tables, scale_logits
from twining.errors import CheckpointError, ConfigError

CONFIG = {
    "architectures": ["DFlash2DraftModel"],
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "vocab_size": 90,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "layer_types": ["sliding_attention"] * 2,
    "sliding_window": 37,
    "is_causal": False,
    "num_target_layers": 8,
    "dflash_config": {
        "block_size": 6,
        "mask_token_id": 89,
        "target_layer_ids": [5, 1],
        "conv_kernel_size": 3,
        "conv_group_size": 12,
        "selector_rank": 7,
        "selector_top_k": 5,
    },
}


def random_parts(seed: int = 0, **changes) -> tuple[DFlash2Config, Drafter, Target]:
    """A drafter with every weight random (also those that start as identity)."""
    print(f"seed {seed}")
    generator = torch.Generator().manual_seed(seed)
    config = dataclasses.replace(parse_dflash2(CONFIG), **changes)
    drafter = Drafter(config).requires_grad_(False)
    for name, p in drafter.named_parameters():
        p.copy_(torch.randn(p.shape, generator=generator) * (0.5 if p.ndim == 1 else 0.2))
        if name.endswith("norm.weight"):
            p.abs_().add_(0.5)
    embed = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    head = torch.randn(config.vocab_size, config.hidden_size, generator=generator)
    return config, drafter, Target(embed, head)


def make(seed: int = 0, max_seqs: int = 4, max_chunk: int = 64, native_block=True, **changes):
    config, drafter, target = random_parts(seed, **changes)
    return DFlash2Drafter(
        config,
        drafter.weights(),
        target,
        max_seqs=max_seqs,
        max_chunk=max_chunk,
        native_block=native_block,
    )


def random_taps(seed: int, count: int) -> torch.Tensor:
    return torch.randn(count, 96, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("window", [37, 300])
def test_ring_equals_full_recompute_across_its_borders(window):
    """S around the window and around multiples of the ring, reached in steps of any size."""
    drafter = make(sliding_window=window)
    R = drafter.ring.num_rows
    taps = random_taps(1, 2 * R + 40)
    state, fresh = State(2), State(0)
    drafter.open(state)
    rng, done = random.Random(window), 0
    borders = [b for c in (window, R, 2 * R) for b in range(c - 2, c + 3)]
    for stop in [0, 1, *borders, 2 * R + 30]:
        while done < stop:
            size = min(rng.choice([1, 3, 8, 64, 200]), stop - done)
            extend(drafter, state, taps, done, done + size)
            done += size
        drafter.open(fresh)
        if done:
            extend(drafter, fresh, taps, 0, done)
        got = block_hidden(drafter, state, 3, 5)
        assert torch.isfinite(got).all()
        torch.testing.assert_close(got, block_hidden(drafter, fresh, 3, 5), rtol=0, atol=2e-5)
        drafter.open(fresh)
        kept = max(0, done - window + 1)  # older rows are in no row's window
        extend(drafter, fresh, taps, kept, done)
        torch.testing.assert_close(got, block_hidden(drafter, fresh, 3, 5), rtol=0, atol=2e-5)


def test_rows_outside_the_window_do_not_matter_and_rows_inside_do():
    drafter = make()
    taps = random_taps(2, 100)
    state = State(0)

    def hidden(changed: int):
        other = taps.clone()
        other[changed] += 1.0
        drafter.open(state)
        extend(drafter, state, other, 0, 100)
        return block_hidden(drafter, state, 7, 5)

    drafter.open(state)
    extend(drafter, state, taps, 0, 100)
    base = block_hidden(drafter, state, 7, 5)
    assert torch.equal(hidden(100 - 37), base)
    assert not torch.equal(hidden(100 - 36), base)


def test_batch_equals_alone():
    drafter = make(seed=3)
    lengths = [0, 1, 20, 90]
    states = [State(slot) for slot in range(4)]
    for state, length in zip(states, lengths, strict=True):
        drafter.open(state)
        if length:
            extend(drafter, state, random_taps(length, length), 0, length)
    wanted = [5, 0, 2, 9]
    items = [
        DraftItem(s, [0] * s.length + [11 + i], k)
        for i, (s, k) in enumerate(zip(states, wanted, strict=True))
    ]
    together = drafter.draft(items)
    assert [len(d) for d in together] == [5, 0, 2, 5]
    for i, (state, k) in enumerate(zip(states, wanted, strict=True)):
        assert together[i] == draft_one(drafter, state, 11 + i, k)
    assert drafter.draft([DraftItem(states[0], [1], 0)]) == [[]]


def test_serving_equals_the_training_forward():
    """Blocks with inference masks in one packed row equal the drafter's ring pass, bit for bit
    off."""
    config, module, target = random_parts(5)
    taps = random_taps(6, 120)
    anchors = torch.tensor([[0, 1, 30, 50, 100]])
    ids = torch.randint(0, 89, (1, 120), generator=torch.Generator().manual_seed(7))
    document = torch.zeros(1, 120, dtype=torch.long)
    batch = AnchorBatch(
        taps=taps[None],
        input_ids=ids,
        document_ids=document,
        position_ids=torch.arange(120)[None],
        loss_mask=torch.ones_like(ids),
        anchors=anchors,
        anchor_valid=torch.ones_like(anchors, dtype=torch.bool),
    )
    want = anchor_block_hidden(module.weights(), config, batch, target.embedding, LossConfig())[0]
    drafter = DFlash2Drafter(config, module.weights(), target, max_seqs=1, max_chunk=64)
    state = State(0)
    for row, anchor in enumerate(anchors[0].tolist()):
        drafter.open(state)
        if anchor:
            extend(drafter, state, taps, 0, anchor)
        got = block_hidden(drafter, state, int(ids[0, anchor]), 5)
        torch.testing.assert_close(got, want[row], rtol=0, atol=5e-5)


def test_gap_is_never_read():
    """A restored prefix without drafter rows: only new rows are seen (valid_from)."""
    drafter = make(seed=8)
    taps = random_taps(9, 60)
    state, fresh = State(1), State(2)
    drafter.open(state)
    extend(drafter, state, random_taps(10, 20), 0, 20)
    extend(drafter, state, taps, 40, 60)  # 20..39 never written
    drafter.open(fresh)
    extend(drafter, fresh, taps, 40, 60)
    assert torch.equal(block_hidden(drafter, state, 3, 5), block_hidden(drafter, fresh, 3, 5))


def test_rows_above_the_length_are_not_read():
    """After a rewind of the target the drafter must not see rows of the abandoned future."""
    drafter = make(seed=12)
    taps = random_taps(13, 60)
    state, fresh = State(0), State(1)
    for one, end in ((state, 60), (fresh, 50)):
        drafter.open(one)
        extend(drafter, one, taps, 0, end)
    state.length = 50
    assert torch.equal(block_hidden(drafter, state, 3, 5), block_hidden(drafter, fresh, 3, 5))


@pytest.mark.parametrize("taps", [1, 2, 4])
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_convolution_matches_its_formula(taps, rows):
    torch.manual_seed(taps * 10 + rows)
    N, groups, width = 3, 5, 4
    x = torch.randn(N, rows, groups * width)
    kernels, base = torch.randn(N, rows, taps, groups), torch.randn(taps, groups * width)
    got = grouped_conv(x, kernels, base)
    for n in range(N):
        for t in range(rows):
            for c in range(groups * width):
                want = sum(
                    (base[j, c] + kernels[n, t, j, c // width]) * x[n, t - j, c]
                    for j in range(min(taps, t + 1))
                )
                assert abs(float(got[n, t, c] - want)) < 1e-4


def test_short_block_is_another_computation_only_without_causality():
    for causal in (False, True):
        changes = {"is_causal": (causal,) * 2}
        full, short = make(**changes), make(native_block=False, **changes)
        state = State(0)
        for drafter in (full, short):
            drafter.open(state)
            extend(drafter, state, random_taps(1, 30), 0, 30)
        a, b = block_hidden(full, state, 3, 2)[:3], block_hidden(short, state, 3, 2)
        assert b.shape[0] == 3
        assert torch.allclose(a, b, atol=1e-5) == causal


def test_scales_and_soft_cap():
    config = parse_dflash2(CONFIG)
    logits = torch.tensor([1.0, -40.0])
    assert torch.equal(scale_logits(config, logits), logits)
    config = dataclasses.replace(config, output_multiplier=0.5, final_logit_softcapping=3.0)
    torch.testing.assert_close(scale_logits(config, logits), 3 * torch.tanh(logits * 0.5 / 3))
    plain, scaled = make(), make(input_embedding_scale=2.0)
    state = State(0)
    for drafter in (plain, scaled):
        drafter.open(state)
    scaled._target.embedding = scaled._target.embedding / 2
    torch.testing.assert_close(
        block_hidden(plain, state, 3, 5), block_hidden(scaled, state, 3, 5), rtol=0, atol=1e-5
    )


def test_rotation_is_exact_at_a_million():
    cos, sin = rope_tables(torch.tensor([1_000_003]), 8, 10000.0)
    angles = [1_000_003 * 10000.0 ** (-2 * i / 8) for i in range(4)]
    want = torch.tensor(angles, dtype=torch.float64)
    torch.testing.assert_close(cos[0], want.cos().float(), rtol=0, atol=1e-6)
    torch.testing.assert_close(sin[0], want.sin().float(), rtol=0, atol=1e-6)


def test_full_attention_is_refused():
    with pytest.raises(ConfigError, match="full-attention layers"):
        make(layer_types=("sliding", "full"))


# ------------------------------------------------------------------------------ files


def save(folder, drafter: Drafter, rename=lambda name: name) -> None:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    state = {rename(k): v.contiguous() for k, v in drafter.state_dict().items()}
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    "rename",
    [
        lambda n: n,
        lambda n: "model." + n,
        lambda n: n + ".weight" if n.endswith("codebook") else n,
        lambda n: "model." + n + (".weight" if n.endswith("codebook") else ""),
    ],
)
def test_spellings(tmp_path, rename):
    config, drafter, _ = random_parts(1)
    save(tmp_path, drafter, rename)
    got = load_dflash2(Checkpoint.open(tmp_path), config)
    want = drafter.weights()
    for a, b in zip(_flat(got), _flat(want), strict=True):
        assert torch.equal(a, b)


def _flat(value):
    if isinstance(value, torch.Tensor):
        return [value]
    parts = (
        value
        if isinstance(value, tuple)
        else [getattr(value, f.name) for f in dataclasses.fields(value)]
    )
    return [tensor for part in parts for tensor in _flat(part)]


def _edit(folder, change) -> Checkpoint:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)
    return Checkpoint.open(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop("norm.weight"), "norm.weight"),
        (lambda t: t.pop("layers.1.mlp_conv.base_kernel"), "layers.1.mlp_conv.base_kernel"),
        (lambda t: t.pop("layers.0.mlp.up_proj.weight"), "layers.0.mlp.up_proj"),
        (lambda t: t.update({"mask_embedding": torch.zeros(48)}), "mask_embedding"),
        (
            lambda t: t.update({"candidate_selector.successor_codebook": torch.zeros(90, 6)}),
            r"successor_codebook is \[90, 6\], expected \[90, 7\]",
        ),
        (lambda t: t.update({"fc.weight": torch.zeros(48, 48)}), "fc.weight is"),
        (lambda t: t.update({"fc.bias": torch.zeros(48)}), "fc has a bias"),
    ],
)
def test_damaged_files_have_one_clear_message(tmp_path, change, message):
    config, drafter, _ = random_parts(1)
    save(tmp_path, drafter)
    ckpt = _edit(tmp_path, change)
    with pytest.raises(CheckpointError, match=message) as err:
        load_dflash2(ckpt, config)
    assert "\n" not in str(err.value)
