"""What every task shares: the example record, the train / held-out split and small draw helpers.

An example is a whole conversation in chat form. Its last message is the reference reply of the
assistant; the messages before it are the prompt. `check` holds what the checker of its kind needs
(plain data).

Split rule: a key string names the parameters that make an item what it is (operand pair, entity,
record values). crc32(key) % 10 == 0 is held out, everything else trains. Both sides draw from the
same generator, so phrasing is shared and parameters never are.
"""

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from random import Random
from typing import Any, TypeVar

T = TypeVar("T")
Message = dict[str, Any]

HELDOUT_MODULUS = 10  # one key in ten is held out
_MAX_DRAWS = 10_000


class Split(StrEnum):
    """Which side of the split a generator draws from."""

    TRAIN = "train"
    HELDOUT = "heldout"


@dataclass(frozen=True, slots=True)
class Example:
    """One conversation.

    kind: task name. effort: "low", "high" or "max" (low replies carry no reasoning).
    think_closed: the prompt itself closes the thinking block (the `prefill` policy), so the
    model is not taught to write `</think>` here.
    """

    kind: str
    messages: tuple[Message, ...]
    effort: str = "low"
    tools: tuple[dict[str, Any], ...] = ()
    check: dict[str, Any] = field(default_factory=dict)
    think_closed: bool = False

    @property
    def prompt(self) -> tuple[Message, ...]:
        """The messages before the reference reply."""
        return self.messages[:-1]

    @property
    def reply(self) -> Message:
        """The reference reply."""
        return self.messages[-1]


def is_heldout(key: str) -> bool:
    """True when the parameters named by `key` belong to the held-out side."""
    return zlib.crc32(key.encode()) % HELDOUT_MODULUS == 0


def draw(split: Split, make: Callable[[], tuple[str, T]]) -> T:
    """Call `make` until its key falls on the wanted side; return its value."""
    want = split is Split.HELDOUT
    for _ in range(_MAX_DRAWS):
        key, value = make()
        if is_heldout(key) == want:
            return value
    raise AssertionError(f"no {split} item in {_MAX_DRAWS} draws: the key space is too small")


def pick_effort(rng: Random) -> str:
    """Half of all conversations think; High is more common than Max, as in use."""
    u = rng.random()
    return "low" if u < 0.5 else "high" if u < 0.85 else "max"


def user(text: str) -> Message:
    """A user message."""
    return {"role": "user", "content": text}


def system(text: str) -> Message:
    """A system message."""
    return {"role": "system", "content": text}


def assistant(content: str, effort: str, reasoning: str = "") -> Message:
    """A reply; the reasoning is kept only where the effort asks for it."""
    return {
        "role": "assistant",
        "content": content,
        "reasoning_content": "" if effort == "low" else reasoning,
    }


def join_and(items: Sequence[str]) -> str:
    """`a, b and c`."""
    if len(items) < 2:
        return "".join(items)
    return ", ".join(items[:-1]) + " and " + items[-1]


def article(noun: str) -> str:
    """`a` or `an` with the noun."""
    return ("an " if noun[0].lower() in "aeiou" else "a ") + noun
