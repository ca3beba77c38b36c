"""One trunk layer: token mixer and MLP, each between the collapse and the mix of the streams.

Source: spec/glm5_next.md section 4. Letters: R rows, N streams, H hidden.
"""

from torch import Tensor

from twining.checkpoint.hf_config import Glm5NextConfig
from twining.kernels.mhc.reference import mhc_post, mhc_pre
from twining.kernels.norm.reference import rms_norm
from twining.models.glm5_next.batch import RowBatch
from twining.models.glm5_next.kda import KdaMixer
from twining.models.glm5_next.loading import WeightSource
from twining.models.glm5_next.mla import MlaMixer
from twining.models.glm5_next.mlp import make_mlp


class TrunkLayer:
    """Weights of layer `index`."""

    def __init__(self, source: WeightSource, config: Glm5NextConfig, index: int) -> None:
        names = source.names
        norms = names.norms(index)
        self.eps = config.rms_norm_eps
        self.mixer_norm = source.tensor(norms[0], config.hidden_size)
        self.mlp_norm = source.tensor(norms[1], config.hidden_size)
        self.mixer_hyper = source.hyper(names.hyper(index, "attn"), config)
        self.mlp_hyper = source.hyper(names.hyper(index, "ffn"), config)
        kind = KdaMixer if config.layer_types[index] == "kda" else MlaMixer
        self.mixer = kind(source, config, index)
        self.mlp = make_mlp(source, config, index)

    def forward(self, batch: RowBatch, streams_RNH: Tensor) -> Tensor:
        """Streams entering the layer to streams leaving it."""
        post, comb, hidden = mhc_pre(streams_RNH, self.mixer_hyper, block=batch.block)
        out = self.mixer.forward(batch, rms_norm(hidden, self.mixer_norm, self.eps))
        streams_RNH = mhc_post(streams_RNH, out, post, comb)
        post, comb, hidden = mhc_pre(streams_RNH, self.mlp_hyper, block=batch.block)
        out = self.mlp.forward(batch, rms_norm(hidden, self.mlp_norm, self.eps))
        return mhc_post(streams_RNH, out, post, comb)
