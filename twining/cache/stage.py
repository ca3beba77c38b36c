"""The cache planes of one stage: those of a run of trunk layers, and of the MTP block on the last.

Source: design.md P3, P4 and "Memory". Layers have one number per kind of plane over the whole
model: the MLA layers in order and then the MTP block in `latent`; the layers with an indexer of
their own and then the MTP block in `index`; the KDA layers in `recurrent`. A stage holds the slice
`layers` of each, and a plane's own number is the model's less `first`.
"""

import torch
from torch import Tensor

from twining.cache.index import IndexPlane
from twining.cache.latent import LatentPlane
from twining.cache.recurrent import RecurrentPlane
from twining.checkpoint.hf_config import Glm5NextConfig
from twining.config import LatentFormat


class StagePlanes:
    """trunk_layers: the model's layers that this stage runs."""

    __slots__ = ("_num_trunk_index", "index", "latent", "recurrent", "trunk_layers")

    def __init__(
        self,
        config: Glm5NextConfig,
        trunk_layers: range,
        *,
        num_pages: int,
        max_seqs: int,
        window: int,
        latent_format: LatentFormat,
        key_dtype: torch.dtype,
        has_mtp: bool,
    ) -> None:
        """has_mtp: the MTP block's planes are here. Raises ConfigError for formats or sizes."""
        self.trunk_layers = trunk_layers
        full = [i for i in config.mla_layers if config.indexer_types[i] == "full"]
        mla_first, num_mla = _run(config.mla_layers, trunk_layers)
        index_first, self._num_trunk_index = _run(full, trunk_layers)
        kda_first, num_kda = _run(config.kda_layers, trunk_layers)
        self.latent = LatentPlane(
            num_mla + has_mtp, num_pages, config.kv_lora_rank, latent_format, first=mla_first
        )
        self.index = IndexPlane(
            self._num_trunk_index + has_mtp,
            num_pages,
            max_seqs,
            pool=config.index_pool,
            dim=config.index_head_dim,
            window=window,
            dtype=key_dtype,
            first=index_first,
        )
        self.recurrent = RecurrentPlane(
            max_seqs,
            num_kda,
            heads=config.kda_heads,
            dim=config.kda_head_dim,
            kernel=config.conv_kernel,
            window=window,
            first=kda_first,
        )

    def reset(self, slot: int) -> None:
        """Planes of fixed size of an empty sequence."""
        self.recurrent.reset(slot)
        self.index.reset(slot)

    def commit_pools(self, slot: int, pages: list[int], first: int, num: int) -> None:
        """Write the first `num` candidates of the trunk's layers as pools first, first + 1, …"""
        if not num or not self._num_trunk_index:
            return
        trunk = slice(0, self._num_trunk_index)
        self.index.write_pools(trunk, pages, first, self.index.candidates[slot, trunk, :num])

    def export_pages(self, rows: Tensor, pages: Tensor) -> dict[str, Tensor]:
        """Copies of the paged planes: storage rows of `latent`, pages of `index`."""
        planes = self.latent.export_rows(rows)
        planes["index_keys"] = self.index.keys.index_select(1, pages)
        return planes

    def import_pages(self, rows: Tensor, pages: Tensor, planes: dict[str, Tensor]) -> None:
        """Write this stage's layers of exported planes (of the whole model)."""
        latent = self.latent.layers
        own = {name: t[latent] for name, t in planes.items() if name != "index_keys"}
        self.latent.import_rows(rows, own)
        self.index.keys.index_copy_(1, pages, planes["index_keys"][self.index.layers])

    def nbytes(self) -> dict[str, int]:
        """Bytes of each plane."""
        return {
            "latent": self.latent.nbytes,
            "index_keys": self.index.nbytes_paged,
            "index_slots": self.index.nbytes_slots,
            "kda": self.recurrent.nbytes,
        }


def _run(layers: tuple[int, ...] | list[int], stage: range) -> tuple[int, int]:
    """How many of the layers come before the stage, and how many are in it."""
    return sum(i < stage.start for i in layers), sum(i in stage for i in layers)
