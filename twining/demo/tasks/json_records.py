"""Record kinds of the JSON tasks: how each field is drawn, typed and told in a sentence.

A field is (name, alternative names, type word, draw). A record text is a list of sentences over the
drawn values; a sentence is used only when it mentions a wanted field or as filler, so extraction
has to select.
"""
# ruff: noqa: E501, SIM905 (tables and word lists read better on long lines)

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

from twining.demo.tasks import words as w

Draw = Callable[[Random], Any]


@dataclass(frozen=True, slots=True)
class Field:
    """One field: key spellings (first is the plain one), type word, how to draw a value."""

    keys: tuple[str, ...]
    type: str  # "string", "integer", "boolean", "list of strings"
    draw: Draw


@dataclass(frozen=True, slots=True)
class Record:
    """A record kind. sentences: (fields mentioned, format string over field names)."""

    name: str
    plural: str
    fields: dict[str, Field]
    sentences: tuple[str, ...]


def full_name(rng: Random) -> str:
    """First and last name."""
    return f"{rng.choice(w.FIRST_NAMES)} {rng.choice(w.LAST_NAMES)}"


def two_words(rng: Random) -> str:
    """`Silver Heron`."""
    return f"{rng.choice(w.ADJECTIVES)} {rng.choice(w.EMBLEMS)}"


def digits(rng: Random, count: int) -> str:
    """`count` digits, the first not zero."""
    return str(rng.randrange(10 ** (count - 1), 10**count))


def clock(rng: Random) -> str:
    """`14:30`."""
    return (
        f"{rng.randint(6, 22):02d}:{rng.choice(('00', '10', '15', '20', '30', '40', '45', '50'))}"
    )


def date(rng: Random) -> str:
    """`2024-05-17`."""
    return f"{rng.randint(2015, 2029)}-{rng.randint(1, 12):02d}-{rng.randint(1, 28):02d}"


def _text(draw: Draw, *keys: str) -> Field:
    return Field(keys, "string", draw)


def _int(low: int, high: int, *keys: str) -> Field:
    return Field(keys, "integer", lambda rng: rng.randint(low, high))


def _pick(values: tuple[str, ...], *keys: str) -> Field:
    return Field(keys, "string", lambda rng: rng.choice(values))


def _some(values: tuple[str, ...], *keys: str) -> Field:
    return Field(keys, "list of strings", lambda rng: rng.sample(values, rng.randint(2, 4)))


_CITY = _pick(w.CITIES, "city", "town", "location")
_NAME = _text(full_name, "name", "full_name", "person")
_DAY = _pick(w.WEEKDAYS, "day", "weekday")
_TIME = _text(clock, "time", "start", "starts_at")

RECORDS: tuple[Record, ...] = (
    Record("person", "people",
        {"name": _NAME, "age": _int(18, 90, "age", "years"), "city": _CITY, "job": _pick(w.JOBS, "job", "occupation"),
         "languages": _some(w.LANGUAGES, "languages")},
        ("{name} is {age} years old.", "The person works as {job} in {city}.", "Languages spoken: {languages}.")),
    Record("contact", "contacts",
        {"name": _NAME, "phone": _text(lambda r: f"555-{digits(r, 4)}", "phone", "phone_number"),
         "email": _text(lambda r: f"{r.choice(w.FIRST_NAMES).lower()}{r.randint(1, 99)}@example.com", "email", "mail"),
         "city": _CITY},
        ("You can reach {name} by phone at {phone}.", "The mail address is {email}.", "The office is in {city}.")),
    Record("order", "orders",
        {"customer": _text(full_name, "customer", "buyer", "name"), "order_id": _int(1000, 99999, "order_id", "id", "number"),
         "items": _some(w.FOODS, "items", "products"), "total": _int(5, 400, "total", "price", "amount"),
         "city": _CITY},
        ("Order {order_id} was placed by {customer}.", "It contains {items}.", "The total is {total} dollars.",
         "It ships to {city}.")),
    Record("event", "events",
        {"title": _text(lambda r: two_words(r) + r.choice((" Concert", " Festival", " Fair", " Workshop")), "title", "event", "name"),
         "city": _CITY, "date": _text(date, "date"), "time": _TIME, "seats": _int(20, 900, "seats", "capacity")},
        ("The {title} takes place in {city}.", "It is on {date} and starts at {time}.", "There are {seats} seats.")),
    Record("book", "books",
        {"title": _text(lambda r: f"The {two_words(r)}", "title", "book"), "author": _text(full_name, "author", "writer"),
         "year": _int(1900, 2025, "year", "published"), "pages": _int(80, 900, "pages", "num_pages")},
        ("{title} was written by {author}.", "The book came out in {year} and has {pages} pages.")),
    Record("weather", "weather reports",
        {"city": _CITY, "temperature": _int(-10, 38, "temperature", "temp_c", "degrees"),
         "condition": _pick(("sunny", "cloudy", "rainy", "windy", "foggy", "snowy", "stormy"), "condition", "weather"),
         "wind": _int(1, 90, "wind", "wind_kmh"), "day": _DAY},
        ("On {day} it is {condition} in {city}.", "The temperature is {temperature} degrees.", "Wind blows at {wind} km/h.")),
    Record("train", "trains",
        {"line": _text(lambda r: f"{r.choice('ABCEFGKR')}{r.randint(1, 99)}", "line", "train"),
         "from": _pick(w.CITIES, "from", "origin"), "to": _pick(w.CITIES, "to", "destination"),
         "departure": _text(clock, "departure", "departs"), "platform": _int(1, 24, "platform", "track")},
        ("Train {line} goes from {from} to {to}.", "It leaves at {departure} from platform {platform}.")),
    Record("product", "products",
        {"name": _text(lambda r: f"{r.choice(w.ADJECTIVES)} {r.choice(w.NOUNS)}", "name", "product"),
         "price": _int(1, 999, "price", "cost"), "colour": _pick(w.COLOURS, "colour", "color"),
         "stock": _int(0, 500, "stock", "quantity"),
         "available": Field(("available", "in_stock"), "boolean", lambda r: r.random() < 0.5)},
        ("The {name} costs {price} dollars.", "Its colour is {colour}.", "We have {stock} pieces in store.",
         "Available online: {available}.")),
    Record("pet", "pets",
        {"name": _pick(w.FIRST_NAMES, "name", "pet"), "species": _pick(w.ANIMALS, "species", "animal", "kind"),
         "age": _int(1, 20, "age", "years"), "owner": _text(full_name, "owner"), "colour": _pick(w.COLOURS, "colour", "color")},
        ("{name} is a pet with {colour} fur, species {species}.", "The animal is {age} years old.", "It belongs to {owner}.")),
    Record("meeting", "meetings",
        {"topic": _pick(tuple("budget design hiring marketing planning research safety sales security testing".split()), "topic", "subject"),
         "day": _DAY, "time": _TIME, "room": _int(1, 400, "room", "room_number"),
         "people": _some(w.FIRST_NAMES, "people", "participants", "attendees")},
        ("The {topic} meeting is on {day} at {time}.", "It is held in room {room}.", "Taking part: {people}.")),
    Record("recipe", "recipes",
        {"dish": _text(lambda r: f"{r.choice(w.FOODS)} {r.choice(('soup', 'stew', 'salad', 'pie', 'curry'))}", "dish", "name"),
         "minutes": _int(5, 120, "minutes", "time_min"), "servings": _int(1, 12, "servings", "portions"),
         "ingredients": _some(w.FOODS, "ingredients")},
        ("The {dish} takes {minutes} minutes.", "You need {ingredients}.", "It serves {servings} people.")),
    Record("car", "cars",
        {"model": _text(lambda r: f"{r.choice(w.EMBLEMS)} {r.randint(100, 900)}", "model", "car"), "colour": _pick(w.COLOURS, "colour", "color"),
         "year": _int(1990, 2026, "year", "built"), "km": _int(100, 250000, "km", "mileage"), "owner": _text(full_name, "owner")},
        ("The {model} is a car built in {year}, colour {colour}.", "It has run {km} km.", "The owner is {owner}.")),
)  # fmt: skip


def show(value: Any) -> str:
    """How a value reads in a sentence."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(value)
    return str(value)


def draw_values(record: Record, rng: Random) -> dict[str, Any]:
    """One value per field."""
    return {name: field.draw(rng) for name, field in record.fields.items()}


def tell(record: Record, values: dict[str, Any]) -> str:
    """The record as text."""
    shown = {name: show(value) for name, value in values.items()}
    return " ".join(s.format(**shown) for s in record.sentences)
