"""The two JSON files that describe a finished pack: config.json and quantization_config.json.

Source: spec/exl3.md 4.3 and 4.4. Readers should rely on tensor headers, not on these; they are
written for people and for other programs.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from twining import __version__
from twining.exl3.codec import MARKERS, Codebook

_LEAVES = ("weight", "bias", "trellis", "suh", "svh", *MARKERS)


def note_storage(storage: dict[str, dict[str, Any]], name: str, tensor: Tensor) -> None:
    """Enter a stored tensor under its module in the table `tensor_storage`."""
    module, _, leaf = name.rpartition(".")
    entry = storage.setdefault(module if leaf in _LEAVES else name, {"stored_tensors": {}})
    entry["stored_tensors"][name] = {
        "shape": list(tensor.shape),
        "n_bytes": tensor.nbytes,
        "dtype": str(tensor.dtype),
    }


def mark_quantised(
    storage: dict[str, dict[str, Any]], rates: Iterable[tuple[str, float]], codebook: Codebook
) -> None:
    """Add rate and codebook to the entries of quantised modules, given as (module, bits)."""
    for module, bits in rates:
        storage[module] |= {"quant_format": "exl3", "bits_per_weight": whole(bits)}
        if codebook in MARKERS:
            storage[module][f"{codebook}_multiplier"] = MARKERS[codebook]


def quantization_config(
    source: Mapping[str, Any],
    *,
    bits: float,
    head_bits: float,
    codebook: Codebook,
    mtp_bits: float | None,
    vision_bits: float | None,
    calibration: tuple[int, int] | None,
) -> dict[str, Any]:
    """The dictionary both files carry. source: the original model's config.json.

    mtp_bits, vision_bits: None for a drafter. calibration: (rows, cols), None when uncalibrated.
    """
    result: dict[str, Any] = {
        "quant_method": "exl3",
        "version": __version__,
        "bits": whole(bits),
        "head_bits": whole(head_bits),
        "out_scales": "always",
        "codebook": str(codebook),
    }
    if mtp_bits is not None:
        result["mtp_bits"] = whole(mtp_bits)
    if vision_bits is not None:
        result["vision_bits"] = whole(vision_bits)
    if calibration is not None:
        result["calibration"] = {"rows": calibration[0], "cols": calibration[1]}
    text = source.get("text_config")
    original = source.get("quantization_config")
    if original is None and isinstance(text, dict):
        original = text.get("quantization_config")
    if original is not None:
        result["original_quantization_config"] = original
    return result


def write_configs(
    out_dir: Path,
    source: Mapping[str, Any],
    quantisation: dict[str, Any],
    storage: dict[str, dict[str, Any]],
    *,
    untie: bool,
) -> None:
    """Write both files. untie: the pack has a head of its own, so say so where the source does."""
    config: dict[str, Any] = json.loads(json.dumps(source))
    text = config.get("text_config")
    for part in (config, text):
        if isinstance(part, dict):
            part.pop("quantization_config", None)
            if untie and "tie_word_embeddings" in part:
                part["tie_word_embeddings"] = False
    _write(out_dir / "config.json", config | {"quantization_config": quantisation})
    _write(out_dir / "quantization_config.json", quantisation | {"tensor_storage": storage})


def whole(bits: float) -> float:
    """4.0 as 4, the way other readers expect a rate; 3.5 stays."""
    return int(bits) if bits == int(bits) else bits


def _write(path: Path, value: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
