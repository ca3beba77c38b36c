"""Task generators: determinism, disjoint sides, and checkers that accept the reference only."""

import json
from random import Random

import pytest

from twining.demo.score import Reply, is_right
from twining.demo.tasks import (
    MAKERS,
    Split,
    arithmetic,
    json_extraction,
    lists,
    pick_effort,
    python_functions,
    retrieval,
    strings,
    tool_calls,
)


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_same_seed_same_example(kind):
    for seed in range(20):
        make = MAKERS[kind]
        assert make(Random(seed), Split.TRAIN, "high") == make(Random(seed), Split.TRAIN, "high")


@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_reply_shape(kind):
    rng = Random(f"shape {kind}")
    for _ in range(200):
        effort = pick_effort(rng)
        example = MAKERS[kind](rng, rng.choice(list(Split)), effort)
        assert example.reply["role"] == "assistant"
        assert example.reply["content"] or example.reply["tool_calls"]
        assert example.reply["content"] == example.reply["content"].strip()
        thinks = [m["reasoning_content"] for m in example.messages if m["role"] == "assistant"]
        assert all(thinks) if effort != "low" else not any(thinks)
        assert "{" not in example.messages[0]["content"] or kind == "json_extraction"


def identity(kind, example):
    """The parameters that make an item what it is, read back from the example itself."""
    text = example.prompt[-1]["content"]
    if kind == "arithmetic":
        numbers = [int(n) for n in arithmetic.re.findall(r"\d+", text)]
        is_sum = example.check["value"] == sum(numbers)
        return (is_sum, *(sorted(numbers) if is_sum else numbers), example.check["value"])
    if kind == "tool_call":
        return json.dumps(example.check["calls"])
    if kind == "python_functions":
        return example.check["source"]
    if kind == "retrieval":
        return example.check["sentence"].split(" is ")[0].split(" of the ")[1]
    return text


SCORED = {
    "arithmetic": arithmetic.make_two_digit,
    "tool_call": tool_calls.make_call,
    "python_functions": python_functions.make,
    "strings": strings.make,
    "sequence": lists.make_sequence,
    "retrieval": lambda rng, split, effort: retrieval.make(rng, split, effort, 60, len),
}


@pytest.mark.parametrize("kind", sorted(SCORED))
def test_sides_are_disjoint(kind):
    rng = Random(f"disjoint {kind}")
    seen = {
        split: {identity(kind, SCORED[kind](rng, split, "low")) for _ in range(4000)}
        for split in Split
    }
    assert len(seen[Split.HELDOUT]) > 50
    assert not seen[Split.TRAIN] & seen[Split.HELDOUT]


def test_arithmetic_steps_are_right():
    for a in range(0, 100, 3):
        for b in range(0, 100, 7):
            assert arithmetic.add_steps(a, b).endswith(f"= {a + b}.")
            assert arithmetic.sub_steps(a, b).endswith(f"= {a - b}.")
            head, tens = arithmetic.add_steps(a, b).split(". tens: ")
            written = int(head.split("write ")[1][0])
            assert int(tens.split(" = ")[1].split(".")[0]) * 10 + written == a + b
            head, tens = arithmetic.sub_steps(a, b).split(". tens: ")
            ones = int(head.split(" = ")[1].split(",")[0])
            assert 0 <= ones < 10
            assert int(tens.split(" = ")[1].split(".")[0]) * 10 + ones == abs(a - b)


@pytest.mark.parametrize("split", list(Split))
def test_checkers_accept_the_reference_and_refuse_changes(split):
    rng = Random(f"check {split}")
    for kind in ("arithmetic", "json_extraction", "tool_call", "python_functions"):
        for _ in range(60):
            example = MAKERS[kind](rng, split, "high")
            content = example.reply["content"]
            calls = [
                (c["function"]["name"], c["function"]["arguments"])
                for c in example.reply.get("tool_calls", ())
            ]
            assert is_right(example, Reply(content, calls)), example
            if calls:
                name, arguments = calls[-1]
                assert not is_right(example, Reply(content, [*calls[:-1], (name + "x", arguments)]))
                assert not is_right(example, Reply("I cannot do that.", []))
            elif kind == "arithmetic":
                assert not is_right(
                    example, Reply(content.replace(str(example.check["value"]), "7777"))
                )
            elif kind == "json_extraction":
                assert not is_right(example, Reply(content[:-1], []))
                assert not is_right(example, Reply("{}", []))


def test_python_checker_runs_the_answer():
    rng = Random(5)
    failed = 0
    for _ in range(120):
        example = python_functions.make(rng, Split.HELDOUT, "low")
        assert python_functions.check(example, example.reply["content"])
        assert len(example.check["cases"]) == python_functions.NUM_CASES
        head = example.check["source"].split("\n")[0]
        failed += not python_functions.check(example, f"```python\n{head}\n    return None\n```")
    assert failed == 120


def test_retrieval_text():
    rng = Random(9)
    for tokens in (200, 1000, 3000):
        example = retrieval.make(rng, Split.HELDOUT, "high", tokens, lambda s: len(s) // 4 + 1)
        text = example.prompt[-1]["content"]
        assert text.count(example.check["sentence"]) == 1
        assert retrieval.check(example, example.reply["content"])
        assert not retrieval.check(example, "The code is 00000.")
        entity = example.check["sentence"].split(" of the ")[1].split(" is ")[0]
        assert text.count(entity) == 2  # fact and question


def test_json_records_are_checked():
    example = json_extraction.make_records(Random(3), Split.HELDOUT, "low")
    assert json_extraction.check(example, example.reply["content"])
    assert not json_extraction.check(example, example.reply["content"][:-1])
    assert not json_extraction.check(example, "[]")
    assert not json_extraction.check(example, "[" * 100_000)


def test_strings_and_tables_check():
    rng = Random(4)
    for _ in range(50):
        example = strings.make(rng, Split.HELDOUT, "low")
        assert strings.check(example, example.reply["content"] + "\n")
        assert not strings.check(example, example.reply["content"] + "x")
