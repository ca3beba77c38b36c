"""Lists, counting sequences and tables: long regular outputs whose next token is nearly certain.

These are also the `structured` material for measuring accepted draft length.
"""
# ruff: noqa: E501, SIM905 (tables and word lists read better on long lines)

from random import Random

from twining.demo.tasks import words as w
from twining.demo.tasks.base import Example, Split, assistant, draw, user
from twining.demo.tasks.json_records import RECORDS, draw_values, show

_CATEGORIES: dict[str, tuple[str, ...]] = {
    "animals": w.ANIMALS, "foods": w.FOODS, "colours": w.COLOURS, "jobs": w.JOBS, "cities": w.CITIES,
    "first names": w.FIRST_NAMES, "languages": w.LANGUAGES, "things": w.NOUNS,
    "fruits": tuple("apples bananas cherries grapes kiwis lemons mangoes melons oranges peaches pears plums".split()),
    "tools": tuple("axe drill hammer knife ladder pliers ruler saw screwdriver shovel tape wrench".split()),
    "sports": tuple("basketball boxing chess cycling football golf hockey judo rowing running sailing tennis".split()),
    "instruments": tuple("cello clarinet drum flute guitar harp horn oboe organ piano trumpet violin".split()),
    "trees": tuple("ash beech birch cedar elm fir larch maple oak pine spruce willow".split()),
    "rivers": tuple("Amazon Danube Ganges Loire Mekong Nile Po Rhine Seine Thames Volga Yukon".split()),
}  # fmt: skip
_FIXED = (
    ("List the days of the week.", "The week has seven days.", w.WEEKDAYS),
    ("List the months of the year.", "The year has twelve months.", w.MONTHS),
    ("Write the alphabet.", "26 letters.", tuple("abcdefghijklmnopqrstuvwxyz")),
    ("List the four seasons.", "Four seasons.", ("spring", "summer", "autumn", "winter")),
    ("Count from one to ten in words.", "Ten words.", w.NUMBER_WORDS[1:11]),
)


# Step 1, step 2 from an even start, step 2 from an odd start, any other step.
_SEQUENCE_ASKS: tuple[tuple[str, ...], ...] = (
    ("Count from {a} to {z}.", "Write the numbers from {a} to {z} with one blank between them.",
     "Count up by one from {a} to {z}, digits and blanks only."),
    ("List the even numbers from {a} to {z}.", "Write every even number from {a} up to {z}."),
    ("List the odd numbers from {a} to {z}.", "Write every odd number from {a} up to {z}."),
    ("Count from {a} to {z} in steps of {s}.", "Start at {a} and add {s} each time until {z}.",
     "Print the numbers {a} to {z} by {s}s, single blanks, no words."),
)  # fmt: skip


def _category(rng: Random, split: Split, effort: str) -> Example:
    name = rng.choice(tuple(_CATEGORIES))
    count = rng.randint(2, 9)
    items = rng.sample(_CATEGORIES[name], count)
    number = w.NUMBER_WORDS[count] if rng.random() < 0.5 else str(count)
    style = rng.randrange(3)
    ask = (
        "Name {n} {c}.",
        "List {n} {c} with bullet points.",
        "Give me a numbered list of {n} {c}.",
    )[style]
    if style == 0:
        answer = ", ".join(items)
    elif style == 1:
        answer = "\n".join(f"- {item}" for item in items)
    else:
        answer = "\n".join(f"{i}. {item}" for i, item in enumerate(items, 1))
    reply = assistant(answer, effort, f"{number} {name}.")
    return Example(
        "lists", (user(ask.format(n=number, c=name)), reply), effort, check={"text": answer}
    )


def _fixed(rng: Random, split: Split, effort: str) -> Example:
    ask, reasoning, items = rng.choice(_FIXED)
    reply = assistant(", ".join(items), effort, reasoning)
    return Example("lists", (user(ask), reply), effort, check={"text": reply["content"]})


def sequence(start: int, step: int, count: int) -> str:
    """`count` integers with single blanks."""
    return " ".join(str(start + i * step) for i in range(count))


def make_sequence(rng: Random, split: Split, effort: str, max_count: int = 60) -> Example:
    """Count from a start in steps up to a limit; the triple is split."""

    def draw_triple() -> tuple[str, tuple[int, int, int]]:
        start = rng.choice((0, 1, rng.randint(2, 200)))
        step = rng.choice((1, 1, 2, 2, 3, 4, 5, 6, 7, 8, 9, 10, 20, 25, 50, 100))
        count = rng.randint(4, max_count)
        return f"sequence {start} {step} {count}", (start, step, count)

    start, step, count = draw(split, draw_triple)
    end = start + step * (count - 1)
    parity = 0 if step == 1 else 3 if step != 2 else 1 + start % 2
    asks = _SEQUENCE_ASKS[parity]
    text = rng.choice(asks).format(a=start, z=end, s=step)
    reply = assistant(
        sequence(start, step, count), effort, f"start {start}, step {step}, end {end}."
    )
    return Example("structured", (user(text), reply), effort, check={"text": reply["content"]})


def make_table(rng: Random, split: Split, effort: str) -> Example:
    """A CSV or Markdown table of invented records."""
    record = rng.choice(RECORDS)
    names = [n for n, f in record.fields.items() if not f.type.startswith("list")]
    names = rng.sample(names, rng.randint(2, len(names)))
    rows = []
    for _ in range(rng.randint(2, 8)):
        values = draw_values(record, rng)
        rows.append([show(values[n]) for n in names])
    columns = ", ".join(names)
    if rng.random() < 0.5:
        ask = rng.choice(
            (
                "Write a CSV table of {n} invented {p} with the columns {c}.",
                "Make up {n} {p} as CSV. Columns: {c}.",
            )
        )
        answer = "\n".join(",".join(row) for row in [names, *rows])
    else:
        ask = rng.choice(
            (
                "Write a Markdown table of {n} invented {p} with the columns {c}.",
                "Make up {n} {p} as a Markdown table. Columns: {c}.",
            )
        )
        lines = [names, ["---"] * len(names), *rows]
        answer = "\n".join("| " + " | ".join(row) + " |" for row in lines)
    text = ask.format(n=len(rows), p=record.plural, c=columns)
    reply = assistant(answer, effort, f"{len(rows)} rows, columns {columns}.")
    return Example("table", (user(text), reply), effort, check={"text": answer})


def make(rng: Random, split: Split, effort: str) -> Example:
    """Any list item."""
    u = rng.random()
    if u < 0.35:
        return _category(rng, split, effort)
    if u < 0.42:
        return _fixed(rng, split, effort)
    return (make_sequence if u < 0.8 else make_table)(rng, split, effort)
