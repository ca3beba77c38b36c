"""Arithmetic: sums and differences of numbers below 100, times tables, comparisons, short word
problems.

Operand pairs are split, not phrasings: for sums the unordered pair, so a held-out a + b never
trains as b + a.
"""

import re
from random import Random

from twining.demo.tasks.base import Example, Split, assistant, draw, user
from twining.demo.tasks.words import FIRST_NAMES, ITEMS

_ADD = (
    "What is {a} + {b}?",
    "{a} + {b} =",
    "{a}+{b}",
    "Compute {a} + {b}.",
    "Add {a} and {b}.",
    "What is the sum of {a} and {b}?",
    "Calculate {a} plus {b}.",
    "How much is {a} + {b}?",
    "What is {a} plus {b}? Reply with the number only.",
    "Work out {a} + {b}. Give just the result.",
)
_SUB = (
    "What is {a} - {b}?",
    "{a} - {b} =",
    "{a}-{b}",
    "Compute {a} - {b}.",
    "Subtract {b} from {a}.",
    "What is {a} minus {b}?",
    "Calculate {a} minus {b}.",
    "How much is {a} - {b}?",
    "What is the difference between {a} and {b}?",
    "Work out {a} - {b}. Give just the result.",
)
_GAIN = (
    ("{n} has {a} {i} and gets {b} more. How many {i} does {n} have now?", "{n} has {c} {i} now."),
    (
        "There are {a} {i} in one box and {b} {i} in another. How many {i} are there in all?",
        "There are {c} {i} in all.",
    ),
    (
        "{n} picked {a} {i} in the morning and {b} in the evening. How many {i} is that?",
        "That is {c} {i}.",
    ),
    (
        "A shop sold {a} {i} on Monday and {b} {i} on Tuesday. How many did it sell?",
        "It sold {c} {i}.",
    ),
)
_LOSS = (
    ("{n} has {a} {i} and gives away {b}. How many {i} are left?", "{c} {i} are left."),
    ("There were {a} {i} in a box. {n} took {b} of them. How many remain?", "{c} {i} remain."),
    ("A shop had {a} {i} and sold {b}. How many {i} does it still have?", "It still has {c} {i}."),
    ("{n} needs {a} {i} and has {b}. How many {i} are missing?", "{c} {i} are missing."),
)


def add_steps(a: int, b: int) -> str:
    """Column-wise working of a + b (both 0..99)."""
    ones = a % 10 + b % 10
    carry = ones // 10
    text = f"ones: {a % 10} + {b % 10} = {ones}, write {ones % 10} carry {carry}. "
    tens = a // 10 + b // 10 + carry
    return text + f"tens: {a // 10} + {b // 10} + {carry} = {tens}. {a} + {b} = {a + b}."


def sub_steps(a: int, b: int) -> str:
    """Column-wise working of a - b (both 0..99); the smaller is taken from the larger."""
    if a < b:
        return f"{b} is larger. {sub_steps(b, a)} So {a} - {b} = {a - b}."
    x, y = a % 10, b % 10
    borrow = int(x < y)
    text = f"ones: {x + 10 * borrow} - {y} = {x + 10 * borrow - y}, borrow {borrow}. "
    tens = a // 10 - b // 10 - borrow
    return text + f"tens: {a // 10} - {b // 10} - {borrow} = {tens}. {a} - {b} = {a - b}."


def draw_pair(rng: Random, split: Split, op: str, low: int, high: int) -> tuple[int, int]:
    """A pair on the wanted side of the split, both in low..high."""

    def make() -> tuple[str, tuple[int, int]]:
        a, b = rng.randint(low, high), rng.randint(low, high)
        first, second = (min(a, b), max(a, b)) if op == "+" else (a, b)
        return f"arithmetic {first}{op}{second}", (a, b)

    return draw(split, make)


def make_two_digit(rng: Random, split: Split, effort: str) -> Example:
    """The scored form: a sum or a difference of two numbers of two digits."""
    return _plain(rng, split, effort, 10, 99)


def _plain(rng: Random, split: Split, effort: str, low: int, high: int) -> Example:
    op = "+" if rng.random() < 0.5 else "-"
    a, b = draw_pair(rng, split, op, low, high)
    if op == "-" and a < b and rng.random() < 0.8:
        # Swapping may change sides of the split; the pair is drawn again until it agrees.
        while a < b:
            a, b = draw_pair(rng, split, op, low, high)
    text = rng.choice(_ADD if op == "+" else _SUB).format(a=a, b=b)
    if "difference" in text:
        while a < b:
            a, b = draw_pair(rng, split, op, low, high)
        text = _SUB[8].format(a=a, b=b)
    value = a + b if op == "+" else a - b
    steps = add_steps(a, b) if op == "+" else sub_steps(a, b)
    reply = assistant(str(value), effort, steps)
    return Example("arithmetic", (user(text), reply), effort, check={"value": value})


def _word_problem(rng: Random, split: Split, effort: str) -> Example:
    high = 99 if rng.random() < 0.6 else 20
    names = {"n": rng.choice(FIRST_NAMES), "i": rng.choice(ITEMS)}
    if rng.random() < 0.5:
        a, b = draw_pair(rng, split, "+", 2, high)
        question, answer = rng.choice(_GAIN)
        value, steps = a + b, add_steps(a, b)
    else:
        a, b = draw_pair(rng, split, "-", 2, high)
        while a <= b:
            a, b = draw_pair(rng, split, "-", 2, high)
        question, answer = rng.choice(_LOSS)
        value, steps = a - b, sub_steps(a, b)
    reply = assistant(answer.format(c=value, **names), effort, steps)
    text = question.format(a=a, b=b, **names)
    return Example("arithmetic", (user(text), reply), effort, check={"value": value})


def _times(rng: Random, split: Split, effort: str) -> Example:
    a, b = rng.randint(2, 10), rng.randint(2, 10)
    text = rng.choice(
        ("What is {a} times {b}?", "{a} * {b}", "Multiply {a} by {b}.", "Compute {a} x {b}.")
    ).format(a=a, b=b)
    reply = assistant(str(a * b), effort, f"{a} times {b} is {a * b}.")
    return Example("arithmetic", (user(text), reply), effort, check={"value": a * b})


def _compare(rng: Random, split: Split, effort: str) -> Example:
    a, b = draw_pair(rng, split, "?", 1, 99)
    while a == b:
        a, b = draw_pair(rng, split, "?", 1, 99)
    if rng.random() < 0.5:
        text, value = f"Which is larger, {a} or {b}?", max(a, b)
    else:
        text, value = f"Which number is smaller: {a} or {b}?", min(a, b)
    order = f"{min(a, b)} < {max(a, b)}."
    reply = assistant(str(value), effort, order)
    return Example("arithmetic", (user(text), reply), effort, check={"value": value})


def make(rng: Random, split: Split, effort: str) -> Example:
    """Any arithmetic item."""
    u = rng.random()
    if u < 0.55:
        return _plain(rng, split, effort, 10, 99)
    if u < 0.65:
        return _plain(rng, split, effort, 0, 20)
    if u < 0.88:
        return _word_problem(rng, split, effort)
    return (_times if u < 0.94 else _compare)(rng, split, effort)


def check(example: Example, content: str) -> bool:
    """True when the last integer of the answer is the expected value."""
    numbers = re.findall(r"-?\d+", content)
    return bool(numbers) and int(numbers[-1]) == example.check["value"]
