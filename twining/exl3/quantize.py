"""Quantising one linear layer to EXL3: regularise, find the global scale, search, pack.

Source: spec/exl3.md section 5. With a Hessian of the layer's inputs the errors of one group of
inputs are fed into the next (LDLQ) and the scales are refitted; without one each tile stands alone.
Letters: k, n padded in_features and out_features (multiples of 128), g the global scale.
The random signs come from the caller's seed, so a pack can be made again bit for bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from twining.exl3.codec import Codebook, decode_trellis, pack_states, to_tiles
from twining.exl3.encoder import TileEncoder
from twining.exl3.hadamard import hadamard128
from twining.exl3.ldlq import damp, encode_with_feedback, feedback_matrix, refit_scales
from twining.exl3.linear import Exl3Tensor, padded

TARGET_RMS = 1.24371088  # of the regularised weight: the natural deviation of 3INST values
# Feedback inflates what the encoder sees; the scale search looks at weights inflated alike.
_DRIFT = {1: 1.08, 1.5: 1.035, 2: 1.018, 2.5: 1.009, 3: 1.004}
_COARSE = [0.1 + 0.2 * i for i in range(10)]
_FINE_STEP = 0.075


@dataclass(frozen=True, slots=True)
class Quantized:
    """One quantised layer and how well it went.

    scale: global scale g. mse: |W - Q|^2 / |W|^2 of the finished fp16 tensors.
    output_error: the same under the Hessian, None when none was used (`is_calibrated` false).
    """

    packed: Exl3Tensor
    scale: float
    mse: float
    output_error: float | None

    @property
    def is_calibrated(self) -> bool:
        return self.output_error is not None


@dataclass(slots=True)
class _Regular:
    """Regularised weight [k, n] and the scales that undo it: W = diag(su) P weight P diag(sv)."""

    weight: Tensor
    su: Tensor
    sv: Tensor


def _random_signs(size: int, generator: torch.Generator) -> Tensor:
    """fp32 [size] of +-1, drawn on the CPU so that every device gets the same."""
    return torch.randint(0, 2, (size,), generator=generator).float() * 2 - 1


def _regularize(weight: Tensor, s_in: Tensor, s_out: Tensor, output_scales: bool) -> _Regular:
    """Spread the weight evenly: scale columns, rotate, scale rows, rotate (5.3, without g)."""
    column = weight.square().mean(0).sqrt()
    mean = float(column.mean())
    if mean > 1e-30:
        column = column / mean
    is_zero = column < 1e-30
    column = torch.where(is_zero, 0.1, column)
    sv = s_out * column + 1e-10 if output_scales else s_out.clone()
    work = hadamard128(weight / sv, 1)
    sv = torch.where(is_zero, 0.0, sv)
    row = work.square().mean(1).sqrt()
    row = torch.where(row < 1e-30, 0.1, row)
    # The negative sign is the format's habit; it is absorbed in suh.
    su = s_in * row / -TARGET_RMS + 1e-10
    return _Regular(hadamard128(work / su[:, None], 0), su, sv)


def _sample_tiles(tiles: Tensor) -> Tensor:
    """[s, 256] tiles for the scale search: a band along the diagonal and both extremes of size."""
    rows, cols = tiles.shape[0], tiles.shape[1]
    longest = max(rows, cols)
    i = torch.arange(longest).repeat_interleave(3)
    band = tiles[i % rows, (i + torch.arange(3).repeat(longest)) % cols]
    num_extreme = min(max(8, 3 * longest // 16), (rows * cols + 1) // 2)
    flat = tiles.reshape(-1, 256)
    order = flat.square().mean(1).argsort()
    return torch.cat([band, flat[order[-num_extreme:]], flat[order[:num_extreme]]])


def find_scale(weight: Tensor, encoder: TileEncoder) -> float:
    """The global scale g with the smallest error on a sample of tiles of weight [k, n] (5.4)."""
    sample = _sample_tiles(to_tiles(weight)) * _DRIFT.get(encoder.bits, 1.0)

    def errors(scales: list[float], tiles: Tensor) -> list[float]:
        factor = torch.tensor(scales, device=tiles.device)[:, None, None]
        scaled = (tiles * factor).reshape(-1, 256)
        coded = encoder.values(encoder.encode(scaled)).view(len(scales), -1, 256)
        return (coded / factor - tiles).square().mean((1, 2)).tolist()

    coarse = errors(_COARSE, sample[::3])
    centre = _COARSE[coarse.index(min(coarse))]
    scales = [centre + _FINE_STEP * step for step in (-2, -1, 0, 1, 2)]
    scales = [max(scale, 0.01) for scale in scales]
    fine = errors(scales, sample)
    best = fine.index(min(fine))
    offset = 0.0
    if 0 < best < 4:
        left, middle, right = fine[best - 1 : best + 2]
        curve = left - 2 * middle + right
        if curve > 0:
            offset = min(0.5, max(-0.5, 0.5 * (left - right) / curve))
    return max(scales[best] + offset * _FINE_STEP, 0.01)


def quantize_linear(
    weight: Tensor,
    encoder: TileEncoder,
    *,
    seed: int,
    hessian: Tensor | None = None,
    output_scales: bool = True,
    scale: float | None = None,
) -> Quantized:
    """Quantise weight [out, in] (any float dtype); the result has the padded dimensions.

    hessian: mean of x^T x over the layer's inputs, [in, in]; None for the uncalibrated mode, which
    is also what an empty or unusable Hessian falls back to. scale: g, searched for when None.
    Raises ValueError for a weight that is not 2-D and finite, a Hessian of another size, or weights
    so large or small that fp16 scales cannot hold them.
    """
    if weight.ndim != 2 or not weight.numel():
        raise ValueError(f"quantize: weight is {list(weight.shape)}; need [out, in]")
    device = encoder.device
    original = _padded_transpose(weight, device)
    k, n = original.shape
    if not bool(torch.isfinite(original).all()):
        raise ValueError("quantize: the weight has values that are not finite")
    generator = torch.Generator().manual_seed(seed)
    s_in = _random_signs(k, generator).to(device)
    s_out = _random_signs(n, generator).to(device)
    regular = _regularize(original, s_in, s_out, output_scales)
    g = find_scale(regular.weight, encoder) if scale is None else scale
    target, su = regular.weight * g, regular.su / g

    sv, in_features, codebook = regular.sv, weight.shape[1], encoder.codebook
    damped = None if hessian is None else _padded_hessian(hessian, in_features, k, device)
    lower = None if damped is None else feedback_matrix(damped, s_in)
    output_error = None
    if damped is None or lower is None:
        states = encoder.encode(to_tiles(target).view(-1, 256)).view(k // 16, n // 16, 256)
        trellis = pack_states(states, encoder.bits)
    else:
        trellis = pack_states(encode_with_feedback(target, lower, encoder), encoder.bits)
        inner = decode_trellis(trellis, codebook).float()
        coded = su[:, None] * hadamard128(hadamard128(inner, 0), 1) * sv
        by_in, by_out, output_error = refit_scales(original, coded, damped)
        su, sv = su * by_in, sv * by_out
    packed = _finish(trellis, su, sv, codebook, in_features)
    return Quantized(packed, g, _relative_mse(packed, weight), output_error)


def _padded_transpose(weight: Tensor, device: torch.device) -> Tensor:
    """fp32 [k, n], inputs x outputs, zeros in the padding."""
    out_features, in_features = weight.shape
    original = torch.zeros(padded(in_features), padded(out_features), device=device)
    original[:in_features, :out_features] = weight.to(device, torch.float32).T
    return original


def _padded_hessian(
    hessian: Tensor, in_features: int, k: int, device: torch.device
) -> Tensor | None:
    if hessian.shape != (in_features, in_features):
        raise ValueError(
            f"quantize: Hessian is {list(hessian.shape)}; the layer has {in_features} inputs"
        )
    full = torch.zeros(k, k, device=device)
    full[:in_features, :in_features] = hessian.to(device, torch.float32)
    return damp(full)


def _finish(
    trellis: Tensor, su: Tensor, sv: Tensor, codebook: Codebook, in_features: int
) -> Exl3Tensor:
    """The stored form; raises ValueError when fp16 cannot hold the scales."""
    suh, svh = su.half(), sv.half()
    is_finite = bool(torch.isfinite(suh).all() & torch.isfinite(svh).all())
    if not is_finite or not bool(suh[:in_features].any()):
        raise ValueError("quantize: weights too large or too small for fp16 scales; rescale them")
    return Exl3Tensor(trellis, suh, svh, codebook)


def _relative_mse(packed: Exl3Tensor, weight: Tensor) -> float:
    """|W - Q|^2 / |W|^2 without the padding; 0 for a weight of zeros reproduced as zeros."""
    exact = weight.to(packed.trellis.device, torch.float64)
    signal = exact.square().sum()
    noise = (packed.dense()[: len(exact), : exact.shape[1]] - exact).square().sum()
    return float(noise / signal) if float(signal) > 0 else float(noise)
