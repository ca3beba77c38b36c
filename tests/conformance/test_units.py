"""Unit fixtures: convolution, forget gate, gated norm, KDA recurrence and chunk, mHC."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from twining.kernels.activation.reference import exp, sigmoid
from twining.kernels.causal_conv.reference import causal_conv, windows
from twining.kernels.kda.reference import CHUNK, chunk, log_decay, recurrence
from twining.kernels.mhc.reference import MhcWeights, expand_scale, mhc_post, mhc_pre
from twining.kernels.norm.reference import l2_norm, rms_norm
from twining.kernels.row_linear.reference import pad_rows, padded_rows

TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def units(golden: Path) -> dict[str, Tensor]:
    return load_file(golden / "glm5_next" / "units.safetensors")


def close(got: Tensor, want: Tensor, limit: float = TOLERANCE) -> None:
    assert got.shape == want.shape
    assert (got - want).abs().max().item() <= limit


def test_causal_conv_from_zeros_and_step(units):
    weight = units["conv.weight"].t().contiguous()
    x = units["conv.x"].t()
    history = torch.zeros(3, x.shape[1])
    close(causal_conv(windows(torch.cat((history, x)), 4), weight), units["conv.out"].t())
    run = torch.cat((units["conv.state_in"][:, 1:].t(), x[:1]))
    close(causal_conv(windows(run, 4), weight), units["conv.step_out"].t())
    close(run, units["conv.state_out"].t(), 0.0)


@pytest.mark.parametrize("bound", [-3.0, None])
def test_forget_gate(units, bound):
    f = units["fgate.x"] @ units["fgate.f_a"].t() @ units["fgate.f_b"].t()
    a_exp = units["fgate.A_log"].exp().repeat_interleave(32)
    got = log_decay(f, units["fgate.dt_bias"], a_exp, bound).view(9, 4, 32)
    close(got, units["fgate.out_no_bound" if bound is None else "fgate.out_bound_-3"])


def test_gated_norm(units):
    normed = rms_norm(units["gnorm.x"], units["gnorm.weight"], 1e-2)
    close(normed * sigmoid(units["gnorm.gate"]), units["gnorm.out"])


def kda_inputs(units: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """q, k normalised as the model does; all [S, heads, D], beta [S, heads, 1]."""
    get = {key: units[f"{name}.{key}"] for key in ("q", "k", "v", "g")}
    get["q"] = l2_norm(get["q"]) * get["q"].shape[-1] ** -0.5
    get["k"] = l2_norm(get["k"])
    get["beta"] = units[f"{name}.beta"].unsqueeze(-1)
    return get


CASES = [
    ("kda_d32", "", "recurrent_out", "recurrent_state"),
    ("kda_d32", "_init", "recurrent_out", "recurrent_state"),
    ("kda_d128", "_init", "recurrent_out", None),
]


@pytest.mark.parametrize(("name", "init", "out", "state_name"), CASES)
def test_recurrence(units, name, init, out, state_name):
    x = kda_inputs(units, name)
    state = units[f"{name}.state0"].clone()
    if not init:
        state.zero_()
    got = recurrence(state, exp(x["g"]), x["k"], x["q"], x["v"], x["beta"])
    close(got, units[f"{name}.{out}{init}"])
    if state_name:
        close(state, units[f"{name}.{state_name}{init}"])


@pytest.mark.parametrize(
    ("name", "init"), [("kda_d32", ""), ("kda_d32", "_init"), ("kda_d128", "_init")]
)
def test_chunks(units, name, init):
    x = kda_inputs(units, name)
    state = units[f"{name}.state0"].clone()
    if not init:
        state.zero_()
    outs = []
    for start in range(0, len(x["q"]), CHUNK):
        part = {}
        for key, value in x.items():
            rows = value[start : start + CHUNK]
            part[key] = F.pad(rows, (0, 0, 0, 0, 0, CHUNK - len(rows))).transpose(0, 1)
        outs.append(
            chunk(state, part["g"], part["k"], part["q"], part["v"], part["beta"]).transpose(0, 1)
        )
    close(torch.cat(outs)[: len(x["q"])], units[f"{name}.chunk_out{init}"])
    close(state, units[f"{name}.chunk_state{init}"])


@pytest.mark.parametrize("name", ["mhc_a", "mhc_b"])
def test_mhc(units, name):
    get = {key.split(".")[1]: value for key, value in units.items() if key.startswith(name)}
    rms_eps, hc_eps, iters = get["params"].tolist()
    weights = MhcWeights(
        get["fn"], get["base"], expand_scale(get["scale"], 4), rms_eps, hc_eps, int(iters)
    )
    rows = len(get["streams"])
    streams = pad_rows(get["streams"], padded_rows(rows))
    post, comb, collapsed = mhc_pre(streams, weights, block=16)
    close(post[:rows], get["post"])
    close(comb[:rows], get["comb"])
    close(collapsed[:rows], get["collapsed"], 1e-4)
    block_out = pad_rows(get["block_out"], len(streams))
    close(mhc_post(streams, block_out, post, comb)[:rows], get["new_streams"], 1e-4)
