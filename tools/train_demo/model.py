"""The demo target as a training module: packed documents, bf16 products, float32 streams.

Same mathematics as the engine's reference (spec/glm5_next.md), written for autograd on one GPU:
tokens of all rows flattened to N, documents packed back to back and kept apart by masks and
`cu_seqlens`; KDA through fla-core's chunk kernels on CUDA, through a token loop elsewhere (tests);
experts as one wide gated MLP, since 16 of them are cheaper computed than gathered. Parameter names
are the checkpoint's names, with stacked experts; `export.py` splits those.

Letters: B rows, T tokens a row, N = B·T, H hidden, S streams, A heads, P pools a row, E experts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.train_demo.arch import Arch

MAX_SEGMENTS = 1536  # documents and paddings of one batch

KdaFn = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Packed:
    """A batch of packed rows on the device.

    ids, doc, pos [B, T] int64 (doc is unique in a row and -1 for padding; pos counts inside the
    document; documents start at multiples of 4 in a row), weight [B, T] float32, cu_seqlens
    [MAX_SEGMENTS + 1] int32 over N, filled up with N (empty segments), so that its length is
    constant.
    """

    ids: Tensor
    doc: Tensor
    pos: Tensor
    weight: Tensor
    cu_seqlens: Tensor


def rms(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    y = x.float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def kda_loop(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor
) -> Tensor:
    """Token-by-token recurrence (spec 6.3). q k v g [N, A, D], beta [N, A] -> [N, A, D]. Slow: for
    tests.
    """
    q, k, v, g, beta = (x.float() for x in (q, k, v, g, beta))
    starts = set(cu_seqlens.tolist())
    state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
    out = []
    for t in range(q.shape[0]):
        if t in starts:
            state = torch.zeros_like(state)
        state = state * g[t].exp()[..., None]
        u = beta[t][:, None] * (v[t] - torch.einsum("akv,ak->av", state, k[t]))
        state = state + k[t][..., None] * u[:, None, :]
        out.append(torch.einsum("akv,ak->av", state, q[t]))
    return torch.stack(out)


def kda_fla(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, cu_seqlens: Tensor) -> Tensor:
    """fla-core's chunked kernels, same signature; q arrives scaled.

    The graph form is always used: its shapes depend on len(cu_seqlens) alone, so a captured
    step can replay.
    """
    from fla.ops.kda import chunk_kda

    out, _ = chunk_kda(
        q.bfloat16()[None],
        k.bfloat16()[None],
        v.bfloat16()[None],
        g.float()[None],
        beta.float()[None],
        scale=1.0,
        safe_gate=True,
        cu_seqlens=cu_seqlens,
        use_graph=True,
        max_num_seqs=len(cu_seqlens) - 1,
    )
    return out[0]


def shift(x: Tensor, by: int, pos: Tensor) -> Tensor:
    """Rows of x [N, C] delayed by `by` tokens, zero before the document's start (pos [N])."""
    moved = torch.cat([x.new_zeros(by, x.shape[1]), x[:-by]])
    return moved * (pos >= by)[:, None].to(x.dtype)


def sinkhorn(logits: Tensor, eps: float, iters: int) -> Tensor:
    """[N, S, S] -> doubly stochastic, in the division order of spec 5. Written out element by
    element so that the compiler fuses the whole iteration into one kernel.
    """
    size = logits.shape[-1]
    soft = logits.softmax(-1) + eps
    c = [[soft[:, i, j] for j in range(size)] for i in range(size)]

    def columns(m: list[list[Tensor]]) -> list[list[Tensor]]:
        sums = [sum((m[i][j] for i in range(1, size)), m[0][j]) + eps for j in range(size)]
        return [[m[i][j] / sums[j] for j in range(size)] for i in range(size)]

    def rows(m: list[list[Tensor]]) -> list[list[Tensor]]:
        sums = [sum((m[i][j] for j in range(1, size)), m[i][0]) + eps for i in range(size)]
        return [[m[i][j] / sums[i] for j in range(size)] for i in range(size)]

    c = columns(c)
    for _ in range(iters - 1):
        c = columns(rows(c))
    return torch.stack([torch.stack(row, -1) for row in c], -2)


def mhc_pre(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, norm: Tensor, arch: Arch
) -> tuple[Tensor, Tensor, Tensor]:
    """Streams [N, S, H] -> post [N, S], comb [N, S, S], normed sublayer input [N, H]."""
    s = arch.hc_mult
    flat = x.flatten(1)
    rstd = torch.rsqrt(flat.square().mean(-1, keepdim=True) + arch.rms_eps)
    m = (flat @ fn.t()) * rstd
    pre = torch.sigmoid(m[:, :s] * scale[0] + base[:s]) + arch.hc_eps
    post = 2 * torch.sigmoid(m[:, s : 2 * s] * scale[1] + base[s : 2 * s])
    comb = (m[:, 2 * s :] * scale[2] + base[2 * s :]).view(-1, s, s)
    comb = sinkhorn(comb, arch.hc_eps, arch.hc_iters)
    h = (pre[..., None] * x).sum(1)
    return post, comb, rms(h, norm, arch.rms_eps)


def mhc_post(x: Tensor, y: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """X'_j = post_j y + sum_i C_ij X_i."""
    mixed = (comb[..., None] * x[:, :, None, :]).sum(1)
    return mixed + post[..., None] * y.float()[:, None, :]


def clamped_swiglu(gate_up: Tensor, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)


def expert_activation(gate_up: Tensor, weights: Tensor, limit: float) -> Tensor:
    """gate_up [N, E, 2W], weights [N, E] -> [N, E, W]; the routing weight multiplies here, which is
    the same as behind the down projection.
    """
    return clamped_swiglu(gate_up, limit) * weights[..., None].to(gate_up.dtype)


class Kda(nn.Module):
    """Linear attention (spec 6). Input [N, H] normed, output [N, H]."""

    def __init__(self, arch: Arch, kda: KdaFn) -> None:
        super().__init__()
        self.arch, self.kda = arch, kda
        h, q, d = arch.hidden_size, arch.kda_heads * arch.kda_head_dim, arch.kda_head_dim
        for name in ("q_proj", "k_proj", "v_proj"):
            setattr(self, name, nn.Linear(h, q, bias=False))
        for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
            conv = nn.Module()
            weight = torch.zeros(q, 1, arch.conv_kernel)
            weight[:, :, -1] = 1.0
            conv.weight = nn.Parameter(weight + 0.05 * torch.randn_like(weight))
            setattr(self, name, conv)
        self.f_a_proj, self.f_b_proj = nn.Linear(h, d, bias=False), nn.Linear(d, q, bias=False)
        self.g_a_proj, self.g_b_proj = nn.Linear(h, d, bias=False), nn.Linear(d, q, bias=False)
        self.b_proj = nn.Linear(h, arch.kda_heads, bias=False)
        self.A_log = nn.Parameter(torch.zeros(arch.kda_heads))
        # Decay spread from about exp(-0.005) to exp(-0.6) a token, so that long and short
        # memories start out.
        self.dt_bias = nn.Parameter(torch.linspace(-7.0, -2.0, d).repeat(arch.kda_heads))
        self.o_norm = nn.Module()
        self.o_norm.weight = nn.Parameter(torch.ones(d))
        self.o_proj = nn.Linear(q, h, bias=False)

    def conv(self, x: Tensor, weight: Tensor, pos: Tensor) -> Tensor:
        out = x * weight[:, 0, -1]
        for by in range(1, self.arch.conv_kernel):
            out = out + shift(x, by, pos) * weight[:, 0, -1 - by]
        return F.silu(out)

    def gates(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = self.arch
        f = self.f_b_proj(self.f_a_proj(x)).float() + self.dt_bias
        f = f.view(-1, a.kda_heads, a.kda_head_dim)
        decay = a.gate_lower_bound * torch.sigmoid(self.A_log.exp()[:, None] * f)
        return decay, torch.sigmoid(self.b_proj(x).float()), self.g_b_proj(self.g_a_proj(x)).float()

    def forward(self, x: Tensor, batch: Packed) -> Tensor:
        a = self.arch
        pos = batch.pos.flatten()
        q, k, v = (
            self.conv(getattr(self, f"{n}_proj")(x), getattr(self, f"{n}_conv1d").weight, pos)
            .float()
            .view(-1, a.kda_heads, a.kda_head_dim)
            for n in "qkv"
        )
        q = q * torch.rsqrt(q.square().sum(-1, keepdim=True) + 1e-6) * a.kda_head_dim**-0.5
        k = k * torch.rsqrt(k.square().sum(-1, keepdim=True) + 1e-6)
        decay, beta, gate = self.gates(x)
        out = self.kda(q, k, v, decay, beta, batch.cu_seqlens).float()
        out = rms(out, self.o_norm.weight, a.rms_eps)
        return self.o_proj(out.flatten(1) * torch.sigmoid(gate))


class Indexer(nn.Module):
    """k-pool scores (spec 8). Inputs are detached: it learns from the attention it serves, nothing
    else.
    """

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        self.wq_b = nn.Linear(arch.q_lora_rank, arch.index_heads * arch.index_head_dim, bias=False)
        self.wk = nn.Linear(arch.hidden_size, arch.index_head_dim, bias=False)
        self.k_norm = nn.LayerNorm(arch.index_head_dim, eps=1e-6)
        self.weights_proj = nn.Linear(arch.hidden_size, arch.index_heads, bias=False)
        self.index_kpool_compress_gate = nn.Parameter(
            0.02 * torch.randn(arch.index_head_dim, arch.hidden_size)
        )
        self.index_kpool_compress_ape = nn.Parameter(
            torch.zeros(arch.index_pool, arch.index_head_dim)
        )

    def pools(self, x_BTH: Tensor) -> Tensor:
        a = self.arch
        shape = (x_BTH.shape[0], -1, a.index_pool, a.index_head_dim)
        keys = F.layer_norm(
            self.wk(x_BTH).float(), (a.index_head_dim,), self.k_norm.weight, self.k_norm.bias, 1e-6
        ).view(shape)
        gate = F.linear(x_BTH, self.index_kpool_compress_gate).float().view(shape)
        return ((gate + self.index_kpool_compress_ape).softmax(2) * keys).sum(2)

    def scores(self, x: Tensor, r: Tensor, pools_BPD: Tensor) -> Tensor:
        """x [B, Q, H], r [B, Q, R] of the queries -> [B, Q, P]."""
        a = self.arch
        q = self.wq_b(r).view(*r.shape[:2], a.index_heads, a.index_head_dim)
        dots = torch.einsum("bqhd,bpd->bqhp", q, pools_BPD.to(q.dtype)) * a.index_head_dim**-0.5
        weights = self.weights_proj(x) * a.index_heads**-0.5
        return torch.einsum("bqhp,bqh->bqp", dots.relu(), weights.to(dots.dtype))


class Mla(nn.Module):
    """Latent attention over the indexer's choice (spec 7, 8). Returns output and the indexer's
    loss.
    """

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        h, a = arch.hidden_size, arch.num_heads
        self.q_a_proj = nn.Linear(h, arch.q_lora_rank, bias=False)
        self.q_a_layernorm = nn.Module()
        self.q_a_layernorm.weight = nn.Parameter(torch.ones(arch.q_lora_rank))
        self.q_b_proj = nn.Linear(arch.q_lora_rank, a * arch.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(h, arch.kv_lora_rank, bias=False)
        self.kv_a_layernorm = nn.Module()
        self.kv_a_layernorm.weight = nn.Parameter(torch.ones(arch.kv_lora_rank))
        self.kv_b_proj = nn.Linear(
            arch.kv_lora_rank, a * (arch.qk_head_dim + arch.v_head_dim), bias=False
        )
        self.o_proj = nn.Linear(a * arch.v_head_dim, h, bias=False)
        self.indexer = Indexer(arch)

    def visible_pools(self, batch: Packed, query: Tensor) -> Tensor:
        """bool [B, Q, P]: complete pools of the query's own document. query [B, Q] row indices."""
        p = self.arch.index_pool
        last = torch.arange(p - 1, batch.ids.shape[1], p, device=query.device)
        doc_of_pool = batch.doc[:, last]
        doc_of_query = batch.doc.gather(1, query)
        return (last[None, None] <= query[..., None]) & (
            doc_of_pool[:, None] == doc_of_query[..., None]
        )

    def mask(self, scores: Tensor, visible: Tensor, batch: Packed, sparse: bool) -> Tensor:
        """bool [B, 1, T, T] of the tokens each token reads."""
        p = self.arch.index_pool
        t = torch.arange(batch.ids.shape[1], device=batch.ids.device)
        causal = t[:, None] >= t[None, :]
        tail = causal & (t[None, :] >= ((t + 1) // p * p)[:, None])
        same = batch.doc[:, :, None] == batch.doc[:, None, :]
        if not sparse:
            return (same & causal)[:, None]
        budget = min(self.arch.index_topk // p, visible.shape[-1])
        top = scores.float().masked_fill(~visible, float("-inf")).topk(budget, -1).indices
        chosen = torch.zeros_like(visible).scatter_(2, top, True) & visible
        return ((chosen.repeat_interleave(p, 2) | tail) & same)[:, None]

    def index_loss(
        self,
        q: Tensor,
        k: Tensor,
        x: Tensor,
        r: Tensor,
        pools: Tensor,
        batch: Packed,
        query: Tensor,
    ) -> Tensor:
        """KL from the heads' summed attention, pooled, to the indexer's softmax at sampled queries
        [B, Q].
        """
        a, p = self.arch, self.arch.index_pool
        pick = query[..., None]
        with torch.no_grad():
            qs = q.detach().gather(1, pick[..., None].expand(-1, -1, *q.shape[2:]))
            logits = torch.einsum("bqad,btad->baqt", qs, k.detach()).float() * a.qk_head_dim**-0.5
            t = torch.arange(k.shape[1], device=k.device)
            allowed = (t[None, None] <= pick) & (
                batch.doc[:, None] == batch.doc.gather(1, query)[..., None]
            )
            probs = logits.masked_fill(~allowed[:, None], float("-inf")).softmax(-1).sum(1)
            visible = self.visible_pools(batch, query)
            teacher = probs.view(*probs.shape[:2], -1, p).sum(-1) * visible
            mass = teacher.sum(-1, keepdim=True)
            teacher = teacher / (mass + 1e-9)
        xs = x.gather(1, pick.expand(-1, -1, x.shape[-1]))
        rs = r.gather(1, pick.expand(-1, -1, r.shape[-1]))
        student = self.indexer.scores(xs, rs, pools).float().masked_fill(~visible, -1e30)
        log_student = student.log_softmax(-1)
        kl = (teacher * ((teacher + 1e-9).log() - log_student)).masked_fill(~visible, 0.0).sum(-1)
        use = visible.any(-1) & (batch.doc.gather(1, query) >= 0)
        return (kl * use).sum() / use.sum().clamp(min=1)

    def forward(
        self, x: Tensor, batch: Packed, sparse: bool, query: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        a = self.arch
        b, t = batch.ids.shape
        x = x.view(b, t, -1)
        r = rms(self.q_a_proj(x), self.q_a_layernorm.weight, a.rms_eps)
        q = self.q_b_proj(r).view(b, t, a.num_heads, a.qk_head_dim)
        c = rms(self.kv_a_proj_with_mqa(x), self.kv_a_layernorm.weight, a.rms_eps)
        kv = self.kv_b_proj(c).view(b, t, a.num_heads, a.qk_head_dim + a.v_head_dim)
        k, v = kv.split([a.qk_head_dim, a.v_head_dim], -1)
        xd, rd = x.detach(), r.detach()
        pools = self.indexer.pools(xd)
        every = torch.arange(t, device=x.device).expand(b, t)
        with torch.no_grad():
            if sparse:
                visible = self.visible_pools(batch, every)
                scores = self.indexer.scores(xd, rd, pools)
            else:
                visible = scores = xd
            mask = self.mask(scores, visible, batch, sparse)
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
        )
        y = self.o_proj(out.transpose(1, 2).reshape(b * t, -1))
        loss = x.new_zeros(())
        if query is not None:
            loss = self.index_loss(q, k, xd, rd, pools, batch, query)
        return y, loss


class Mlp(nn.Module):
    """Dense or shared clamped SwiGLU (spec 9)."""

    def __init__(self, arch: Arch, width: int) -> None:
        super().__init__()
        self.limit = arch.swiglu_limit
        self.gate_proj = nn.Linear(arch.hidden_size, width, bias=False)
        self.up_proj = nn.Linear(arch.hidden_size, width, bias=False)
        self.down_proj = nn.Linear(width, arch.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = torch.cat([self.gate_proj(x), self.up_proj(x)], -1)
        return self.down_proj(clamped_swiglu(gate_up, self.limit))


class Moe(nn.Module):
    """Routed experts as one wide MLP with a gate per expert, plus the shared expert (spec 9.1)."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        e, w, h = arch.num_experts, arch.moe_intermediate_size, arch.hidden_size
        self.gate = nn.Module()
        self.gate.weight = nn.Parameter(torch.randn(e, h) * h**-0.5)
        self.gate.register_buffer("e_score_correction_bias", torch.zeros(e))
        self.experts_gate_up = nn.Parameter(torch.empty(e, 2 * w, h))
        self.experts_down = nn.Parameter(torch.empty(e, h, w))
        self.shared_experts = Mlp(arch, w)
        self.register_buffer("load", torch.zeros(e), persistent=False)
        self.activation: Callable = expert_activation

    def route(self, x: Tensor) -> Tensor:
        """[N, H] -> weights [N, E] with zeros for experts not chosen."""
        a = self.arch
        with torch.autocast(x.device.type, enabled=False):
            scores = torch.sigmoid(x.float() @ self.gate.weight.float().t())
            top = (scores.detach() + self.gate.e_score_correction_bias).topk(
                a.experts_per_token, -1
            )
            chosen = torch.zeros_like(scores).scatter_(1, top.indices, 1.0)
            picked = scores * chosen
            weights = picked / (picked.sum(-1, keepdim=True) + 1e-20) * a.routed_scaling
        if self.training:
            self.load.add_(chosen.sum(0).detach())
        return weights

    def forward(self, x: Tensor) -> Tensor:
        e, w2, h = self.experts_gate_up.shape
        weights = self.route(x)
        gate_up = F.linear(x, self.experts_gate_up.flatten(0, 1)).view(-1, e, w2)
        act = self.activation(gate_up, weights, self.arch.swiglu_limit)
        down = self.experts_down.transpose(0, 1).reshape(h, -1)
        return F.linear(act.flatten(1), down) + self.shared_experts(x)

    @torch.no_grad()
    def balance(self, rate: float) -> None:
        """Move the correction bias toward equal load (auxiliary-loss-free balancing)."""
        self.gate.e_score_correction_bias += rate * (self.load.mean() - self.load).sign()
        self.load.zero_()


class Layer(nn.Module):
    """One trunk layer: two mHC sites around a mixer and an MLP."""

    def __init__(self, arch: Arch, index: int, kda: KdaFn) -> None:
        super().__init__()
        self.arch = arch
        h, s = arch.hidden_size, arch.hc_mult
        self.is_kda = arch.layer_kinds[index] == "K"
        self.self_attn = Kda(arch, kda) if self.is_kda else Mla(arch)
        self.mlp = Mlp(arch, arch.intermediate_size) if index < arch.num_dense else Moe(arch)
        for site in ("attn", "ffn"):
            fn = 0.02 * torch.randn(2 * s + s * s, s * h)
            base = torch.cat([torch.randn(s), 0.5 * torch.randn(s), 3.0 * torch.eye(s).flatten()])
            setattr(self, f"hc_{site}_fn", nn.Parameter(fn))
            setattr(self, f"hc_{site}_base", nn.Parameter(base))
            setattr(self, f"hc_{site}_scale", nn.Parameter(torch.full((3,), 0.3)))
        self.input_layernorm = nn.Module()
        self.input_layernorm.weight = nn.Parameter(torch.ones(h))
        self.post_attention_layernorm = nn.Module()
        self.post_attention_layernorm.weight = nn.Parameter(torch.ones(h))

    def site(
        self, name: str, x: Tensor, norm: Tensor, pre: Callable
    ) -> tuple[Tensor, Tensor, Tensor]:
        fn, base, scale = (getattr(self, f"hc_{name}_{part}") for part in ("fn", "base", "scale"))
        with torch.autocast(x.device.type, enabled=False):
            return pre(x, fn, base, scale, norm, self.arch)


class MtpBlock(nn.Module):
    """Next-next-token block (spec 11): embedding of token i+1 and h_i predict token i+2."""

    def __init__(self, arch: Arch) -> None:
        super().__init__()
        self.arch = arch
        h = arch.hidden_size
        for name in ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm"):
            norm = nn.Module()
            norm.weight = nn.Parameter(torch.ones(h))
            setattr(self, name, norm)
        self.eh_proj = nn.Linear(2 * h, h, bias=False)
        self.self_attn = Mla(arch)
        self.mlp = Moe(arch)
        self.shared_head = nn.Module()
        self.shared_head.norm = nn.Module()
        self.shared_head.norm.weight = nn.Parameter(torch.ones(h))

    def forward(
        self, embed: Tensor, hidden: Tensor, batch: Packed, sparse: bool, query: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        eps = self.arch.rms_eps
        x = self.eh_proj(
            torch.cat([rms(embed, self.enorm.weight, eps), rms(hidden, self.hnorm.weight, eps)], -1)
        ).float()
        y, loss = self.self_attn(rms(x, self.input_layernorm.weight, eps), batch, sparse, query)
        x = x + y.float()
        x = x + self.mlp(rms(x, self.post_attention_layernorm.weight, eps)).float()
        return rms(x, self.shared_head.norm.weight, eps), loss


@dataclass(frozen=True)
class Output:
    """hidden [N, H] after the final norm; mtp_hidden [N, H] or None; index_loss scalar; taps [N,
    NT·H].
    """

    hidden: Tensor
    mtp_hidden: Tensor | None
    index_loss: Tensor
    taps: Tensor | None


class DemoModel(nn.Module):
    """The whole target. `fused` compiles the stream mixing; parameters stay float32."""

    def __init__(self, arch: Arch, *, kda: KdaFn, compile_mixing: bool) -> None:
        super().__init__()
        self.arch = arch
        self.embed_tokens = nn.Embedding(arch.vocab_size, arch.hidden_size)
        self.layers = nn.ModuleList(Layer(arch, i, kda) for i in range(arch.num_layers))
        self.norm = nn.Module()
        self.norm.weight = nn.Parameter(torch.ones(arch.hidden_size))
        self.lm_head = nn.Linear(arch.hidden_size, arch.vocab_size, bias=False)
        self.mtp = MtpBlock(arch)
        self.pre: Callable = torch.compile(mhc_pre) if compile_mixing else mhc_pre
        self.post: Callable = torch.compile(mhc_post) if compile_mixing else mhc_post
        if compile_mixing:
            activation = torch.compile(expert_activation)
            for module in self.modules():
                if isinstance(module, Moe):
                    module.activation = activation
        self.init_weights()

    def init_weights(self) -> None:
        for name, p in self.named_parameters():
            if name.startswith(("embed_tokens", "lm_head")):
                nn.init.normal_(p, std=0.5 if "embed" in name else 0.02)
            elif name.endswith("experts_gate_up") or (p.ndim == 2 and name.endswith("proj.weight")):
                nn.init.normal_(p, std=p.shape[-1] ** -0.5)
            elif name.endswith("experts_down"):
                nn.init.normal_(p, std=0.5 * p.shape[-1] ** -0.5)

    def forward(
        self,
        batch: Packed,
        *,
        sparse: bool,
        query: Tensor | None = None,
        with_mtp: bool = True,
        taps: tuple[int, ...] = (),
    ) -> Output:
        arch = self.arch
        embed = self.embed_tokens(batch.ids.flatten()).float()
        x = embed[:, None].expand(-1, arch.hc_mult, -1)
        index_loss = embed.new_zeros(())
        tapped = []
        for i, layer in enumerate(self.layers):
            post, comb, h = layer.site("attn", x, layer.input_layernorm.weight, self.pre)
            if layer.is_kda:
                y = layer.self_attn(h, batch)
            else:
                y, loss = layer.self_attn(h, batch, sparse, query)
                index_loss = index_loss + loss
            x = self.post(x, y, post, comb)
            post, comb, h = layer.site("ffn", x, layer.post_attention_layernorm.weight, self.pre)
            x = self.post(x, layer.mlp(h), post, comb)
            if i in taps:
                tapped.append(x.mean(1))
        hidden = rms(x.mean(1), self.norm.weight, arch.rms_eps)
        mtp_hidden = None
        if with_mtp:
            following = torch.cat([embed[1:], embed[:1]])
            mtp_hidden, loss = self.mtp(following, hidden, batch, sparse, query)
            index_loss = index_loss + loss
        taps_out = torch.cat(tapped, -1) if taps else None
        return Output(hidden, mtp_hidden, index_loss, taps_out)
