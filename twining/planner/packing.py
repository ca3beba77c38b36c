"""Fit by packing whole modules in order onto devices with budgets: what the recipe's engine does.

Source: spec/recipes.md 5.3. Reserved modules first, then the layers in sequence, each with its own
cache, then what comes last. A device takes a module while used + module + transient <= budget; if
it does not, the next device is tried and none is ever revisited. Pure. No torch.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from twining.config import PAGE_SIZE
from twining.planner.planes import exllama_cache_bytes, exllama_token_bytes
from twining.planner.units import GIB


@dataclass(frozen=True, slots=True)
class Module:
    """An indivisible module with its cache. device: where it must go, None = next in order."""

    name: str
    num_bytes: float
    device: int | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """The first module that no device took; device is the last one."""

    module: str
    device: int
    need_bytes: float
    left_bytes: float
    budget_bytes: float

    def reason(self, largest_tokens: int | None) -> str:
        """The sentence of spec 4.0."""
        hint = f"; largest fitting cache is {largest_tokens} tokens" if largest_tokens else ""
        return (
            f"{self.module} does not fit on device {self.device}: needs"
            f" {self.need_bytes / GIB:.2f} GiB, {self.left_bytes / GIB:.2f} GiB left under the"
            f" {self.budget_bytes / GIB:g} GiB budget{hint}"
        )


@dataclass(frozen=True, slots=True)
class Packing:
    """used_bytes per device, without the transient. slack_bytes: what the tightest device has left,
    or what the refused module lacks (negative)."""

    used_bytes: tuple[float, ...]
    devices: tuple[int, ...]  # of the modules placed, in order
    refusal: Refusal | None
    slack_bytes: float


def pack(
    budgets_bytes: Sequence[float],
    reserved: Sequence[Module],
    ordered: Sequence[Module],
    *,
    transient_bytes: float,
) -> Packing:
    """Place reserved modules on their devices, then the ordered ones first-fit without return."""
    used = [0.0] * len(budgets_bytes)
    places: list[int] = []
    for module in reserved:
        at = module.device or 0
        used[at] += module.num_bytes
        places.append(at)
    at = 0
    for module in ordered:
        while at < len(used):
            left = budgets_bytes[at] - transient_bytes - used[at]
            if module.num_bytes <= left:
                break
            if at == len(used) - 1:
                refusal = Refusal(module.name, at, module.num_bytes, left, budgets_bytes[at])
                return Packing(tuple(used), tuple(places), refusal, left - module.num_bytes)
            at += 1
        used[at] += module.num_bytes
        places.append(at)
    slack = min(b - transient_bytes - u for b, u in zip(budgets_bytes, used, strict=True))
    return Packing(tuple(used), tuple(places), None, slack)


def largest(fits: Callable[[int], bool], most: int) -> int:
    """The largest n in 0..most for which a monotone test holds (0: none does)."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of a load as ExLlamaV3 does it. Bytes; layer_bytes without cache, in order.

    head_first: the head is reserved on its device before the layers, else it comes last.
    """

    budgets_bytes: tuple[float, ...]
    layer_bytes: tuple[float, ...]
    attention_layers: frozenset[int]
    head_bytes: float
    draft_bytes: float
    transient_fixed_bytes: float
    transient_token_bytes: float
    head_first: bool
    draft_device: int
    cache_format: str

    def transient(self, tokens: int) -> float:
        return self.transient_fixed_bytes + self.transient_token_bytes * tokens

    def pack(self, tokens: int) -> Packing:
        """Load with a cache of that many tokens."""
        reserved = [Module("drafter", self.draft_bytes, self.draft_device)]
        if self.head_first:
            reserved.append(Module("output head", self.head_bytes, 0))
        per_layer = tokens * exllama_token_bytes(self.cache_format)
        ordered = [
            Module(
                f"transformer layer {i}", size + (per_layer if i in self.attention_layers else 0)
            )
            for i, size in enumerate(self.layer_bytes)
        ]
        if not self.head_first:
            ordered.append(Module("output head", self.head_bytes))
        return pack(self.budgets_bytes, reserved, ordered, transient_bytes=self.transient(tokens))

    def largest_tokens(self, most: int = 1 << 22) -> int:
        """The largest cache that loads, in tokens (whole pages); 0 when none does."""
        pages = largest(lambda n: self.pack(n * PAGE_SIZE).refusal is None, most // PAGE_SIZE)
        return pages * PAGE_SIZE

    def cache_bytes(self, tokens: int) -> int:
        count = len(self.attention_layers)
        return exllama_cache_bytes(tokens, self.cache_format, num_layers=count)


def calibrated_layout(
    *,
    cache_format: str,
    head_first: bool,
    budgets_gib: tuple[float, ...] = (62.0, 63.0),
) -> Layout:
    """The layout whose sizes reproduce what the ExLlamaV3 recipe publishes: 384K loads, 448K and
    512K stop at layer 44. Calibrated, not measured; used when no headers are at hand."""
    return Layout(
        budgets_bytes=tuple(b * GIB for b in budgets_gib),
        layer_bytes=tuple(0.50 * GIB if i < 3 else 2.60 * GIB for i in range(45)),
        attention_layers=frozenset(range(3, 45, 4)),
        head_bytes=0.45 * GIB,
        draft_bytes=1.05 * GIB,
        transient_fixed_bytes=0.70 * GIB,
        transient_token_bytes=6144.0,
        head_first=head_first,
        draft_device=0 if head_first else len(budgets_gib) - 1,
        cache_format=cache_format,
    )
