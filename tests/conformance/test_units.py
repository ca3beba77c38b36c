"""Unit fixtures: convolution, forget gate, gated norm, KDA recurrence and chunk, mHC."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.conformance.sets import close, tensors
from twining.kernels.activation.reference import exp, sigmoid
from twining.kernels.causal_conv.reference import causal_conv, windows
from twining.kernels.kda.reference import CHUNK, chunk, log_decay, recurrence
from twining.kernels.mhc.reference import MhcWeights, expand_scale, mhc_post, mhc_pre
from twining.kernels.norm.reference import l2_norm, rms_norm
from twining.kernels.row_linear.reference import pad_rows, padded_rows

TOLERANCE = 1e-5
GNORM_EPS = 1e-2  # README; the file does not say


def group(path: Path, name: str) -> dict[str, Tensor]:
    """Tensors of one prefix, without it. A set may lack a group."""
    units = tensors(path)
    found = {k.removeprefix(f"{name}."): v for k, v in units.items() if k.startswith(f"{name}.")}
    if not found:
        pytest.skip(f"{path} has no group {name}")
    return found


def test_causal_conv_from_zeros_and_step(units_file):
    conv = group(units_file, "conv")
    weight = conv["weight"].t().contiguous()
    kernel, x = len(weight), conv["x"].t()
    history = torch.zeros(kernel - 1, x.shape[1])
    got = causal_conv(windows(torch.cat((history, x)), kernel), weight)
    close(got, conv["out"].t(), TOLERANCE)
    run = torch.cat((conv["state_in"][:, 1 - kernel :].t(), x[:1]))
    close(causal_conv(windows(run, kernel), weight), conv["step_out"].t(), TOLERANCE)
    close(run, conv["state_out"][:, -kernel:].t(), 0.0)


def test_forget_gate(units_file):
    gate = group(units_file, "fgate")
    f = gate["x"] @ gate["f_a"].t() @ gate["f_b"].t()
    heads = len(gate["A_log"])
    width = len(gate["dt_bias"]) // heads
    a_exp = gate["A_log"].exp().repeat_interleave(width)
    outs = [name for name in gate if name.startswith("out_")]
    for name in outs:
        bound = float(name.removeprefix("out_bound_")) if "out_bound_" in name else None
        got = log_decay(f, gate["dt_bias"], a_exp, bound).view(len(f), heads, width)
        close(got, gate[name], TOLERANCE)
    assert outs


def test_gated_norm(units_file):
    norm = group(units_file, "gnorm")
    normed = rms_norm(norm["x"], norm["weight"], GNORM_EPS)
    close(normed * sigmoid(norm["gate"]), norm["out"], TOLERANCE)


def kda_inputs(units: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    """q, k normalised as the model does; all [S, heads, D], beta [S, heads, 1]."""
    get = {key: units[f"{name}.{key}"] for key in ("q", "k", "v", "g")}
    get["q"] = l2_norm(get["q"]) * get["q"].shape[-1] ** -0.5
    get["k"] = l2_norm(get["k"])
    get["beta"] = units[f"{name}.beta"].unsqueeze(-1)
    return get


def test_kda(kda_case):
    """A recorded output of either form, from zeros or (`_init`) from the recorded state."""
    path, name, out = kda_case
    units, x = tensors(path), kda_inputs(tensors(path), name)
    form = out.partition("_")[0]
    state = units[f"{name}.state0"].clone()
    if not out.endswith("_init"):
        state.zero_()
    if form == "recurrent":
        got = recurrence(state, exp(x["g"]), x["k"], x["q"], x["v"], x["beta"])
    else:
        assert form == "chunk"
        got = by_chunks(state, x)
    close(got, units[f"{name}.{out}"], TOLERANCE)
    end = f"{name}.{out.replace('_out', '_state')}"
    if end in units:
        close(state, units[end], TOLERANCE)


def by_chunks(state: Tensor, x: dict[str, Tensor]) -> Tensor:
    """Outputs [S, heads, D]; the last chunk is padded with zeros."""
    outs = []
    for start in range(0, len(x["q"]), CHUNK):
        part = {}
        for key, value in x.items():
            rows = value[start : start + CHUNK]
            part[key] = F.pad(rows, (0, 0, 0, 0, 0, CHUNK - len(rows))).transpose(0, 1)
        outs.append(
            chunk(state, part["g"], part["k"], part["q"], part["v"], part["beta"]).transpose(0, 1)
        )
    return torch.cat(outs)[: len(x["q"])]


def test_mhc(mhc_case):
    path, name = mhc_case
    get = group(path, name)
    rms_eps, hc_eps, iters = get["params"].tolist()
    weights = MhcWeights(
        get["fn"],
        get["base"],
        expand_scale(get["scale"], get["streams"].shape[1]),
        rms_eps,
        hc_eps,
        int(iters),
    )
    rows = len(get["streams"])
    streams = pad_rows(get["streams"], padded_rows(rows))
    post, comb, collapsed = mhc_pre(streams, weights, block=16)
    close(post[:rows], get["post"], TOLERANCE)
    close(comb[:rows], get["comb"], TOLERANCE)
    close(collapsed[:rows], get["collapsed"], 1e-4)
    block_out = pad_rows(get["block_out"], len(streams))
    close(mhc_post(streams, block_out, post, comb)[:rows], get["new_streams"], 1e-4)
