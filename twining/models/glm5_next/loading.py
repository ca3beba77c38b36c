"""Reading the text model's tensors: every spelling and storage form, one error for the whole set.

Source: spec/glm5_next.md section 3; names come from checkpoint.naming, linears from exl3.linear.
A model is built twice by the same code: first with `WeightSource.dry`, which only checks presence
and hands out meta tensors, so that all missing tensors are reported before anything is read.
Everything is float32 on the CPU; tensors that must stay float32 are accepted in any float type.
"""

import math

import torch
from torch import Tensor

from twining.checkpoint.hf_config import Glm5NextConfig
from twining.checkpoint.naming import HyperNames, MlpNames, MoeNames, TensorNames
from twining.checkpoint.reader import Checkpoint
from twining.errors import CheckpointError
from twining.exl3.linear import read_linear
from twining.kernels.mhc.reference import MhcWeights, expand_scale

_FLOATS = ("F32", "F16", "BF16", "F64")


class WeightSource:
    """Hands out float32 weights of checked shapes, or meta tensors when dry.

    num_bytes: bytes of all weights handed out so far.
    """

    __slots__ = ("ckpt", "dry", "missing", "names", "num_bytes")

    def __init__(self, ckpt: Checkpoint, *, dry: bool) -> None:
        self.ckpt = ckpt
        self.dry = dry
        self.names = TensorNames.find(ckpt.tensors)
        self.missing: list[str] = []
        self.num_bytes = 0

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A bare tensor. Raises CheckpointError for another shape or a type that is not float."""
        self.num_bytes += 4 * math.prod(shape)
        if self.dry:
            if name not in self.ckpt:
                self.missing.append(name)
            return torch.empty(shape, device="meta")
        info = self.ckpt.tensors[name]
        if info.shape != shape or info.dtype not in _FLOATS:
            raise CheckpointError(
                f"{name} is {info.dtype} {list(info.shape)}, expected a float tensor"
                f" {list(shape)}; the file does not fit this config"
            )
        return self.ckpt.read(name, torch.float32)

    def linear(self, module: str, out_features: int, in_features: int) -> Tensor:
        """A linear layer without bias as float32 [out, in], quantised or not."""
        self.num_bytes += 4 * out_features * in_features
        if self.dry:
            if not self.names.has_module(module):
                self.missing.append(f"{module}.weight")
            return torch.empty(out_features, in_features, device="meta")
        layer = read_linear(self.ckpt, module, out_features, in_features)
        if layer.bias is not None and bool(layer.bias.count_nonzero()):
            raise CheckpointError(
                f"{module}.bias: this layer has no bias in the model; the checkpoint is of another"
                " architecture"
            )
        return layer.weight

    def hyper(self, names: HyperNames, config: Glm5NextConfig) -> MhcWeights:
        """One mHC site."""
        N = config.hc_mult
        num = N * (N + 2)
        scale = self.tensor(names.scale, 3)
        return MhcWeights(
            fn=self.tensor(names.fn, num, N * config.hidden_size),
            base=self.tensor(names.base, num),
            scale=scale if self.dry else expand_scale(scale, N),
            rms_eps=config.rms_norm_eps,
            hc_eps=config.hc_eps,
            iters=config.hc_iters,
        )

    def conv(self, names: tuple[str, ...], width: int, kernel: int) -> Tensor:
        """Short convolution, fused or split in the order q, k, v: [K, 3 width]."""
        rows = 3 * width // len(names)
        parts = []
        for name in names:
            # Some packs drop the middle dimension of a depthwise kernel.
            flat = not self.dry and len(self.ckpt.shape(name)) == 2
            shape = (rows, kernel) if flat else (rows, 1, kernel)
            parts.append(self.tensor(name, *shape).reshape(rows, kernel))
        return torch.cat(parts).t().contiguous()

    def mlp(self, names: MlpNames, hidden: int, width: int) -> tuple[Tensor, Tensor]:
        """(gate_up [2 width, hidden], down [hidden, width])."""
        gate_up = torch.cat(
            [self.linear(names.gate, width, hidden), self.linear(names.up, width, hidden)]
        )
        return gate_up, self.linear(names.down, hidden, width)

    def experts(self, names: MoeNames, hidden: int, width: int, num: int) -> tuple[Tensor, Tensor]:
        """(gate_up [E, 2 width, hidden], down [E, hidden, width]) from either layout."""
        if names.stacked_gate_up is not None and names.stacked_down is not None:
            return (
                self.tensor(names.stacked_gate_up, num, 2 * width, hidden),
                self.tensor(names.stacked_down, num, hidden, width),
            )
        device = "meta" if self.dry else "cpu"
        gate_up = torch.empty(num, 2 * width, hidden, device=device)
        down = torch.empty(num, hidden, width, device=device)
        for e, expert in enumerate(names.experts):
            gate_up[e, :width] = self.linear(expert.gate, width, hidden)
            gate_up[e, width:] = self.linear(expert.up, width, hidden)
            down[e] = self.linear(expert.down, hidden, width)
        return gate_up, down

    def raise_missing(self) -> None:
        """One CheckpointError naming the first missing tensors and their number."""
        self.ckpt.require(self.missing)

    def raise_unused(self) -> None:
        """One CheckpointError for text tensors that nothing has read."""
        prefixes = () if self.names.visual is None else (self.names.visual,)
        extra = self.ckpt.unused(prefixes)
        if extra:
            listed = ", ".join(extra[:4]) + (", ..." if len(extra) > 4 else "")
            raise CheckpointError(
                f"{self.ckpt.folder}: {len(extra)} tensors that this model has no place for:"
                f" {listed}; config.json and the weights do not belong together"
            )
