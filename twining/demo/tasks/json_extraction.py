"""JSON tasks: extract named fields of a text into compact JSON of a stated shape, and write lists
of records.

The shape (which keys, their spelling and order, nesting) changes per item; the checker compares
parsed values.
"""

import json
from random import Random
from typing import Any

from twining.demo.tasks.base import Example, Split, assistant, draw, system, user
from twining.demo.tasks.json_records import RECORDS, Field, Record, draw_values, show, tell

_ASK = (
    "Extract the data as JSON of the form {shape}.\n{text}",
    "{text}\nReturn JSON with this shape: {shape}",
    "Read the text and answer with JSON only. Shape: {shape}\nText: {text}",
    "Fill in {shape} from this text: {text}",
    "Text: {text}\nGive me a JSON object {shape}.",
    "Turn this into JSON {shape}: {text}",
)
_ASK_SYSTEM = (
    "You extract data. Reply with compact JSON of the form {shape}.",
    "Answer every message with a JSON object {shape} and nothing else.",
    "Reply in JSON. Shape: {shape}",
)
_SAMPLES = {
    "string": '"..."', "integer": "0", "boolean": "true", "list of strings": '["..."]',
}  # fmt: skip


def dumps(value: Any) -> str:
    """Compact JSON, the spelling all answers use."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def _shape(fields: list[tuple[str, Field]], style: int) -> str:
    if style == 0:
        return "{" + ", ".join(f'"{k}": {f.type}' for k, f in fields) + "}"
    if style == 1:
        return "{" + ", ".join(f'"{k}": {_SAMPLES[f.type]}' for k, f in fields) + "}"
    return "with the keys " + ", ".join(k for k, _ in fields)


def _pick_fields(rng: Random, record: Record) -> list[tuple[str, str]]:
    """(field name, chosen key spelling), 2..5 of them in random order; keys are distinct."""
    names = rng.sample(list(record.fields), rng.randint(2, len(record.fields)))
    chosen: list[tuple[str, str]] = []
    for name in names:
        keys = record.fields[name].keys
        key = keys[0] if rng.random() < 0.6 else rng.choice(keys)
        if all(key != k for _, k in chosen):
            chosen.append((name, key))
    return chosen


def _nest(rng: Random, answer: dict[str, Any], shape: str) -> tuple[dict[str, Any], str]:
    """Sometimes the object sits under one outer key."""
    if rng.random() < 0.85 or shape.startswith("with"):
        return answer, shape
    outer = rng.choice(("data", "result", "record", "entry"))
    return {outer: answer}, f'{{"{outer}": {shape}}}'


def make(rng: Random, split: Split, effort: str) -> Example:
    """Extraction of some fields of one record."""

    def draw_record() -> tuple[str, tuple[Record, dict[str, Any]]]:
        record = rng.choice(RECORDS)
        values = draw_values(record, rng)
        return f"json {record.name} {dumps(values)}", (record, values)

    record, values = draw(split, draw_record)
    chosen = _pick_fields(rng, record)
    shape = _shape([(key, record.fields[name]) for name, key in chosen], rng.randrange(3))
    answer, shape = _nest(rng, {key: values[name] for name, key in chosen}, shape)
    text = tell(record, values)
    reasoning = "fields: " + "; ".join(f"{key}={show(values[name])}" for name, key in chosen) + "."
    reply = assistant(dumps(answer), effort, reasoning)
    if rng.random() < 0.25:
        messages = (system(rng.choice(_ASK_SYSTEM).format(shape=shape)), user(text), reply)
    else:
        messages = (user(rng.choice(_ASK).format(shape=shape, text=text)), reply)  # type: ignore[assignment]
    return Example("json_extraction", messages, effort, check={"value": answer})


def make_records(rng: Random, split: Split, effort: str) -> Example:
    """An open-ended JSON array of invented records: no single right answer, long regular output."""
    record, keys, objects = draw(split, lambda: _draw_objects(rng))
    listed = ", ".join(keys[:-1]) + " and " + keys[-1]
    text = rng.choice(
        (
            "Write a JSON array of {n} invented {p} with the keys {k}.",
            "Give me only JSON: a list of {n} made-up {p}, each with {k}.",
            "Produce an array of {n} JSON objects for fictional {p}. Keys: {k}.",
            "Invent {n} {p} and answer with a JSON array. Every object has {k}.",
        )
    ).format(n=len(objects), p=record.plural, k=listed)
    reply = assistant(dumps(objects), effort, f"{len(objects)} objects, keys {listed}.")
    return Example(
        "json_records", (user(text), reply), effort, check={"keys": keys, "count": len(objects)}
    )


def _draw_objects(rng: Random) -> tuple[str, tuple[Record, list[str], list[dict[str, Any]]]]:
    record = rng.choice(RECORDS)
    names = rng.sample(list(record.fields), rng.randint(2, len(record.fields)))
    objects = []
    for _ in range(rng.randint(2, 12)):
        values = draw_values(record, rng)
        objects.append({name: values[name] for name in names})
    return f"json records {dumps(objects[0])}", (record, names, objects)


def check(example: Example, content: str) -> bool:
    """True when the answer is JSON equal to the expected value (or a list of the asked shape)."""
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return False
    if "value" in example.check:
        return dumps(value) == dumps(example.check["value"]) or bool(
            value == example.check["value"]
        )
    keys = example.check["keys"]
    return (
        isinstance(value, list)
        and len(value) == example.check["count"]
        and all(isinstance(v, dict) and list(v) == keys for v in value)
    )
