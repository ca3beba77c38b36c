"""Reading one linear layer from a checkpoint, whichever form it is stored in.

Source: spec/exl3.md sections 1, 4.1 and 7.3; spec/glm5_next.md 3.1 (FP8).
Letters: k padded in_features, n padded out_features (multiples of 128), bits = rate per weight.
The decision is made per module from the tensors present, never from the config: the EXL3 set
(`trellis` with `suh`/`su` and `svh`/`sv`) first, then `.weight` in any float type.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, overload

import torch
from torch import Tensor

from twining.errors import CheckpointError
from twining.exl3.codec import MARKERS, Codebook, bits_of_words, decode_trellis, is_rate
from twining.exl3.hadamard import BLOCK, rotate_signs

if TYPE_CHECKING:
    from twining.checkpoint.reader import Checkpoint

_SLAB = 1 << 22  # weights that `dense` expands to float64 at a time
_FLOATS = {"F32": 32.0, "F16": 16.0, "BF16": 16.0, "F8_E4M3": 8.0}


def padded(features: int) -> int:
    """The next multiple of 128: the size a quantised dimension has in the file."""
    return -(-features // BLOCK) * BLOCK


@dataclass(slots=True)
class Exl3Tensor:
    """One quantised matrix as stored: W = diag(suh) H D H diag(svh), inputs x outputs.

    trellis: int16 [k/16, n/16, 16 * bits]. suh: fp16 [k]. svh: fp16 [n]. bias: fp32 [n] or None.
    """

    trellis: Tensor
    suh: Tensor
    svh: Tensor
    codebook: Codebook
    bias: Tensor | None = None

    @property
    def bits(self) -> float:
        """Rate per weight."""
        return bits_of_words(self.trellis.shape[2])

    def inner(self) -> Tensor:
        """fp16 [k, n]: the decoded weight in the rotated basis."""
        return decode_trellis(self.trellis, self.codebook)

    def dense(self) -> Tensor:
        """fp32 [n, k] (out x in, padded): the exact weight, rounded once.

        float64 holds every partial sum of the rotations exactly, so the result is the same bits
        on every machine and for every order of addition.
        """
        k, n = len(self.suh), len(self.svh)
        out = torch.empty(n, k, dtype=torch.float32, device=self.trellis.device)
        step = max(1, _SLAB // (n * BLOCK)) * BLOCK
        svh = self.svh.double()
        for start in range(0, k, step):
            rows = slice(start, min(k, start + step))
            tiles = self.trellis[rows.start // 16 : rows.stop // 16]
            slab = rotate_signs(decode_trellis(tiles, self.codebook).double(), 0)
            slab = rotate_signs(slab, 1).mul_((self.suh[rows].double() / BLOCK)[:, None]).mul_(svh)
            out[:, rows] = slab.T
        return out


@dataclass(slots=True)
class LinearWeight:
    """A linear layer ready for use: fp32 [out, in] with true (unpadded) dimensions.

    bits: rate of the stored form (8, 16 or 32 when it was not quantised with EXL3).
    codebook: None for an unquantised layer.
    """

    weight: Tensor
    bias: Tensor | None
    bits: float
    codebook: Codebook | None


def has_linear(ckpt: "Checkpoint", module: str) -> bool:
    """Whether the checkpoint holds `module` as a linear layer, in either form."""
    return f"{module}.trellis" in ckpt or f"{module}.weight" in ckpt


def read_exl3(ckpt: "Checkpoint", module: str, out_features: int, in_features: int) -> Exl3Tensor:
    """The packed tensors of a quantised module, checked against the true dimensions.

    Raises CheckpointError naming the module for a missing tensor, wrong shape, dtype or marker.
    """
    k, n = padded(in_features), padded(out_features)
    info = ckpt.tensors[f"{module}.trellis"]
    if len(info.shape) == 2 and f"{module}.signs" in ckpt:
        raise CheckpointError(
            f"{module}: a quantised embedding table, which is not supported;"
            " convert with 16-bit embeddings"
        )
    if info.dtype != "I16" or len(info.shape) != 3 or info.shape[:2] != (k // 16, n // 16):
        raise CheckpointError(
            f"{module}.trellis is {info.dtype} {list(info.shape)}, expected I16"
            f" [{k // 16}, {n // 16}, 16 * bits]; the file does not fit this config"
        )
    try:
        bits = bits_of_words(info.shape[2])
    except ValueError as err:
        raise CheckpointError(f"{module}.trellis: {err}; the file is damaged") from None
    codebook = _read_codebook(ckpt, module)
    if not is_rate(bits, codebook):
        raise CheckpointError(
            f"{module}: {bits} bits with codebook {codebook}; half rates exist for mul1 only"
        )
    suh = _read_scales(ckpt, module, "su", k)
    svh = _read_scales(ckpt, module, "sv", n)
    bias = _read_bias(ckpt, module, out_features, n)
    return Exl3Tensor(ckpt.read(f"{module}.trellis"), suh, svh, codebook, bias)


@overload
def read_linear(
    ckpt: "Checkpoint",
    module: str,
    out_features: int,
    in_features: int,
    *,
    optional: Literal[False] = False,
) -> LinearWeight: ...


@overload
def read_linear(
    ckpt: "Checkpoint", module: str, out_features: int, in_features: int, *, optional: Literal[True]
) -> LinearWeight | None: ...


def read_linear(
    ckpt: "Checkpoint", module: str, out_features: int, in_features: int, *, optional: bool = False
) -> LinearWeight | None:
    """The layer `module` as fp32 [out_features, in_features], from whichever form is present.

    optional: return None when the module is absent instead of raising.
    Raises CheckpointError naming the module for anything missing, damaged or of another size.
    """
    if f"{module}.trellis" in ckpt:
        packed = read_exl3(ckpt, module, out_features, in_features)
        dense = packed.dense()[:out_features, :in_features]
        bias = None if packed.bias is None else packed.bias[:out_features].clone()
        return LinearWeight(dense.contiguous(), bias, packed.bits, packed.codebook)
    if f"{module}.weight" in ckpt:
        return _read_plain(ckpt, module, out_features, in_features)
    if optional:
        return None
    raise CheckpointError(_absence(ckpt, module))


def _absence(ckpt: "Checkpoint", module: str) -> str:
    """Why a module cannot be read, from the tensors that are there under its name."""
    present = sorted(
        name[len(module) + 1 :] for name in ckpt.tensors if name.startswith(f"{module}.")
    )
    if any(name.startswith("rank") for name in present):
        return f"{module}: rank-sliced EXL3 tensors are not supported; merge the ranks first"
    if any(name in ("suh", "svh", "su", "sv") for name in present):
        return (
            f"{module}: {', '.join(present[:4])} present, trellis missing;"
            " is the download incomplete?"
        )
    return f"{module}: neither {module}.weight nor {module}.trellis is in {ckpt.folder}"


def _read_codebook(ckpt: "Checkpoint", module: str) -> Codebook:
    found = [cb for cb in MARKERS if f"{module}.{cb}" in ckpt]
    if len(found) == 2:
        raise CheckpointError(f"{module}: both an mcg and a mul1 marker; the file is damaged")
    if not found:
        return Codebook.THREE_INST
    name = f"{module}.{found[0]}"
    info = ckpt.tensors[name]
    if info.dtype != "I32" or info.shape not in ((), (1,)):
        raise CheckpointError(f"{name} is {info.dtype} {list(info.shape)}, expected an I32 scalar")
    value = int(ckpt.read(name).reshape(()).item()) & 0xFFFFFFFF
    if value != MARKERS[found[0]]:
        raise CheckpointError(
            f"{name} holds {value:#010x}; the only known multiplier is {MARKERS[found[0]]:#010x}"
        )
    return found[0]


def _read_scales(ckpt: "Checkpoint", module: str, side: str, size: int) -> Tensor:
    """fp16 [size] from `suh`/`svh`, or from the packed signs `su`/`sv` of early files."""
    full, signs = f"{module}.{side}h", f"{module}.{side}"
    if full in ckpt:
        info = ckpt.tensors[full]
        if info.dtype != "F16" or info.shape != (size,):
            raise CheckpointError(
                f"{full} is {info.dtype} {list(info.shape)}, expected F16 [{size}];"
                " the file does not fit this config"
            )
        scales = ckpt.read(full)
        if not bool(torch.isfinite(scales).all()):
            raise CheckpointError(f"{full} has values that are not finite; the file is damaged")
        return scales
    if signs not in ckpt:
        raise CheckpointError(
            f"{module}: trellis present, {side}h missing; is the download incomplete?"
        )
    info = ckpt.tensors[signs]
    if info.dtype != "I16" or info.shape != (size // 16,):
        raise CheckpointError(
            f"{signs} is {info.dtype} {list(info.shape)}, expected I16 [{size // 16}]"
        )
    return unpack_signs(ckpt.read(signs))


def unpack_signs(packed: Tensor) -> Tensor:
    """fp16 [16 w] of +1 and -1 from int16 [w]; bit 0 of word 0 is channel 0, a set bit is -1."""
    bit = (packed.to(torch.int32)[:, None] >> torch.arange(16, device=packed.device)) & 1
    return (1 - 2 * bit).reshape(-1).to(torch.float16)


def _read_bias(ckpt: "Checkpoint", module: str, true: int, stored: int) -> Tensor | None:
    name = f"{module}.bias"
    if name not in ckpt:
        return None
    info = ckpt.tensors[name]
    if info.dtype not in _FLOATS or info.shape not in ((true,), (stored,)):
        raise CheckpointError(
            f"{name} is {info.dtype} {list(info.shape)}, expected a float tensor of {true} values"
        )
    bias = ckpt.read(name, torch.float32)
    return torch.nn.functional.pad(bias, (0, stored - len(bias)))


def _read_plain(
    ckpt: "Checkpoint", module: str, out_features: int, in_features: int
) -> LinearWeight:
    name = f"{module}.weight"
    info = ckpt.tensors[name]
    if info.dtype not in _FLOATS:
        raise CheckpointError(f"{name} is {info.dtype}; expected F32, F16, BF16 or F8_E4M3")
    sizes_out = (out_features, padded(out_features))
    sizes_in = (in_features, padded(in_features))
    if len(info.shape) != 2 or info.shape[0] not in sizes_out or info.shape[1] not in sizes_in:
        raise CheckpointError(
            f"{name} is {list(info.shape)}, expected [{out_features}, {in_features}];"
            " the file does not fit this config"
        )
    weight = _read_fp8(ckpt, name) if info.dtype == "F8_E4M3" else ckpt.read(name, torch.float32)
    bias = _read_bias(ckpt, module, out_features, padded(out_features))
    return LinearWeight(
        weight=weight[:out_features, :in_features].contiguous(),
        bias=None if bias is None else bias[:out_features].clone(),
        bits=_FLOATS[info.dtype],
        codebook=None,
    )


def _read_fp8(ckpt: "Checkpoint", name: str) -> Tensor:
    """fp32 weight from e4m3 values and one fp32 scale per 128 x 128 block (`<name>_scale_inv`)."""
    scale_name = f"{name}_scale_inv"
    rows, cols = ckpt.tensors[name].shape
    blocks = (-(-rows // BLOCK), -(-cols // BLOCK))
    if scale_name not in ckpt:
        raise CheckpointError(f"{name} is F8_E4M3 but {scale_name} is missing; download it again")
    if ckpt.tensors[scale_name].shape != blocks:
        raise CheckpointError(
            f"{scale_name} is {list(ckpt.tensors[scale_name].shape)}, expected {list(blocks)}"
        )
    scale = ckpt.read(scale_name, torch.float32)
    scale = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
    return ckpt.read(name).float() * scale
