"""DFlash2 forward mathematics as pure functions on a frozen set of weights.

Source: spec/dflash2.md section B. Used by the engine (float32) and by training (autocast): every
matrix product is F.linear or matmul, while norms, convolutions and the residual stay in float32.
How block rows attend to the context is the caller's business (a ring cache when serving, shared
context with many anchors when training), so `block_forward` takes an `attend` function.

Letters: N blocks, B rows of a block, T context tokens, H hidden, L layers, A query heads, KV key
heads, D head dim, J convolution taps, G convolution groups, C candidates, V vocabulary, r rank.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twining.checkpoint.dflash2_config import DFlash2Config

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N,B,A,D], block k [N,B,KV,D], block v [N,B,KV,D]) -> attention output [N,B,A,D]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvWeights:
    """base [2 sides, J, H]; projection [2*J*G, H], row = side * J*G + tap * G + group."""

    base: Tensor
    projection: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One drafter layer; matrices are [out, in]."""

    input_norm: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    q_norm: Tensor
    k_norm: Tensor
    attention_conv: ConvWeights
    post_norm: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    mlp_conv: ConvWeights


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlash2Weights:
    """fc [H, taps*H]; predecessor and successor [V, r]; selector [r, H]."""

    fc: Tensor
    hidden_norm: Tensor
    layers: tuple[LayerWeights, ...]
    norm: Tensor
    predecessor: Tensor
    successor: Tensor
    selector: Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dim, in float32."""
    x = x.float()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rope_tables(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [..., D/2] float32, of integer positions [...].

    Angles are float64: at a million tokens a float32 angle is already wrong by hundredths.
    """
    half = torch.arange(head_dim // 2, device=positions.device, dtype=torch.float64)
    angles = positions.double()[..., None] * theta ** (-2.0 * half / head_dim)
    return angles.cos().float(), angles.sin().float()


def rope(x: Tensor, tables: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate-half rotation of x [..., heads, D] with tables [..., D/2]."""
    cos, sin = tables[0].unsqueeze(-2), tables[1].unsqueeze(-2)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def encode_taps(weights: DFlash2Weights, config: DFlash2Config, taps: Tensor) -> Tensor:
    """Features f [..., H] of concatenated target taps [..., NT*H]."""
    return rms_norm(F.linear(taps, weights.fc), weights.hidden_norm, config.rms_norm_eps)


def context_kv(
    layer: LayerWeights, config: DFlash2Config, features: Tensor, tables: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor]:
    """Context K and V of one layer, each [..., KV, D], of features [..., H] (section B.2)."""
    shape = (*features.shape[:-1], config.num_kv_heads, config.head_dim)
    k = rms_norm(F.linear(features, layer.k).view(shape), layer.k_norm, config.rms_norm_eps)
    return rope(k, tables), F.linear(features, layer.v).view(shape).float()


def dynamic_kernels(conv: ConvWeights, h: Tensor) -> Tensor:
    """[..., 2 sides, J, G] from the normed input h [..., H] of a sublayer."""
    num_taps = conv.base.shape[1]
    groups = conv.projection.shape[0] // (2 * num_taps)
    kernels = F.linear(h, conv.projection)
    return kernels.view(*h.shape[:-1], 2, num_taps, groups).float()


def grouped_conv(x: Tensor, kernels: Tensor, base: Tensor) -> Tensor:
    """Causal dynamic convolution along the rows of each block (section B.4).

    x [N,B,H], kernels [N,B,J,G] of one side, base [J,H]. Row -1 is zero: nothing is read from the
    context or from the block before.
    """
    N, B, H = x.shape
    num_taps, groups = kernels.shape[2:]
    grouped = x.float().view(N, B, groups, H // groups)
    base = base.float().view(num_taps, groups, H // groups)
    out = (base[0] + kernels[:, :, 0, :, None]) * grouped
    for tap in range(1, min(num_taps, B)):
        delayed = F.pad(grouped[:, : B - tap], (0, 0, 0, 0, tap, 0))
        out = out + (base[tap] + kernels[:, :, tap, :, None]) * delayed
    return out.view(N, B, H)


def _attention_sublayer(
    index: int,
    layer: LayerWeights,
    config: DFlash2Config,
    x: Tensor,
    tables: tuple[Tensor, Tensor],
    attend: Attend,
) -> Tensor:
    N, B, _ = x.shape
    eps, dim = config.rms_norm_eps, config.head_dim
    h = rms_norm(x, layer.input_norm, eps)
    kernels = dynamic_kernels(layer.attention_conv, h)
    a = grouped_conv(h, kernels[:, :, 0], layer.attention_conv.base[0])
    q = F.linear(a, layer.q).view(N, B, config.num_heads, dim)
    k = F.linear(a, layer.k).view(N, B, config.num_kv_heads, dim)
    v = F.linear(a, layer.v).view(N, B, config.num_kv_heads, dim).float()
    q = rope(rms_norm(q, layer.q_norm, eps), tables)
    k = rope(rms_norm(k, layer.k_norm, eps), tables)
    out = F.linear(attend(index, q, k, v).reshape(N, B, -1), layer.o)
    return x + grouped_conv(out, kernels[:, :, 1], layer.attention_conv.base[1])


def _mlp_sublayer(layer: LayerWeights, config: DFlash2Config, x: Tensor) -> Tensor:
    h = rms_norm(x, layer.post_norm, config.rms_norm_eps)
    kernels = dynamic_kernels(layer.mlp_conv, h)
    a = grouped_conv(h, kernels[:, :, 0], layer.mlp_conv.base[0])
    out = F.linear(F.silu(F.linear(a, layer.gate)) * F.linear(a, layer.up), layer.down)
    return x + grouped_conv(out, kernels[:, :, 1], layer.mlp_conv.base[1])


def block_forward(
    weights: DFlash2Weights,
    config: DFlash2Config,
    embeds: Tensor,
    positions: Tensor,
    attend: Attend,
) -> Tensor:
    """Normed hidden rows [N,B,H] float32 of blocks; row t predicts its own position.

    embeds [N,B,H]: rows of the target embedding (anchor, then masks); positions [N,B] int64.
    """
    x = embeds.float() * config.input_embedding_scale
    tables = rope_tables(positions, config.head_dim, config.rope_theta)
    for index, layer in enumerate(weights.layers):
        x = _attention_sublayer(index, layer, config, x, tables, attend)
        x = _mlp_sublayer(layer, config, x)
    return rms_norm(x, weights.norm, config.rms_norm_eps)


def grouped_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Masked attention with grouped heads: q [N,B,A,D], k and v [N,KV,T,D], mask bool [N,B,T].

    Returns [N,B,A,D]. Every row must see at least one key (its own block row always is one).
    """
    N, B, A, D = q.shape
    KV = k.shape[1]
    # The query heads of one key head and the rows of a block share one product.
    grouped = q.view(N, B, KV, A // KV, D).permute(0, 2, 3, 1, 4).reshape(N, KV, -1, D)
    scores = grouped @ k.transpose(-1, -2) / math.sqrt(D)
    scores = scores.view(N, KV, A // KV, B, -1).masked_fill(~mask[:, None, None], -torch.inf)
    out = scores.softmax(-1).view(N, KV, (A // KV) * B, -1) @ v
    return out.view(N, KV, A // KV, B, D).permute(0, 3, 1, 2, 4).reshape(N, B, A, D)


def scale_logits(config: DFlash2Config, logits: Tensor) -> Tensor:
    """output_multiplier and the optional soft cap of head logits [..., V] (section B.5)."""
    if config.output_multiplier != 1.0:
        logits = logits * config.output_multiplier
    if config.final_logit_softcapping:
        cap = config.final_logit_softcapping
        logits = torch.tanh(logits / cap) * cap
    return logits


def pair_scores(
    weights: DFlash2Weights, gate: Tensor, previous: Tensor, candidates: Tensor, unary: Tensor
) -> Tensor:
    """Selector scores [..., C]: unary + sum_m P[previous, m] gate[m] Q[candidate, m], float32.

    gate [..., r] is `selector @ hidden`; previous [...] ids; candidates [..., C] ids.
    """
    keys = weights.predecessor[previous].float() * gate.float()
    # A product and a sum, not a matmul: autocast must not round the pair term.
    pair = (weights.successor[candidates].float() * keys.unsqueeze(-2)).sum(-1)
    return unary.float() + pair


def selector_walk(
    weights: DFlash2Weights, config: DFlash2Config, hidden: Tensor, logits: Tensor, anchors: Tensor
) -> tuple[Tensor, Tensor]:
    """Greedy left-to-right walk over the candidates of each row (section B.5).

    hidden [N,K,H] and scaled logits [N,K,V] of rows 1..K, anchors [N] ids. Returns (ids [N,K],
    winning scores [N,K]); ties go to the better unary rank.
    """
    unary, candidates = logits.float().topk(config.selector_top_k, dim=-1)
    gate = F.linear(hidden, weights.selector).float()
    previous, ids, scores = anchors, [], []
    for step in range(hidden.shape[1]):
        score = pair_scores(weights, gate[:, step], previous, candidates[:, step], unary[:, step])
        best = score.argmax(-1, keepdim=True)
        previous = candidates[:, step].gather(-1, best)[:, 0]
        ids.append(previous)
        scores.append(score.gather(-1, best)[:, 0])
    return torch.stack(ids, 1), torch.stack(scores, 1)
