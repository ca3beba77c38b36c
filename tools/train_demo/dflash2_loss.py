"""Training forward, losses and metrics of a DFlash2 drafter (spec/dflash2.md section G).

One sequence row carries many anchors; every anchor makes one block, and all blocks of a row share
the context K/V, computed once with gradient. Attention is one dense call over [context | blocks]
with a mask, so it runs in bf16 autocast on a GPU; norms, convolutions, residual, selector and
losses stay in float32. The forward mathematics is the engine's (twining/drafters/dflash2/model.py).

Typical step, with the frozen target giving taps and its final normed hidden rows:

    drafter = Drafter(config).to(device)
    batch = AnchorBatch(...)                       # anchors from sample_anchors
    teacher = Teacher(hidden=hidden, embed=E, head=W)
    with torch.autocast("cuda", torch.bfloat16):
        out = drafter_losses(drafter, batch, teacher, LossConfig())
    out.total.backward()

Letters: S rows of the batch, T tokens, A anchors per row, B block, K = B - 1, H hidden, V vocab,
C candidates.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from twining.checkpoint.dflash2_config import DFlash2Config
from twining.drafters.dflash2.model import (
    Attend,
    ConvWeights,
    DFlash2Weights,
    LayerWeights,
    block_forward,
    context_kv,
    encode_taps,
    pair_scores,
    rope_tables,
    scale_logits,
    selector_walk,
)

INIT_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class LossConfig:
    """unary: distance to the target's distribution (kl) or cross entropy on the label (ce).

    missing: a label outside the candidates is left out of the selector loss (hits_only) or takes
    the last slot (inject). labels: the target's argmax, or the data token (generated data).
    window: inference masks context per row as the engine does; trainer is relative to the anchor
    and one token wider. same_document: rows that fall into the next document are not supervised.
    """

    unary: Literal["kl", "ce"] = "kl"
    missing: Literal["hits_only", "inject"] = "hits_only"
    labels: Literal["target", "data"] = "target"
    window: Literal["inference", "trainer"] = "inference"
    same_document: bool = True
    gamma: float = 4.0
    selector_weight: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnchorBatch:
    """taps [S,T,NT*H]; input_ids, document_ids, position_ids [S,T] int; loss_mask [S,T] 0/1;
    anchors [S,A] packed indices; anchor_valid [S,A] bool."""

    taps: Tensor
    input_ids: Tensor
    document_ids: Tensor
    position_ids: Tensor
    loss_mask: Tensor
    anchors: Tensor
    anchor_valid: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Teacher:
    """The frozen target: hidden [S,T,H] after its final norm, embed [V,H], head [V,H]."""

    hidden: Tensor
    embed: Tensor
    head: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOutput:
    """Losses (scalars with gradient) and, per block row, what they were computed from."""

    total: Tensor
    unary: Tensor
    selector: Tensor
    hidden: Tensor  # [S,A,B,H]
    labels: Tensor  # [S,A,K]
    supervised: Tensor  # [S,A,K] float 0/1
    unary_rows: Tensor  # [S,A,K] unweighted unary loss
    candidates: Tensor  # [S,A,K,C]
    target_slot: Tensor  # [S,A,K]
    contains_label: Tensor  # [S,A,K] bool, before injection
    selector_rows: Tensor  # [S,A,K]
    path: Tensor  # [S,A,K] greedy selector walk from the anchor, as served


class _Conv(nn.Module):
    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        taps, hidden = config.conv_kernel, config.hidden_size
        base = torch.zeros(2, taps, hidden)
        base[:, 0] = 1.0  # identity: a fresh drafter is a plain DFlash one
        self.base_kernel = nn.Parameter(base)
        groups = hidden // config.conv_group
        self.kernel_projection = nn.Linear(hidden, 2 * taps * groups, bias=False)
        nn.init.zeros_(self.kernel_projection.weight)

    def weights(self) -> ConvWeights:
        return ConvWeights(base=self.base_kernel, projection=self.kernel_projection.weight)


class _Scale(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


def _linear(inputs: int, outputs: int) -> nn.Linear:
    linear = nn.Linear(inputs, outputs, bias=False)
    nn.init.normal_(linear.weight, std=INIT_STD)
    return linear


class _Layer(nn.Module):
    def __init__(self, c: DFlash2Config) -> None:
        super().__init__()
        H, I = c.hidden_size, c.intermediate_size  # noqa: E741
        self.input_layernorm, self.post_attention_layernorm = _Scale(H), _Scale(H)
        attn = {
            "q_proj": _linear(H, c.num_heads * c.head_dim),
            "k_proj": _linear(H, c.num_kv_heads * c.head_dim),
            "v_proj": _linear(H, c.num_kv_heads * c.head_dim),
            "o_proj": _linear(c.num_heads * c.head_dim, H),
            "q_norm": _Scale(c.head_dim),
            "k_norm": _Scale(c.head_dim),
        }
        self.self_attn = nn.ModuleDict(attn)
        mlp = {"gate_proj": _linear(H, I), "up_proj": _linear(H, I), "down_proj": _linear(I, H)}
        self.mlp = nn.ModuleDict(mlp)
        self.attention_conv, self.mlp_conv = _Conv(c), _Conv(c)

    def weights(self) -> LayerWeights:
        attn, mlp = self.self_attn, self.mlp
        return LayerWeights(
            input_norm=self.input_layernorm.weight,
            q=attn["q_proj"].weight,
            k=attn["k_proj"].weight,
            v=attn["v_proj"].weight,
            o=attn["o_proj"].weight,
            q_norm=attn["q_norm"].weight,
            k_norm=attn["k_norm"].weight,
            attention_conv=self.attention_conv.weights(),
            post_norm=self.post_attention_layernorm.weight,
            gate=mlp["gate_proj"].weight,
            up=mlp["up_proj"].weight,
            down=mlp["down_proj"].weight,
            mlp_conv=self.mlp_conv.weights(),
        )


class _Selector(nn.Module):
    def __init__(self, c: DFlash2Config) -> None:
        super().__init__()
        shape = (c.vocab_size, c.selector_rank)
        self.predecessor_codebook = nn.Parameter(torch.randn(shape) * INIT_STD)
        self.successor_codebook = nn.Parameter(torch.randn(shape) * INIT_STD)
        self.hidden_projection = _linear(c.hidden_size, c.selector_rank)


class Drafter(nn.Module):
    """Trainable DFlash2 parameters; state_dict() has the checkpoint's names (section A.2)."""

    def __init__(self, config: DFlash2Config) -> None:
        super().__init__()
        self.config = config
        hidden = config.hidden_size
        self.fc = _linear(len(config.target_layer_ids) * hidden, hidden)
        self.hidden_norm, self.norm = _Scale(hidden), _Scale(hidden)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_layers))
        self.candidate_selector = _Selector(config)

    def weights(self) -> DFlash2Weights:
        """The parameters as the engine's frozen weight set (no copy, gradients flow)."""
        selector = self.candidate_selector
        return DFlash2Weights(
            fc=self.fc.weight,
            hidden_norm=self.hidden_norm.weight,
            layers=tuple(layer.weights() for layer in self.layers),
            norm=self.norm.weight,
            predecessor=selector.predecessor_codebook,
            successor=selector.successor_codebook,
            selector=selector.hidden_projection.weight,
        )


def sample_anchors(
    loss_mask: Tensor,
    document_ids: Tensor,
    block: int,
    num_anchors: int,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Distinct random anchors: (anchors [S,A] sorted, valid [S,A] bool).

    An anchor and the token after it lie in one document, the token after it is supervised, and the
    last `block` positions are left out. Rows with too few such positions are padded, valid False.
    generator must live on the device of loss_mask.
    """
    usable = loss_mask[:, 1:].bool() & (document_ids[:, 1:] == document_ids[:, :-1])
    usable = F.pad(usable, (0, 1))
    usable[:, -block:] = False
    noise = torch.rand(usable.shape, generator=generator, device=usable.device)
    anchors = noise.masked_fill(~usable, -1.0).topk(num_anchors, dim=1).indices.sort(1).values
    return anchors, usable.gather(1, anchors)


def attention_mask(batch: AnchorBatch, config: DFlash2Config, loss: LossConfig) -> Tensor:
    """bool [S, A*B, T + A*B]: context of the anchor's document inside the window, own block."""
    S, T = batch.input_ids.shape
    A, B = batch.anchors.shape[1], config.block_size
    device = batch.anchors.device
    window = config.sliding_window or T
    anchors = batch.anchors[:, :, None, None]  # [S,A,1,1]
    tokens = torch.arange(T, device=device)
    rows = torch.arange(B, device=device)
    oldest = anchors - window
    if loss.window == "inference":
        oldest = oldest + rows[:, None] + 1
    same = batch.document_ids[:, None] == batch.document_ids.gather(1, batch.anchors)[..., None]
    context = same[:, :, None] & (tokens >= oldest) & (tokens < anchors)  # [S,A,B,T]
    inside = torch.ones(B, B, dtype=torch.bool, device=device)
    if config.is_causal[0]:
        inside = inside.tril()
    own = torch.eye(A, dtype=torch.bool, device=device)[:, None, :, None] & inside[:, None]
    own = own.reshape(1, A * B, A * B).expand(S, -1, -1)
    context = context.expand(S, A, B, T).reshape(S, A * B, T)
    return torch.cat([context, own], dim=-1)


def _shared_context_attend(
    weights: DFlash2Weights, config: DFlash2Config, batch: AnchorBatch, mask: Tensor
) -> Attend:
    """Blocks [S*A, B] attend to the context of their row and to themselves in one dense call."""
    S = batch.input_ids.shape[0]
    features = encode_taps(weights, config, batch.taps)
    tables = rope_tables(batch.position_ids, config.head_dim, config.rope_theta)

    def attend(index: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        context_k, context_v = context_kv(weights.layers[index], config, features, tables)
        keys = torch.cat([context_k, k.reshape(S, -1, *k.shape[2:])], 1)
        values = torch.cat([context_v, v.reshape(S, -1, *v.shape[2:])], 1)
        groups = config.num_heads // config.num_kv_heads
        out = F.scaled_dot_product_attention(
            q.reshape(S, -1, *q.shape[2:]).transpose(1, 2),
            keys.repeat_interleave(groups, 2).transpose(1, 2),
            values.repeat_interleave(groups, 2).transpose(1, 2),
            attn_mask=mask[:, None],
        )
        return out.transpose(1, 2).reshape(q.shape)

    return attend


def anchor_block_hidden(
    weights: DFlash2Weights,
    config: DFlash2Config,
    batch: AnchorBatch,
    embed: Tensor,
    loss: LossConfig,
) -> Tensor:
    """Normed hidden [S,A,B,H] of every anchor's block."""
    S, A = batch.anchors.shape
    B = config.block_size
    ids = torch.full((S * A, B), config.mask_token_id, device=batch.anchors.device)
    ids[:, 0] = batch.input_ids.gather(1, batch.anchors).reshape(-1)
    first = batch.position_ids.gather(1, batch.anchors).reshape(-1, 1)
    positions = first + torch.arange(B, device=first.device)
    mask = attention_mask(batch, config, loss)
    attend = _shared_context_attend(weights, config, batch, mask)
    hidden = block_forward(weights, config, F.embedding(ids, embed), positions, attend)
    return hidden.view(S, A, B, -1)


def _supervision(batch: AnchorBatch, block: int, same_document: bool) -> tuple[Tensor, Tensor]:
    """(packed index of rows 1..K clamped to T-1 [S,A,K], mask [S,A,K] float)."""
    S, A = batch.anchors.shape
    T = batch.input_ids.shape[1]
    wanted = batch.anchors[..., None] + torch.arange(1, block, device=batch.anchors.device)
    index = wanted.clamp(max=T - 1)
    flat = index.view(S, -1)
    mask = batch.loss_mask.gather(1, flat).view(S, A, -1).bool() & batch.anchor_valid[..., None]
    mask &= wanted < T
    if same_document:
        document = batch.document_ids.gather(1, batch.anchors)[..., None]
        mask &= batch.document_ids.gather(1, flat).view(S, A, -1) == document
    return index, mask.float()


def _candidate_slots(
    logits: Tensor, labels: Tensor, top_k: int, inject: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(candidates [...,C], slot of the label [...], whether it was among them [...])."""
    candidates = logits.detach().topk(top_k, dim=-1).indices
    match = candidates == labels[..., None]
    contains = match.any(-1)
    slot = torch.where(contains, match.long().argmax(-1), top_k - 1)
    if inject:
        last = torch.where(contains, candidates[..., -1], labels)
        candidates = torch.cat([candidates[..., :-1], last[..., None]], -1)
    return candidates, slot, contains


def drafter_losses(
    drafter: Drafter, batch: AnchorBatch, teacher: Teacher, loss: LossConfig
) -> LossOutput:
    """One evaluation of section G.3 over all anchors. The teacher receives no gradient."""
    config, weights = drafter.config, drafter.weights()
    S, A = batch.anchors.shape
    K = config.block_size - 1
    index, supervised = _supervision(batch, config.block_size, loss.same_document)
    hidden = anchor_block_hidden(weights, config, batch, teacher.embed, loss)
    logits = scale_logits(config, F.linear(hidden[:, :, 1:], teacher.head)).float()
    flat = index.view(S, -1)
    with torch.no_grad():
        rows = teacher.hidden.gather(1, (flat - 1)[..., None].expand(-1, -1, config.hidden_size))
        target_logits = F.linear(rows, teacher.head).float().view(S, A, K, -1)
        labels = batch.input_ids.gather(1, flat).view(S, A, K)
        if loss.labels == "target":
            labels = target_logits.argmax(-1)
    anchor_ids = batch.input_ids.gather(1, batch.anchors)
    log_q = logits.log_softmax(-1)
    if loss.unary == "kl":
        log_p = target_logits.log_softmax(-1)
        unary_rows = (log_p.exp() * (log_p - log_q)).sum(-1)
    else:
        unary_rows = -log_q.gather(-1, labels[..., None])[..., 0]
    inject = loss.missing == "inject"
    candidates, slot, contains = _candidate_slots(logits, labels, config.selector_top_k, inject)
    # The predecessor is the data token before the row (the anchor for row 1), not its label.
    previous = batch.input_ids.gather(1, flat - 1).view(S, A, K)
    gate = F.linear(hidden[:, :, 1:], weights.selector)
    scores = pair_scores(weights, gate, previous, candidates, logits.gather(-1, candidates))
    selector_rows = -scores.log_softmax(-1).gather(-1, slot[..., None])[..., 0]
    decay = torch.exp(-torch.arange(K, device=index.device) / loss.gamma)
    unary = (supervised * decay * unary_rows).sum() / (supervised.sum() + 1e-5)
    if inject:
        selector = (supervised * decay * selector_rows).sum() / (supervised.sum() + 1e-5)
    else:
        hits = supervised * contains * decay
        selector = (hits * selector_rows).sum() / (hits.sum() + 1e-5)
    with torch.no_grad():
        path, _ = selector_walk(
            weights,
            config,
            hidden[:, :, 1:].flatten(0, 1),
            logits.flatten(0, 1),
            anchor_ids.view(-1),
        )
    return LossOutput(
        total=unary + loss.selector_weight * selector,
        unary=unary,
        selector=selector,
        hidden=hidden,
        labels=labels,
        supervised=supervised,
        unary_rows=unary_rows,
        candidates=candidates,
        target_slot=slot,
        contains_label=contains,
        selector_rows=selector_rows,
        path=path.view(S, A, K),
    )


def acceptance_length(path: Tensor, continuation: Tensor, supervised: Tensor) -> Tensor:
    """Mean emitted tokens per round (accepted drafts + bonus) of walks against what the target
    wrote.

    path, continuation, supervised [S,A,K]; anchors with an unsupervised row count up to it.
    Rounds without any supervised row are left out. Returns a scalar.
    """
    agree = (path == continuation) & supervised.bool()
    rounds = supervised[..., 0].bool()
    accepted = agree.long().cumprod(-1).sum(-1)
    return 1 + (accepted * rounds).sum() / rounds.sum().clamp(min=1)
