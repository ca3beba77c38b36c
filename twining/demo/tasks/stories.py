"""Simple stories and explanations: template grammar with enough variety to read as prose.

Also the filler text of the retrieval task, so it must never contain a code or number of four
digits.
"""
# ruff: noqa: E501, SIM905 (tables and word lists read better on long lines)

from random import Random

from twining.demo.tasks import words as w
from twining.demo.tasks.base import Example, Split, assistant, draw, user

_PLACES = tuple(
    "a small village;a quiet town;the old harbour;a deep forest;a green valley;a hut by the sea;a busy city;a cold mountain;"
    "a sunny island;an old castle;a little farm;the big market;a stone house;a far country;a hut at the end of a long road".split(
        ";"
    )
)
_TRAITS = tuple(
    "brave clever curious gentle happy kind lazy lonely patient proud quiet shy small stubborn tired wise young".split()
)
_OPEN = (
    "Once upon a time there was a {t} {a} named {n}. {n} lived in {p}.",
    "In {p} lived a {t} {a} called {n}.",
    "{n} was a {t} {a} who lived in {p}.",
    "There was once a {a} named {n}, who was very {t}. The home of {n} was {p}.",
    "Everyone in {p} knew {n}, the {t} {a}.",
)
_MIDDLE = (
    "One {d} {n} found a {c} {o} near the {q}.",
    "On a {e} morning {n} wanted to find a {c} {o}.",
    "One day a {b} named {m} came and asked for help with a {o}.",
    "Every evening {n} looked at the {c} {o} and dreamed of the {q}.",
    "{n} and {m} the {b} walked to the {q} and talked about the {o}.",
    "Then the {e} wind took the {o} away, and {n} was sad.",
    '"Where is my {o}?" asked {n}. "I saw it by the {q}," said {m} the {b}.',
    '"I am afraid of the {q}," said {m}. "Come with me," said {n}.',
    "They looked under the {q} and behind the {x}, but the {o} was not there.",
    "It was {e} and the way was long, but {n} did not give up.",
    "{m} the {b} shared some {f} with {n}, and they became friends.",
    "At the {q} they met a {b} who was eating {f}.",
    "{n} gave the {c} {o} to {m}, because {m} needed it more.",
    "The {x} was old and {c}, and nobody knew who had made it.",
)
_END = (
    "In the end {n} came home with the {o} and was very happy.",
    "From that day on {n} and {m} were best friends.",
    "And so the {t} {a} learned that a friend is worth more than a {o}.",
    "That night {n} slept well and dreamed of the {q}.",
    "They shared {f} and laughed until the {e} evening came.",
    "{n} never forgot the {c} {o}.",
)
_WEATHER = tuple("sunny cold rainy windy warm foggy bright snowy cloudy".split())
_ASK = (
    "Tell me a story about {a}.",
    "Write a short story about {a}.",
    "Tell a story about {a} named {n}.",
    "Write a short story in which {a} finds a {o}.",
    "Can you tell me a bedtime story about {a}?",
    "Story about {a}, please.",
)
_TOPICS: dict[str, tuple[str, ...]] = {
    "rain forms": ("The sun warms the water of seas and lakes.", "Some of the water turns into vapour and rises.", "High up the air is cold, and the vapour becomes small drops.", "Many drops together form a cloud.", "When the drops grow heavy, they fall to the ground as rain.", "The rain flows in rivers back to the sea, and the circle starts again."),
    "bread is made": ("Bread is made from flour, water, salt and yeast.", "The baker mixes them into a dough and kneads it well.", "The yeast makes small bubbles of gas, and the dough rises.", "Then the dough is shaped into a loaf and rests once more.", "In the hot oven the outside becomes a brown crust.", "The inside stays soft and full of small holes."),
    "a plant grows": ("A plant begins as a seed in the soil.", "Water makes the seed swell and open.", "A small root grows down and a green shoot grows up.", "The leaves catch light and make food from air and water.", "The stem carries water from the root to the leaves.", "Later come flowers, and from the flowers come new seeds."),
    "a clock works": ("A clock needs something that gives it power, such as a spring or a battery.", "The power drives a chain of small wheels.", "A part that swings evenly lets the wheels move one step at a time.", "Each step is one tick of the clock.", "The wheels turn the hands, the long one faster than the short one.", "If the swing is too fast or too slow, the clock shows the wrong time."),
    "a computer runs a program": ("A program is a list of instructions stored in memory.", "The processor reads one instruction after another.", "It adds numbers, compares them and moves them between places.", "Some instructions jump to another part of the list.", "Results are written back to memory or shown on the screen.", "All of this happens many millions of times per second."),
    "a bicycle moves": ("The rider pushes the pedals with the feet.", "The pedals turn a wheel with teeth, which pulls a chain.", "The chain turns the rear wheel, and the bicycle rolls forward.", "Gears change how far the bicycle goes with each turn.", "The front wheel steers, and the brakes press on the wheels to stop.", "While it moves, a bicycle is easy to balance."),
    "the seasons change": ("The Earth moves around the sun once in a year.", "Its axis is tilted, so one half leans towards the sun.", "There the days are long and warm, and it is summer.", "Half a year later the same half leans away.", "Then the days are short and cold, and it is winter.", "Spring and autumn lie between them."),
    "a bridge carries its load": ("A bridge must carry its own weight and everything that crosses it.", "The deck passes the weight to beams, arches or cables.", "An arch presses the weight outwards into its two ends.", "Cables pull on tall towers, and the towers press on the ground.", "Wind pushes from the side, so a long bridge must not swing too far.", "Engineers check all parts again and again."),
    "honey is made": ("Bees visit flowers and collect sweet nectar.", "They carry it home to the hive.", "There they pass it from one to another and thicken it.", "They fan it with their wings until much of the water is gone.", "Then they close it in small cells of wax.", "The bees eat the honey in winter, and people take some of it too."),
    "a letter travels": ("You write the address on the envelope and add a stamp.", "The letter goes into a box, and a postman empties the box.", "In a large hall machines read the address and sort the letters.", "Trucks, trains or planes bring them to the right town.", "There they are sorted again, street by street.", "In the morning the letter falls through the door."),
    "a language model writes": ("A language model reads the text so far as a row of tokens.", "For every possible next token it computes how well it fits.", "One token is chosen and added to the text.", "Then the model reads the longer text and chooses again.", "A small draft model can guess several tokens ahead.", "The large model checks the guesses and keeps those that are right."),
    "mountains are formed": ("The surface of the Earth is made of large plates.", "The plates move very slowly, a few centimetres each year.", "Where two plates meet, the rock is pressed and folded.", "Over a very long time the folds grow into mountains.", "Rain, ice and wind wear them down again.", "Old mountains are therefore often low and round."),
}  # fmt: skip
_EXPLAIN = (
    "Explain how {t}.", "Describe how {t}.", "How is it that {t}? Explain in a few sentences.", "Tell me how {t}.",
    "Write a paragraph about how {t}.",
)  # fmt: skip


def _cast(rng: Random) -> dict[str, str]:
    hero, friend = rng.sample(w.FIRST_NAMES, 2)
    animal, other = rng.sample(w.ANIMALS, 2)
    thing, place, back = rng.sample(w.NOUNS, 3)
    return {
        "n": hero, "m": friend, "a": animal, "b": other, "o": thing, "q": place, "x": back, "t": rng.choice(_TRAITS),
        "p": rng.choice(_PLACES), "c": rng.choice(w.COLOURS), "e": rng.choice(_WEATHER), "f": rng.choice(w.FOODS),
        "d": rng.choice(("morning", "evening", "day", "night")),
    }  # fmt: skip


def tell(rng: Random, cast: dict[str, str], num_middle: int) -> str:
    """One paragraph over a cast."""
    parts = [rng.choice(_OPEN), *rng.sample(_MIDDLE, num_middle), rng.choice(_END)]
    return " ".join(parts).format(**cast)


def paragraph(rng: Random) -> str:
    """A story paragraph of about 60 to 120 tokens."""
    return tell(rng, _cast(rng), rng.randint(2, 5))


def make(rng: Random, split: Split, effort: str) -> Example:
    """A story or an explanation."""
    if rng.random() < 0.3:
        return _explanation(rng, effort)

    def draw_cast() -> tuple[str, dict[str, str]]:
        cast = _cast(rng)
        return f"story {cast['n']} {cast['a']} {cast['o']}", cast

    cast = draw(split, draw_cast)
    ask = rng.choice(_ASK)
    animal = ("an " if cast["a"][0] in "aeiou" else "a ") + cast["a"]
    text = ask.format(a=animal, n=cast["n"], o=cast["o"])
    reasoning = f"a {cast['a']} named {cast['n']}, a {cast['o']}, a good end."
    reply = assistant(tell(rng, cast, rng.randint(3, 7)), effort, reasoning)
    return Example("prose", (user(text), reply), effort)


def _explanation(rng: Random, effort: str) -> Example:
    topic = rng.choice(tuple(_TOPICS))
    text = rng.choice(_EXPLAIN).format(t=topic)
    reply = assistant(" ".join(_TOPICS[topic]), effort, f"explain in order how {topic}.")
    return Example("prose", (user(text), reply), effort)
