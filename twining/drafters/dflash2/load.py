"""Read a DFlash2 checkpoint: EXL3 or plain per tensor, in any of the known spellings.

Source: spec/dflash2.md A.2 (names, shapes) and H.3 (what files get wrong), spec/exl3.md 4.6.
Everything becomes dense float32. H hidden, I MLP width, G convolution groups, V vocabulary.
"""

import torch
from torch import Tensor

from twining.checkpoint.dflash2_config import DFlash2Config
from twining.checkpoint.reader import Checkpoint
from twining.drafters.dflash2.model import ConvWeights, DFlash2Weights, LayerWeights
from twining.errors import CheckpointError
from twining.exl3.linear import read_linear


class _Reader:
    """Reads by unprefixed name; `model.` in front of every name is accepted."""

    def __init__(self, ckpt: Checkpoint) -> None:
        self.ckpt = ckpt
        self.prefix = "model." if "model.norm.weight" in ckpt else ""

    def tensor(self, name: str, *shape: int) -> Tensor:
        """A plain tensor as float32. Raises CheckpointError when missing or of another shape."""
        full = self.prefix + name
        self.ckpt.require([full])
        found = self.ckpt.shape(full)
        if found != shape:
            raise CheckpointError(
                f"{full} is {list(found)}, expected {list(shape)}; the file does not fit its config"
            )
        return self.ckpt.read(full, torch.float32)

    def norm(self, name: str, size: int) -> Tensor:
        return self.tensor(f"{name}.weight", size)

    def linear(self, module: str, outputs: int, inputs: int) -> Tensor:
        """[outputs, inputs] float32. Raises CheckpointError, also for a bias (none exists)."""
        linear = read_linear(self.ckpt, self.prefix + module, outputs, inputs)
        if linear.bias is not None:
            raise CheckpointError(
                f"{self.prefix}{module} has a bias, which a DFlash2 drafter must not have"
            )
        return linear.weight

    def codebook(self, name: str, vocab: int, rank: int) -> Tensor:
        """Codebooks are bare tensors; some exporters append `.weight`."""
        bare = f"candidate_selector.{name}"
        if self.prefix + bare not in self.ckpt and f"{self.prefix}{bare}.weight" in self.ckpt:
            bare += ".weight"
        return self.tensor(bare, vocab, rank)


def load_dflash2(ckpt: Checkpoint, config: DFlash2Config) -> DFlash2Weights:
    """All weights of a drafter. Raises CheckpointError for missing, extra or misshapen tensors."""
    read = _Reader(ckpt)
    hidden, rank = config.hidden_size, config.selector_rank
    weights = DFlash2Weights(
        fc=read.linear("fc", hidden, len(config.target_layer_ids) * hidden),
        hidden_norm=read.norm("hidden_norm", hidden),
        layers=tuple(_load_layer(read, config, i) for i in range(config.num_layers)),
        norm=read.norm("norm", hidden),
        predecessor=read.codebook("predecessor_codebook", config.vocab_size, rank),
        successor=read.codebook("successor_codebook", config.vocab_size, rank),
        selector=read.linear("candidate_selector.hidden_projection", rank, hidden),
    )
    extra = ckpt.unused()
    if extra:
        listed = ", ".join(extra[:4]) + (", ..." if len(extra) > 4 else "")
        raise CheckpointError(
            f"{ckpt.folder}: {len(extra)} tensors are not part of a DFlash2 drafter: {listed};"
            " it may be a drafter of another kind (own embedding or head, mask embedding)"
        )
    return weights


def _load_conv(read: _Reader, config: DFlash2Config, module: str) -> ConvWeights:
    hidden, taps = config.hidden_size, config.conv_kernel
    groups = hidden // config.conv_group
    return ConvWeights(
        base=read.tensor(f"{module}.base_kernel", 2, taps, hidden),
        projection=read.linear(f"{module}.kernel_projection", 2 * taps * groups, hidden),
    )


def _load_layer(read: _Reader, config: DFlash2Config, index: int) -> LayerWeights:
    layer = f"layers.{index}."
    hidden, width, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim
    return LayerWeights(
        input_norm=read.norm(layer + "input_layernorm", hidden),
        q=read.linear(layer + "self_attn.q_proj", q_size, hidden),
        k=read.linear(layer + "self_attn.k_proj", kv_size, hidden),
        v=read.linear(layer + "self_attn.v_proj", kv_size, hidden),
        o=read.linear(layer + "self_attn.o_proj", hidden, q_size),
        q_norm=read.norm(layer + "self_attn.q_norm", dim),
        k_norm=read.norm(layer + "self_attn.k_norm", dim),
        attention_conv=_load_conv(read, config, layer + "attention_conv"),
        post_norm=read.norm(layer + "post_attention_layernorm", hidden),
        gate=read.linear(layer + "mlp.gate_proj", width, hidden),
        up=read.linear(layer + "mlp.up_proj", width, hidden),
        down=read.linear(layer + "mlp.down_proj", hidden, width),
        mlp_conv=_load_conv(read, config, layer + "mlp_conv"),
    )
