"""Paged plane of MLA latents, one row per token and layer, in a choice of storage formats.

Source: spec/glm5_next.md 7, 16.4; spec/exl3.md 6 for the 8-, 6- and 4-bit forms.
Letters: L layers, S storage rows (pages x 256, plus one zero row), C latent width.
Rows are addressed by storage row; `CachePool` maps positions to rows through page tables. The last
storage row is never written and reads as zeros: the target of absent positions.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from twining.config import PAGE_SIZE, LatentFormat
from twining.errors import ConfigError
from twining.exl3.cache_codec import dequantize, quantize

_PLAIN = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_BITS = {"q8": 8, "q6": 6, "q4": 4}
_GROUP = 32  # values that share one scale


class LatentPlane:
    """Latents of all MLA layers. Reads return float32 whatever the format."""

    __slots__ = ("_bits", "_scales", "_values", "first", "width", "zero_row")

    def __init__(
        self, num_layers: int, num_pages: int, width: int, fmt: LatentFormat, *, first: int = 0
    ) -> None:
        """first: the model's number of this plane's first layer (see cache/stage.py).

        Raises ConfigError for an unknown format, or a width that it cannot hold.
        """
        rows = num_pages * PAGE_SIZE + 1
        self.width = width
        self.first = first
        self.zero_row = rows - 1
        self._scales: Tensor | None = None
        self._bits = _BITS.get(fmt, 0)
        if fmt in _PLAIN:
            self._values = torch.zeros(num_layers, rows, width, dtype=_PLAIN[fmt])
            return
        if not self._bits:
            raise ConfigError(
                f"latent_format={fmt!r} is unknown; use fp32, bf16, fp16, q8, q6 or q4"
            )
        if width % _GROUP:
            raise ConfigError(
                f"latent_format={fmt!r} needs latents in groups of {_GROUP}, but kv_lora_rank is"
                f" {width}; use fp32, bf16 or fp16"
            )
        groups = width // _GROUP
        self._values = torch.zeros(num_layers, rows, groups * self._bits, dtype=torch.int32)
        self._scales = torch.zeros(num_layers, rows, groups, dtype=torch.float16)

    def write(self, layer: int, rows_T: Tensor, latents_TC: Tensor) -> None:
        """Store float32 latents at the given storage rows."""
        if self._scales is None:
            self._values[layer].index_copy_(0, rows_T, latents_TC.to(self._values.dtype))
            return
        words, scales = quantize(latents_TC.half(), self._bits)
        self._values[layer].index_copy_(0, rows_T, words)
        self._scales[layer].index_copy_(0, rows_T, scales)

    def read(self, layer: int, rows: Tensor) -> Tensor:
        """Float32 latents [*rows.shape, C]."""
        flat = rows.reshape(-1)
        values = self._values[layer].index_select(0, flat)
        if self._scales is not None:
            scales = self._scales[layer].index_select(0, flat)
            values = dequantize(values, scales, self._bits)
        return values.float().view(*rows.shape, self.width)

    def export_rows(self, rows_T: Tensor) -> dict[str, Tensor]:
        """Copies of the stored form, all layers: what `import_rows` takes back."""
        planes = {"latent": self._values.index_select(1, rows_T)}
        if self._scales is not None:
            planes["latent_scale"] = self._scales.index_select(1, rows_T)
        return planes

    def import_rows(self, rows_T: Tensor, planes: dict[str, Tensor]) -> None:
        self._values.index_copy_(1, rows_T, planes["latent"])
        if self._scales is not None:
            self._scales.index_copy_(1, rows_T, planes["latent_scale"])

    @property
    def layers(self) -> slice:
        """Which of the whole model's layers of this kind are here."""
        return slice(self.first, self.first + len(self._values))

    @property
    def nbytes(self) -> int:
        return self._values.nbytes + (0 if self._scales is None else self._scales.nbytes)

    def tensors(self) -> Sequence[Tensor]:
        """The storage, for tests that poison it."""
        return (self._values,) if self._scales is None else (self._values, self._scales)
