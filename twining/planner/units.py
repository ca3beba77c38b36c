"""Sizes and devices in words: GiB, "2x64GB", "cpu:32GiB". Pure text and arithmetic. No torch.

A card's "64 GB" is 2^36 bytes, as vendors print memory; files are counted in GB of 10^9 bytes.
"""

import re
from dataclasses import dataclass
from typing import Final

from twining.errors import ConfigError

KIB: Final = 1 << 10
MIB: Final = 1 << 20
GIB: Final = 1 << 30
GB: Final = 10**9
MAX_DEVICES: Final = 64

_DEVICE = re.compile(
    r"(?:([0-9]{1,2})x)?(?:(cpu|gpu):)?([0-9]{1,6}(?:\.[0-9]{1,3})?)\s*(GB|GiB|MiB)?"
)


@dataclass(frozen=True, slots=True)
class Device:
    """A place for weights and caches. budget_bytes: what may be used of total_bytes."""

    name: str
    kind: str  # "gpu": weights stay packed; "cpu": this version's float32 engine
    total_bytes: int
    budget_bytes: int


def gib(num_bytes: float) -> str:
    """Bytes as GiB with two decimals, or MiB when small."""
    if abs(num_bytes) < GIB / 10:
        return f"{num_bytes / MIB:.1f} MiB"
    return f"{num_bytes / GIB:.2f} GiB"


def parse_devices(text: str) -> tuple[Device, ...]:
    """Devices from text such as "2x64GB", "24GB,12GB" or "cpu:64GB".

    Raises ConfigError naming what was given.
    """
    devices: list[Device] = []
    for part in text.split(","):
        match = _DEVICE.fullmatch(part.strip())
        if match is None or float(match[3]) <= 0:
            raise ConfigError(
                f"devices={text[:60]!r} is not understood; write 2x64GB, 24GB,12GB or cpu:64GB"
            )
        count, kind = int(match[1] or 1), match[2] or "gpu"
        unit = MIB if match[4] == "MiB" else GIB
        size = int(float(match[3]) * unit)
        if not 1 <= count <= MAX_DEVICES or len(devices) + count > MAX_DEVICES:
            raise ConfigError(f"devices={text[:60]!r}: 1 to {MAX_DEVICES} devices can be planned")
        for _ in range(count):
            name = f"{kind}{len(devices)}" if kind == "gpu" else "cpu"
            devices.append(Device(name, kind, size, size))
    kinds = {device.kind for device in devices}
    if len(kinds) > 1 or (kinds == {"cpu"} and len(devices) > 1):
        raise ConfigError(f"devices={text[:60]!r}: use graphics cards only, or one cpu")
    return tuple(devices)
