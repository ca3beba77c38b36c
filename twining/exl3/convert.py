"""Converting a whole model or drafter to an EXL3 pack, resumably.

Source: spec/exl3.md sections 4 and 5, spec/dflash2.md H. Two passes: every module is quantised into
a file of its own (an interrupted run continues there), then the pack is written in one go and the
partial files are removed. Without calibration data each layer is quantised from its weight alone.
"""

import re
import shutil
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from twining.checkpoint.hf_config import DFLASH2_ARCHITECTURE, architecture_of, parse_glm5_next
from twining.checkpoint.reader import TORCH_DTYPES, Checkpoint
from twining.checkpoint.writer import ShardWriter
from twining.errors import CheckpointError, ConfigError
from twining.exl3.codec import Codebook, is_rate
from twining.exl3.convert_config import (
    mark_quantised,
    note_storage,
    quantization_config,
    write_configs,
)
from twining.exl3.convert_partial import ModuleReport, PartialStore, stamp
from twining.exl3.convert_plan import (
    PLAIN,
    KeepJob,
    LinearJob,
    Plan,
    assign_bits,
    keep_vision,
    plan_dflash2,
    plan_glm5_next,
)
from twining.exl3.encoder import TileEncoder
from twining.exl3.linear import LinearWeight, padded, read_linear
from twining.exl3.quantize import quantize_linear

MAX_SHARD_BYTES = 8192 << 20
_WEIGHT_FILES = {".safetensors", ".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"}
_UNFINISHED = re.compile(r"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?|shard-\d+\.partial")
_REWRITTEN = {"config.json", "quantization_config.json", "model.safetensors.index.json"}


@dataclass(frozen=True, slots=True)
class Calibration:
    """Captured inputs. hessians: module of the pack -> mean of x^T x, [in, in].

    rows, cols: sequences and tokens per sequence they come from; written into the pack's config.
    Modules without an entry are quantised uncalibrated.
    """

    hessians: Mapping[str, Tensor]
    rows: int
    cols: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertSettings:
    """Rates are bits per weight: 1..8, with mul1 also 1.5, 2.5 and 3.5; 16 leaves a module alone.

    bits_for: (shell-style pattern of module names, rate); the last match wins.
    """

    bits: float
    bits_for: tuple[tuple[str, float], ...] = ()
    head_bits: float = 6
    mtp_bits: float = 4
    vision_bits: float = 6
    codebook: Codebook = Codebook.MUL1
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ConfigError naming the setting, its value and the choices."""
        named = [(name, getattr(self, name)) for name in _RATE_FIELDS]
        for name, bits in [*named, *((f"bits_for {p!r}", b) for p, b in self.bits_for)]:
            if bits != PLAIN and not is_rate(bits, self.codebook):
                half = ", 1.5, 2.5, 3.5" if self.codebook is Codebook.MUL1 else ""
                raise ConfigError(
                    f"{name}={bits:g} is no rate for codebook {self.codebook}; use 1..8{half} or 16"
                )

    def groups(self) -> dict[str, float]:
        """Default rate of each group of modules (see convert_plan)."""
        return {
            "text": self.bits,
            "drafter": self.bits,
            "head": self.head_bits,
            "mtp": self.mtp_bits,
            "vision": self.vision_bits,
        }


_RATE_FIELDS = ("bits", "head_bits", "mtp_bits", "vision_bits")


@dataclass(slots=True)
class ConvertReport:
    """What a conversion did. bits: average over the budgeted modules; num_bytes: tensor data."""

    out_dir: Path
    bits: float = 0.0
    num_bytes: int = 0
    modules: list[ModuleReport] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "out_dir": str(self.out_dir),
            "bits": self.bits,
            "num_bytes": self.num_bytes,
            "modules": [asdict(module) for module in self.modules],
        }


Progress = Callable[[int, int, str], None]  # modules done, modules in all, module just finished


def convert_model(
    model_dir: Path,
    out_dir: Path,
    *,
    bits: float,
    bits_for: tuple[tuple[str, float], ...] = (),
    head_bits: float = 6,
    mtp_bits: float = 4,
    vision_bits: float = 6,
    codebook: str = "mul1",
    calibration: Calibration | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    resume: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Progress | None = None,
) -> ConvertReport:
    """Convert the GLM-5.3-Flash model or DFlash2 drafter in model_dir to an EXL3 pack in out_dir.

    resume: take over modules that an interrupted run finished (False makes everything again).
    progress: called after every module.
    Raises ConfigError for impossible settings and CheckpointError for an unusable source or target.
    """
    if codebook not in list(Codebook):
        raise ConfigError(f"codebook={codebook!r} is unknown; use {', '.join(Codebook)}")
    settings = ConvertSettings(
        bits=bits,
        bits_for=tuple(bits_for),
        head_bits=head_bits,
        mtp_bits=mtp_bits,
        vision_bits=vision_bits,
        codebook=Codebook(codebook),
        seed=seed,
    )
    _check_target(model_dir, out_dir)
    conversion = _Conversion(Checkpoint.open(model_dir), out_dir, settings, calibration, device)
    store = PartialStore(out_dir, resume=resume)
    report = conversion.quantise(store, progress)
    conversion.write(store, report, max_shard_bytes)
    store.remove()
    return report


def _check_target(model_dir: Path, out_dir: Path) -> None:
    if out_dir.resolve() == model_dir.resolve():
        raise ConfigError(f"out_dir={out_dir} is the source folder; choose another")
    if out_dir.exists() and not out_dir.is_dir():
        raise ConfigError(f"out_dir={out_dir} is not a folder; choose another")
    if not out_dir.is_dir():
        return
    if (out_dir / ".partial").is_dir():
        # An earlier run was cut off, perhaps in its second pass: what that pass wrote is remade.
        for path in out_dir.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                path.unlink()
    old = next(iter(sorted(out_dir.glob("*.safetensors"))), None)
    if old is not None:
        raise ConfigError(f"out_dir={out_dir} already holds {old.name}; choose another folder")


def _usable_device(device: torch.device | str) -> torch.device:
    try:
        result = torch.device(device)
    except RuntimeError:
        raise ConfigError(f"device={device!r} is unknown; use cpu or cuda") from None
    if result.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={device}: no CUDA device here; use device=cpu")
    if result.type not in ("cpu", "cuda"):
        raise ConfigError(f"device={device} is not supported; use cpu or cuda")
    return result


class _Conversion:
    """One run: the source, the plan with its rates, and one encoder per rate."""

    def __init__(
        self,
        ckpt: Checkpoint,
        out_dir: Path,
        settings: ConvertSettings,
        calibration: Calibration | None,
        device: torch.device | str,
    ) -> None:
        self.ckpt = ckpt
        self.out_dir = out_dir
        self.settings = settings
        self.calibration = calibration
        self.device = _usable_device(device)
        self.is_drafter = architecture_of(ckpt.config) == DFLASH2_ARCHITECTURE
        self.plan: Plan = (
            plan_dflash2(ckpt.tensors)
            if self.is_drafter
            else plan_glm5_next(ckpt.tensors, parse_glm5_next(ckpt.config))
        )
        self.rates = assign_bits(self.plan, settings.groups(), settings.bits_for)
        vision = [job.module for job in self.plan.linears if job.group == "vision"]
        if all(self.rates[module] == PLAIN for module in vision):
            keep_vision(self.plan, ckpt.tensors)
        self._check_hessians()
        self._encoders: dict[float, TileEncoder] = {}
        self._stack: tuple[str, Tensor] | None = None  # last stack of experts that was read

    def _check_hessians(self) -> None:
        known = {job.module for job in self.plan.linears}
        for module in self.calibration.hessians if self.calibration else ():
            if module not in known:
                raise ConfigError(f"calibration: {module} is no module of the pack")

    def _encoder(self, bits: float) -> TileEncoder:
        if bits not in self._encoders:
            self._encoders[bits] = TileEncoder(bits, self.settings.codebook, device=self.device)
        return self._encoders[bits]

    def quantise(self, store: PartialStore, progress: Progress | None) -> ConvertReport:
        """First pass: quantise each module that no earlier run finished."""
        report = ConvertReport(self.out_dir)
        jobs = [job for job in self.plan.linears if self.rates[job.module] != PLAIN]
        for count, job in enumerate(jobs, start=1):
            report.modules.append(self._quantise_one(job, store))
            if progress is not None:
                progress(count, len(jobs), job.module)
        report.bits = self._average_bits(report)
        return report

    def _quantise_one(self, job: LinearJob, store: PartialStore) -> ModuleReport:
        module, bits = job.module, self.rates[job.module]
        hessian = self.calibration.hessians.get(module) if self.calibration else None
        sources = [info for part in job.parts for info in self._infos(part.source)]
        about = f"1|{bits}|{self.settings.codebook}|{self.settings.seed}|{job.parts}"
        stamped = stamp(about, sources, hessian)
        done = store.finished(module, stamped, bits)
        if done is not None:
            return done
        start = time.monotonic()
        source = self._read(job)
        seed = (self.settings.seed << 32) ^ zlib.crc32(module.encode())
        try:
            result = quantize_linear(source.weight, self._encoder(bits), seed=seed, hessian=hessian)
        except ValueError as err:
            raise CheckpointError(f"{module}: {err}") from None
        if source.bias is not None:
            stored = padded(len(source.bias))
            result.packed.bias = torch.nn.functional.pad(
                source.bias, (0, stored - len(source.bias))
            )
        out, inp = source.weight.shape
        seconds = round(time.monotonic() - start, 3)
        report = ModuleReport(module, bits, (out, inp), result.mse, result.output_error, seconds)
        store.save(report, result.packed, stamped)
        return report

    def _infos(self, source: str) -> Iterator[Any]:
        for suffix in ("", ".weight", ".bias", ".weight_scale_inv"):
            if source + suffix in self.ckpt:
                yield self.ckpt.tensors[source + suffix]

    def _read(self, job: LinearJob) -> LinearWeight:
        """The joined source of a module, fp32 [out, in] and bias."""
        parts = []
        for part in job.parts:
            if part.index is not None:
                weight, bias = self._stacked(part.source)[part.index].float(), None
            else:
                shape = self.ckpt.shape(f"{part.source}.weight")
                if len(shape) != 2:
                    raise CheckpointError(
                        f"{part.source}.weight is {list(shape)}; expected [out, in]"
                    )
                linear = read_linear(self.ckpt, part.source, *shape)
                weight, bias = linear.weight, linear.bias
            rows = slice(*part.rows) if part.rows else slice(None)
            parts.append((weight[rows], None if bias is None else bias[rows]))
        biases = [bias for _, bias in parts if bias is not None]
        if biases and len(biases) < len(parts):
            raise CheckpointError(f"{job.module}: only some of its parts have a bias")
        if len({weight.shape[1] for weight, _ in parts}) > 1:
            raise CheckpointError(f"{job.module}: its parts have different numbers of inputs")
        weight = torch.cat([weight for weight, _ in parts])
        return LinearWeight(weight, torch.cat(biases) if biases else None, PLAIN, None)

    def _stacked(self, name: str) -> Tensor:
        if self._stack is None or self._stack[0] != name:
            self._stack = None  # free the last one before the next is read
            self._stack = (name, self.ckpt.read(name))
        return self._stack[1]

    def _average_bits(self, report: ConvertReport) -> float:
        """Bits per weight over the modules that share the budget `bits` (4.3)."""
        budgeted = {j.module for j in self.plan.linears if j.group in ("text", "drafter")}
        counted = [m for m in report.modules if m.module in budgeted]
        weights = sum(m.shape[0] * m.shape[1] for m in counted)
        total = sum(m.bits * m.shape[0] * m.shape[1] for m in counted)
        return round(total / weights, 2) if weights else PLAIN

    def write(self, store: PartialStore, report: ConvertReport, max_shard_bytes: int) -> None:
        """Second pass: the pack's tensors, configs, and the source's other files."""
        storage: dict[str, dict[str, Any]] = {}
        with ShardWriter(self.out_dir, max_shard_bytes=max_shard_bytes) as writer:
            for name, tensor in self._tensors(store):
                writer.add(name, tensor)
                report.num_bytes += tensor.nbytes
                note_storage(storage, name, tensor)
        settings, codebook = self.settings, self.settings.codebook
        mark_quantised(storage, [(m.module, m.bits) for m in report.modules], codebook)
        calibration = self.calibration
        quantisation = quantization_config(
            self.ckpt.config,
            bits=report.bits,
            head_bits=self.rates.get("lm_head", PLAIN),
            codebook=codebook,
            mtp_bits=None if self.is_drafter else settings.mtp_bits,
            vision_bits=None if self.is_drafter else settings.vision_bits,
            calibration=(calibration.rows, calibration.cols) if calibration else None,
        )
        write_configs(
            self.out_dir, self.ckpt.config, quantisation, storage, untie=not self.is_drafter
        )
        for path in sorted(self.ckpt.folder.iterdir()):
            is_weights = path.suffix in _WEIGHT_FILES or path.name.endswith(".index.json")
            if path.is_file() and not is_weights and path.name not in _REWRITTEN:
                shutil.copyfile(path, self.out_dir / path.name)

    def _tensors(self, store: PartialStore) -> Iterator[tuple[str, Tensor]]:
        for job in self.plan.linears:
            if self.rates[job.module] != PLAIN:
                yield from store.load(job.module).items()
                continue
            source = self._read(job)
            info = self.ckpt.tensors.get(f"{job.parts[0].source}.weight")
            weight = source.weight
            if job.pad_outputs:
                rows = padded(len(weight)) - len(weight)
                weight = torch.nn.functional.pad(weight, (0, 0, 0, rows))
            is_wide = info is not None and info.dtype in ("F16", "BF16", "F32")
            kept = TORCH_DTYPES[info.dtype] if info is not None and is_wide else torch.bfloat16
            dtype = kept if job.plain_dtype is None else TORCH_DTYPES[job.plain_dtype]
            yield f"{job.module}.weight", _narrow(weight, dtype, kept)
            if source.bias is not None:
                yield f"{job.module}.bias", _narrow(source.bias, torch.float16, kept)
        for keep in self.plan.keeps:
            yield keep.name, self._kept(keep)

    def _kept(self, job: KeepJob) -> Tensor:
        parts = [self.ckpt.read(source) for source in job.sources]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        return (
            tensor if job.dtype is None else _narrow(tensor, TORCH_DTYPES[job.dtype], tensor.dtype)
        )


def _narrow(tensor: Tensor, dtype: torch.dtype, source: torch.dtype) -> Tensor:
    """tensor as dtype; in the source's type instead where fp16 would overflow."""
    result = tensor.to(dtype)
    overflows = dtype == torch.float16 and not bool(torch.isfinite(result).all())
    if not overflows:
        return result
    return tensor.to(source)
