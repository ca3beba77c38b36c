"""String transformations on short lists of common words: order, case, spelling, counting,
replacing."""

from collections.abc import Callable
from random import Random

from twining.demo.tasks.base import Example, Split, assistant, draw, user
from twining.demo.tasks.words import NOUNS

# name -> (prompts, how the answer and a short reasoning follow from the words)
_Maker = Callable[[list[str]], tuple[str, str]]


def _spelled(word: str) -> str:
    return "-".join(word)


_OPS: dict[str, tuple[tuple[str, ...], int, int, _Maker]] = {
    "upper": (
        ("Write in upper case: {t}", "Convert to capital letters: {t}", "Uppercase this text: {t}"),
        1, 5, lambda w: (" ".join(w).upper(), "every letter becomes a capital."),
    ),
    "lower": (
        ("Write in lower case: {T}", "Convert to small letters: {T}", "Lowercase this text: {T}"),
        1, 5, lambda w: (" ".join(w), "every letter becomes small."),
    ),
    "title": (
        ("Capitalize every word: {t}", "Start each word with a capital letter: {t}"),
        2, 5, lambda w: (" ".join(x.capitalize() for x in w), "only the first letters change."),
    ),
    "first": (
        ("What is the first word of: {t}", "Give me the first word: {t}"),
        3, 7, lambda w: (w[0], f"the text starts with {w[0]}."),
    ),
    "last": (
        ("What is the last word of: {t}", "Give me the last word: {t}"),
        3, 7, lambda w: (w[-1], f"the text ends with {w[-1]}."),
    ),
    "sort": (
        ("Sort these words alphabetically: {t}", "Put the words in alphabetical order: {t}"),
        3, 6,
        lambda w: (" ".join(sorted(w)), f"by first letters: {' '.join(x[0] for x in sorted(w))}."),
    ),
    "reverse_words": (
        ("Reverse the order of the words: {t}", "Write the words backwards, last word first: {t}"),
        2, 6, lambda w: (" ".join(w[::-1]), f"start with {w[-1]}, end with {w[0]}."),
    ),
    "count_words": (
        ("How many words are there: {t}", "Count the words: {t}"),
        2, 9, lambda w: (str(len(w)), ", ".join(f"{i} {x}" for i, x in enumerate(w, 1)) + "."),
    ),
    "spell": (
        ("Spell the word {t}.", "Write the letters of {t} separated by hyphens."),
        1, 1, lambda w: (_spelled(w[0]), f"{w[0]} has {len(w[0])} letters."),
    ),
    "reverse_letters": (
        ("Reverse the word {t}.", "Write {t} backwards."),
        1, 1, lambda w: (w[0][::-1], f"{_spelled(w[0])} becomes {_spelled(w[0][::-1])}."),
    ),
    "count_letters": (
        ("How many letters does the word {t} have?", "Count the letters of {t}."),
        1, 1, lambda w: (str(len(w[0])), f"{_spelled(w[0])}."),
    ),
    "first_letter": (
        ("What is the first letter of {t}?", "Which letter does {t} start with?"),
        1, 1, lambda w: (w[0][0], f"{_spelled(w[0])}."),
    ),
    "commas": (
        ("Join the words with commas: {t}", "Separate these words by commas: {t}"),
        2, 6, lambda w: (", ".join(w), f"{len(w)} words, {len(w) - 1} commas."),
    ),
    "hyphens": (
        ("Join the words with hyphens: {t}", "Write as one hyphenated word: {t}"),
        2, 5, lambda w: ("-".join(w), f"{len(w)} words, {len(w) - 1} hyphens."),
    ),
    "repeat": (
        ("Repeat the word {t} three times.", "Write {t} three times."),
        1, 1, lambda w: (" ".join(w * 3), "three copies with blanks."),
    ),
    "remove_first": (
        ("Remove the first word: {t}", "Drop the first word of this text: {t}"),
        3, 7, lambda w: (" ".join(w[1:]), f"leave out {w[0]}."),
    ),
    "longest": (
        ("Which of these words is the longest: {t}", "Find the longest word: {t}"),
        3, 5, lambda w: (max(w, key=len), ", ".join(f"{x} {len(x)}" for x in w) + "."),
    ),
    "copy": (
        ("Repeat after me: {t}", "Say exactly this: {t}", "Copy this text: {t}"),
        2, 9, lambda w: (" ".join(w), "copy it as it is."),
    ),
}  # fmt: skip
_OP_NAMES = tuple(_OPS)


def make(rng: Random, split: Split, effort: str) -> Example:
    """One transformation; operation and words together are split."""

    def draw_words() -> tuple[str, tuple[str, list[str]]]:
        op = rng.choice(_OP_NAMES)
        low, high = _OPS[op][1:3]
        words = rng.sample(NOUNS, rng.randint(low, high))
        return f"string {op} {' '.join(words)}", (op, words)

    op, words = draw(split, draw_words)
    prompts, _, _, apply = _OPS[op]
    answer, reasoning = apply(words)
    text = " ".join(words)
    prompt = rng.choice(prompts).format(t=text, T=text.upper())
    reply = assistant(answer, effort, reasoning)
    return Example("strings", (user(prompt), reply), effort, check={"text": answer})


def check(example: Example, content: str) -> bool:
    """True when the answer is the expected text."""
    return bool(content.strip() == example.check["text"])
