"""Task generators of the demo model: one module per kind, shared by training and by the score.

Every generator has the form make(rng, split, effort) -> Example and is deterministic in `rng`.
No torch, no tokenizer: text in, text out.
"""

from collections.abc import Callable
from random import Random

from twining.demo.tasks import (
    arithmetic,
    chat,
    json_extraction,
    lists,
    python_functions,
    stories,
    strings,
    tool_calls,
)
from twining.demo.tasks.base import Example, Message, Split, is_heldout, pick_effort

Maker = Callable[[Random, Split, str], Example]

MAKERS: dict[str, Maker] = {
    "arithmetic": arithmetic.make,
    "strings": strings.make,
    "json_extraction": json_extraction.make,
    "json_records": json_extraction.make_records,
    "tool_call": tool_calls.make,
    "python_functions": python_functions.make,
    "stories": stories.make,
    "chat": chat.make,
    "lists": lists.make,
}

__all__ = ["MAKERS", "Example", "Maker", "Message", "Split", "is_heldout", "pick_effort"]
