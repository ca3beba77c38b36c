"""The two kinds of MLP: one dense SwiGLU, or routed experts with a shared one.

Source: spec/glm5_next.md section 9.
"""

from torch import Tensor

from twining.checkpoint.hf_config import Glm5NextConfig
from twining.kernels.moe.reference import dense_mlp, route, run_experts
from twining.kernels.row_linear.reference import row_linear
from twining.models.glm5_next.batch import RowBatch
from twining.models.glm5_next.loading import WeightSource


class DenseMlp:
    """gate_up [2 I, H], down [H, I]."""

    def __init__(self, source: WeightSource, config: Glm5NextConfig, index: int) -> None:
        self.limit = config.swiglu_limit
        self.gate_up, self.down = source.mlp(
            source.names.mlp(index), config.hidden_size, config.intermediate_size
        )

    def forward(self, batch: RowBatch, x_RH: Tensor) -> Tensor:
        return dense_mlp(x_RH, self.gate_up, self.down, limit=self.limit, block=batch.block)


class MoeMlp:
    """Router, experts [E, …] and the shared expert, which may be absent."""

    def __init__(self, source: WeightSource, config: Glm5NextConfig, index: int) -> None:
        names = source.names.moe(index, config.num_experts)
        H, width = config.hidden_size, config.moe_intermediate_size
        self.limit = config.swiglu_limit
        self.num_experts = config.num_experts_per_tok
        self.normalise = config.norm_topk_prob
        self.scaling = config.routed_scaling_factor
        self.router = source.linear(names.router, config.num_experts, H)
        self.bias = source.tensor(names.correction_bias, config.num_experts)
        self.gate_up, self.down = source.experts(names, H, width, config.num_experts)
        shared = config.num_shared_experts * width
        self.shared = source.mlp(names.shared, H, shared) if shared else None

    def route(self, batch: RowBatch, x_RH: Tensor) -> tuple[Tensor, Tensor]:
        """Expert ids and weights, each [R, experts per token]."""
        return route(
            row_linear(x_RH, self.router, block=batch.block),
            self.bias,
            num_experts=self.num_experts,
            normalise=self.normalise,
            scaling=self.scaling,
        )

    def forward(self, batch: RowBatch, x_RH: Tensor) -> Tensor:
        ids, weights = self.route(batch, x_RH)
        out = run_experts(
            x_RH,
            ids,
            weights,
            self.gate_up,
            self.down,
            num_real=batch.num_real,
            limit=self.limit,
        )
        if self.shared is not None:
            out += dense_mlp(x_RH, *self.shared, limit=self.limit, block=batch.block)
        return out


def make_mlp(source: WeightSource, config: Glm5NextConfig, index: int) -> DenseMlp | MoeMlp:
    """The MLP of a trunk layer; the MTP block (index num_layers) has experts."""
    sparse = index >= config.num_layers or config.mlp_types[index] == "sparse"
    return MoeMlp(source, config, index) if sparse else DenseMlp(source, config, index)
