"""The vision tower: patch rows to embeddings of the text model, and where those go in a prompt.

Source: spec/glm5_next.md section 12. Everything is float32.
Letters: n patches of one frame, gh x gw patch grid, C tower width, A heads, D head dim, H hidden of
the text model, T prompt tokens. Patches come in merge-block order: 4 consecutive rows are one
2 x 2 block and become one token.

Each frame (a picture, or one temporal patch of a video) runs through the tower alone. Attention
never crosses frames, so nothing is lost, and an embedding depends on its own frame only (P1).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from twining.checkpoint.hf_config import Glm5NextConfig, VisionConfig
from twining.checkpoint.naming import TensorNames
from twining.checkpoint.reader import Checkpoint
from twining.errors import CheckpointError
from twining.exl3.linear import LinearWeight, read_linear

Grid = tuple[int, int, int]  # (temporal patches, patch rows, patch columns)

_SCORES = 1 << 24  # attention scores held at a time; bounds memory for large pictures
_MLP_ROWS = 4096  # patches per MLP call, for the same reason
_MERGER_EPS = 1e-5  # LayerNorm of the merger; not a config value (12.6)
_ROPE_THETA = 10000.0


@dataclass(slots=True)
class _Mlp:
    gate: LinearWeight
    up: LinearWeight
    down: LinearWeight


@dataclass(slots=True)
class _Block:
    norm1: Tensor
    norm2: Tensor
    qkv: LinearWeight  # rows: q, k, v, each head-major
    q_norm: Tensor
    k_norm: Tensor
    proj: LinearWeight
    mlp: _Mlp


@dataclass(slots=True)
class VisionTower:
    """All weights of the tower. Build with load; forward is pure."""

    config: VisionConfig
    patch_weight: Tensor  # [C, 1176]
    patch_bias: Tensor  # [C]
    blocks: list[_Block]
    post_norm: Tensor  # [C]
    downsample_weight: Tensor  # [H, 4 * C], columns (block row, block column, channel)
    downsample_bias: Tensor  # [H]
    merger_proj: LinearWeight
    merger_norm_weight: Tensor  # [H]
    merger_norm_bias: Tensor  # [H]
    merger: _Mlp

    @classmethod
    def load(cls, ckpt: Checkpoint, config: VisionConfig) -> "VisionTower":
        """Read the tower, EXL3 or plain per linear. Raises CheckpointError."""
        return _Loader(ckpt, config).tower()

    @torch.inference_mode()
    def forward(self, pixel_values: Tensor, grid: Sequence[Grid]) -> Tensor:
        """Embeddings fp32 [tokens, H] in frame order, block raster order inside a frame.

        pixel_values: float [sum of t * gh * gw, C_in * 2 * patch * patch], one grid per picture or
        video. Raises ValueError when they do not fit each other or the config.
        """
        sizes = [gh * gw for t, gh, gw in grid for _ in range(t)]
        shape = (sum(sizes), self.config.patch_values)
        merge = self.config.spatial_merge_size
        if any(min(g) < 1 or g[1] % merge or g[2] % merge for g in grid) or not grid:
            raise ValueError(f"grid {list(grid)}: needs positive sizes, rows and columns even")
        if tuple(pixel_values.shape) != shape:
            raise ValueError(f"pixel_values is {list(pixel_values.shape)}, grid needs {shape}")
        frames = torch.split(pixel_values.float(), sizes)
        planes = [(gh, gw) for t, gh, gw in grid for _ in range(t)]
        return torch.cat([self._frame(x, *p) for x, p in zip(frames, planes, strict=True)])

    def _frame(self, pixels_nP: Tensor, gh: int, gw: int) -> Tensor:
        x_nC = F.linear(pixels_nP, self.patch_weight, self.patch_bias)
        cos_nD, sin_nD = rotary(gh, gw, self.config.head_dim)
        for block in self.blocks:
            x_nC = self._block(block, x_nC, cos_nD, sin_nD)
        return self._merge(x_nC)

    def _block(self, block: _Block, x_nC: Tensor, cos_nD: Tensor, sin_nD: Tensor) -> Tensor:
        eps = self.config.block_norm_eps
        x_nC = x_nC + self._attention(block, _rms(x_nC, block.norm1, eps), cos_nD, sin_nD)
        h_nC = _rms(x_nC, block.norm2, eps)
        limit = self.config.swiglu_limit
        return x_nC + torch.cat(
            [_swiglu(block.mlp, h, limit) for h in torch.split(h_nC, _MLP_ROWS)]
        )

    def _attention(self, block: _Block, h_nC: Tensor, cos_nD: Tensor, sin_nD: Tensor) -> Tensor:
        A, D = self.config.num_heads, self.config.head_dim
        eps = self.config.rms_norm_eps
        n = len(h_nC)
        q_nAD, k_nAD, v_nAD = _linear(block.qkv, h_nC).view(n, 3, A, D).unbind(1)
        q_AnD = _rotate(_rms(q_nAD, block.q_norm, eps), cos_nD, sin_nD).transpose(0, 1) * D**-0.5
        k_ADn = _rotate(_rms(k_nAD, block.k_norm, eps), cos_nD, sin_nD).permute(1, 2, 0)
        v_AnD = v_nAD.transpose(0, 1)
        # Query rows in slices whose size follows from n alone, so a frame's result is its own.
        step = max(16, _SCORES // (A * n))
        out = [torch.softmax(q @ k_ADn, dim=-1) @ v_AnD for q in torch.split(q_AnD, step, dim=1)]
        return _linear(block.proj, torch.cat(out, dim=1).transpose(0, 1).reshape(n, A * D))

    def _merge(self, x_nC: Tensor) -> Tensor:
        x_nC = _rms(x_nC, self.post_norm, self.config.rms_norm_eps)
        blocks = x_nC.reshape(-1, self.downsample_weight.shape[1])  # 4 rows: one 2 x 2 block
        m_TH = F.linear(blocks, self.downsample_weight, self.downsample_bias)
        m_TH = _linear(self.merger_proj, m_TH)
        norm = (self.merger_norm_weight, self.merger_norm_bias)
        m_TH = F.gelu(F.layer_norm(m_TH, m_TH.shape[-1:], *norm, eps=_MERGER_EPS))
        return _swiglu(self.merger, m_TH, self.config.swiglu_limit)


def _rms(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def _linear(layer: LinearWeight, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias)


def _swiglu(mlp: _Mlp, x: Tensor, limit: float) -> Tensor:
    """Clamped SwiGLU: the gate from above only and before the SiLU, the other side on both."""
    gate = F.silu(_linear(mlp.gate, x).clamp(max=limit))
    return _linear(mlp.down, gate * _linear(mlp.up, x).clamp(-limit, limit))


def _rotate(x_nAD: Tensor, cos_nD: Tensor, sin_nD: Tensor) -> Tensor:
    """Half-split pairing over all D dimensions."""
    low, high = x_nAD.chunk(2, dim=-1)
    return x_nAD * cos_nD[:, None] + torch.cat([-high, low], dim=-1) * sin_nD[:, None]


def rotary(gh: int, gw: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """cos and sin fp32 [gh * gw, head_dim] for patches in merge-block order (12.2).

    The first half of the angles follows the patch row, the second half the patch column.
    """
    rows = torch.arange(gh).view(gh // 2, 1, 2, 1).expand(-1, gw // 2, -1, 2)
    cols = torch.arange(gw).view(1, gw // 2, 1, 2).expand(gh // 2, -1, 2, -1)
    quarter = head_dim // 4
    theta = _ROPE_THETA ** (-torch.arange(quarter).float() / quarter)
    place = torch.stack([rows.reshape(-1), cols.reshape(-1)], dim=1).float()
    half = (place[:, :, None] * theta).flatten(1)
    angle = torch.cat([half, half], dim=1)
    return angle.cos(), angle.sin()


class _Loader:
    """Reads the tower's tensors by name, checking every shape against the config."""

    def __init__(self, ckpt: Checkpoint, config: VisionConfig) -> None:
        names = TensorNames.find(ckpt.tensors)
        if names.visual is None:
            raise CheckpointError(
                f"{ckpt.folder}: the config has a vision tower, the files have none;"
                " incomplete download, or start without vision"
            )
        self.ckpt = ckpt
        self.config = config
        self.prefix = names.visual

    def tensor(self, name: str, *shape: int) -> Tensor:
        """fp32, reshaped from any stored shape of the same size with the same first dimension."""
        full = f"{self.prefix}{name}"
        stored = self.ckpt.shape(full)
        tensor = self.ckpt.read(full, torch.float32)
        if stored[:1] != shape[:1] or tensor.numel() != torch.Size(shape).numel():
            raise CheckpointError(
                f"{full} is {list(stored)}, expected {list(shape)};"
                " the file does not fit config.json"
            )
        return tensor.reshape(shape)

    def linear(self, name: str, out: int, inp: int, *, bias: bool) -> LinearWeight:
        layer = read_linear(self.ckpt, f"{self.prefix}{name}", out, inp)
        if bias and layer.bias is None:
            raise CheckpointError(
                f"{self.prefix}{name}.bias is missing; incomplete download, or of another model"
            )
        return layer

    def qkv(self, attn: str) -> LinearWeight:
        """One fused layer, or q, k and v apart; a pack may keep a redundant fused copy (4.5)."""
        C = self.config.hidden_size
        split = [f"{attn}{x}_proj" for x in "qkv"]
        fused = f"{attn}qkv"
        if not any(
            f"{self.prefix}{split[0]}.{kind}" in self.ckpt for kind in ("trellis", "weight")
        ):
            return self.linear(fused, 3 * C, C, bias=True)
        parts = [self.linear(name, C, C, bias=True) for name in split]
        copies = [f"{self.prefix}{fused}.{kind}" for kind in ("weight", "bias")]
        self.ckpt.ignore(name for name in copies if name in self.ckpt)
        return LinearWeight(
            weight=torch.cat([p.weight for p in parts]),
            bias=torch.cat([p.bias for p in parts if p.bias is not None]),
            bits=sum(p.bits for p in parts) / 3,
            codebook=parts[0].codebook,
        )

    def mlp(self, prefix: str, width: int, inner: int, *, bias: bool) -> _Mlp:
        return _Mlp(
            gate=self.linear(f"{prefix}gate_proj", inner, width, bias=bias),
            up=self.linear(f"{prefix}up_proj", inner, width, bias=bias),
            down=self.linear(f"{prefix}down_proj", width, inner, bias=bias),
        )

    def block(self, index: int) -> _Block:
        config, prefix = self.config, f"blocks.{index}."
        C, D = config.hidden_size, config.head_dim
        return _Block(
            norm1=self.tensor(f"{prefix}norm1.weight", C),
            norm2=self.tensor(f"{prefix}norm2.weight", C),
            qkv=self.qkv(f"{prefix}attn."),
            q_norm=self.tensor(f"{prefix}attn.q_norm.weight", D),
            k_norm=self.tensor(f"{prefix}attn.k_norm.weight", D),
            proj=self.linear(f"{prefix}attn.proj", C, C, bias=True),
            mlp=self.mlp(f"{prefix}mlp.", C, config.intermediate_size, bias=True),
        )

    def tower(self) -> VisionTower:
        config = self.config
        C, H = config.hidden_size, config.out_hidden_size
        merge = config.spatial_merge_size
        # Stored [H, C, row, column]; columns here follow the order of a block's rows.
        downsample = self.tensor("downsample.weight", H, C, merge, merge)
        return VisionTower(
            config=config,
            patch_weight=self.tensor("patch_embed.proj.weight", C, config.patch_values),
            patch_bias=self.tensor("patch_embed.proj.bias", C),
            blocks=[self.block(i) for i in range(config.depth)],
            post_norm=self.tensor("post_layernorm.weight", C),
            downsample_weight=downsample.permute(0, 2, 3, 1).reshape(H, -1).contiguous(),
            downsample_bias=self.tensor("downsample.bias", H),
            merger_proj=self.linear("merger.proj", H, H, bias=False),
            merger_norm_weight=self.tensor("merger.post_projection_norm.weight", H),
            merger_norm_bias=self.tensor("merger.post_projection_norm.bias", H),
            merger=self.mlp("merger.", H, config.projection_intermediate_size, bias=False),
        )


def vision_embeddings(tower: VisionTower, pixel_values: Tensor, grid: Sequence[Grid]) -> Tensor:
    """Embeddings fp32 [tokens, H] of pictures or of a video; see VisionTower.forward."""
    return tower.forward(pixel_values, grid)


@dataclass(frozen=True, slots=True)
class Placeholders:
    """Positions in a prompt that stand for vision embeddings, each ascending."""

    image: list[int]
    video: list[int]


def placeholder_positions(ids: Sequence[int], config: Glm5NextConfig) -> Placeholders:
    """Where the embeddings go. Pictures and video frames share image_token_id (12.5): a position
    belongs to a video when more video-start than video-end tokens precede it."""
    found = Placeholders([], [])
    depth = 0
    for position, token in enumerate(ids):
        if token == config.video_start_token_id:
            depth += 1
        elif token == config.video_end_token_id:
            depth -= 1
        elif token == config.image_token_id:
            (found.video if depth > 0 else found.image).append(position)
    return found


def insert_embeddings(
    embeds_TH: Tensor, positions: Placeholders, image_rows: Tensor | None, video_rows: Tensor | None
) -> None:
    """Replace the rows at the placeholder positions, in place.

    image_rows, video_rows: [number of positions, H]; None stands for no rows.
    Raises ValueError when a prompt's placeholders and the embeddings differ in number.
    """
    for kind, places, rows in (
        ("image", positions.image, image_rows),
        ("video", positions.video, video_rows),
    ):
        have = 0 if rows is None else len(rows)
        if have != len(places):
            raise ValueError(f"{len(places)} {kind} placeholders in the prompt, {have} embeddings")
        if rows is not None and places:
            embeds_TH[torch.tensor(places)] = rows.to(embeds_TH.dtype)
