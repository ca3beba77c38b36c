"""Fact retrieval: one fact out of many of the same form, inside a long text.

Text = filler paragraphs (stories, code) with fact sentences strewn between them. Entities are
unique in a text and split by name. Lengths are counted in pieces here; the caller turns a token
length into pieces with its own tokenizer (`Haystack.pieces` join with nothing and each starts with
exactly one white-space character, so the token lists of the pieces concatenate to the token list of
the text).
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from twining.demo.tasks import python_functions, stories
from twining.demo.tasks import words as w
from twining.demo.tasks.base import Example, Message, Split, assistant, draw, user

ATTRIBUTES = (
    "access code",
    "locker number",
    "badge number",
    "serial number",
    "door code",
    "ticket number",
    "vault code",
)
PLACES = (
    "depot",
    "station",
    "cabin",
    "office",
    "garage",
    "museum",
    "library",
    "hotel",
    "school",
    "factory",
)
_HEAD = (
    "Read the text and answer the question.", "Here is a text. Answer the question below it.",
    "Text:", "Document:",
    "Find the answer in this text.",
)  # fmt: skip
_QUESTION = (
    "Question: What is the {k} of the {e}?", "What is the {k} of the {e}?",
    "Tell me the {k} of the {e}.",
    "Which {k} does the {e} have?",
)  # fmt: skip
QUESTION_MARGIN = 24  # tokens kept free for the question


@dataclass(frozen=True, slots=True)
class Fact:
    """`The access code of the Silver Heron depot is 4821.`"""

    attribute: str
    entity: str
    code: str

    @property
    def sentence(self) -> str:
        return f"The {self.attribute} of the {self.entity} is {self.code}."


def draw_fact(rng: Random, split: Split, attribute: str | None = None) -> Fact:
    """A fact whose entity lies on the wanted side."""

    def make() -> tuple[str, str]:
        entity = f"{rng.choice(w.ADJECTIVES)} {rng.choice(w.EMBLEMS)} {rng.choice(PLACES)}"
        return f"retrieval {entity}", entity

    code = f"{rng.randrange(10_000):04d}"
    return Fact(attribute or rng.choice(ATTRIBUTES), draw(split, make), code)


def filler(rng: Random) -> str:
    """One filler paragraph without white space at its ends."""
    if rng.random() < 0.8:
        return stories.paragraph(rng)
    code: str = python_functions.make(rng, Split.TRAIN, "low").check["source"]
    return code.strip()


def draw_facts(rng: Random, split: Split, count: int) -> list[Fact]:
    """`count` facts over distinct entities; half of the texts use one attribute throughout."""
    attribute = rng.choice(ATTRIBUTES) if rng.random() < 0.5 else None
    facts: dict[str, Fact] = {}
    while len(facts) < count:
        fact = draw_fact(rng, split, attribute)
        facts.setdefault(fact.entity, fact)
    return list(facts.values())


def ask(rng: Random, fact: Fact) -> str:
    """A question for the fact."""
    return rng.choice(_QUESTION).format(k=fact.attribute, e=fact.entity)


def answer(fact: Fact, effort: str) -> Message:
    """The reply is the fact's sentence; the reasoning names the entity and finds it."""
    return assistant(fact.sentence, effort, f"entity: {fact.entity}. found: {fact.sentence}")


def head(rng: Random) -> str:
    """The instruction before the text."""
    return rng.choice(_HEAD)


def make(
    rng: Random, split: Split, effort: str, num_tokens: int, count: Callable[[str], int],
    density: int = 100,
) -> Example:  # fmt: skip
    """A single-question example of about `num_tokens` tokens of text.

    count: number of tokens of a piece. density: about one fact per so many tokens.
    The fact asked for lies anywhere in the text with equal chance.
    """
    facts = draw_facts(rng, split, max(2, num_tokens // density))
    target = rng.choice(facts)
    sentences = [" " + fact.sentence for fact in facts]
    first = head(rng)
    left = num_tokens - count(first) - sum(map(count, sentences)) - QUESTION_MARGIN
    fillers = []
    while left > 0:
        piece = "\n" + filler(rng)
        left -= count(piece)
        if left > 0:
            fillers.append(piece)
    text = first + "".join(scatter(rng, fillers, sentences)) + "\n" + ask(rng, target)
    check = {"code": target.code, "sentence": target.sentence}
    return Example("retrieval", (user(text), answer(target, effort)), effort, check=check)


def scatter(rng: Random, fillers: list[str], sentences: list[str]) -> list[str]:
    """Sentences spread over the gaps between fillers, each gap equally likely."""
    gaps: list[list[str]] = [[] for _ in range(len(fillers) + 1)]
    for sentence in sentences:
        rng.choice(gaps).append(sentence)
    pieces = list(gaps[0])
    for piece, gap in zip(fillers, gaps[1:], strict=True):
        pieces.append(piece)
        pieces.extend(gap)
    return pieces


def check(example: Example, content: str) -> bool:
    """True when the only four-digit number of the answer is the code asked for."""
    return re.findall(r"\d{4,}", content) == [example.check["code"]]
