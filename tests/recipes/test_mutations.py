"""10,000 random mutations of the documents: a clear answer each time, bounded time and memory."""

import copy
import json
import random
import resource
import time

import pytest

from twining.errors import CheckpointError, ConfigError
from twining.planner.plan import plan
from twining.recipes.document import emit
from twining.recipes.examine import examine
from twining.recipes.fit import plan_request, recipe_devices, their_fit
from twining.recipes.resolve import engine_config, server_config
from twining.recipes.settings import Capabilities, Verdict

TOTAL = 10_000
MIB = 1 << 20
CAN = Capabilities()
STRANGE = [
    None,
    True,
    False,
    0,
    -1,
    1,
    2**31,
    2**63,
    -(2**70),
    10**400,
    0.5,
    -0.0,
    1e308,
    5e-324,
    "",
    " ",
    "\x00",
    "\ud800",
    "é" * 300,
    "-" * 50,
    "--",
    "=",
    "'",
    '"',
    "$(id)",
    "x=y",
    "A=" * 500,
    "/" * 500,
    "9" * 400,
    "1,2,,3",
    "nan",
    "{" * 200,
    "[" * 5000,
    '{"a":1,"a":2}',
    "f" * 20000,
    "(" * 3000 + ")" * 3000,
    [],
    {},
    [[]],
    [None] * 300,
    [{}] * 300,
    {"": {"": {"": {}}}},
    ["-m"],
    ["-cs", "1"],
    [["x"]],
    ["scripts/serve.sh --profile"],
    ["'"],
]


def places(root):
    """Paths of all values below the root."""
    found, waiting = [], [(root, ())]
    while waiting:
        node, path = waiting.pop()
        for key, value in node.items() if isinstance(node, dict) else enumerate(node):
            found.append((*path, key))
            if isinstance(value, dict | list):
                waiting.append((value, (*path, key)))
    return found


def mutate_value(document, rng):
    """Replace, remove, repeat, move or deepen one value."""
    path = rng.choice(places(document))
    node = document
    for key in path[:-1]:
        node = node[key]
    key = path[-1]
    kind = rng.randrange(8)
    if kind <= 3:
        node[key] = copy.deepcopy(rng.choice(STRANGE))
    elif kind == 4:
        del node[key]
    elif kind == 5 and isinstance(node, list):
        for _ in range(rng.choice([1, 2, 200])):
            node.insert(key, copy.deepcopy(node[key]))
    elif kind == 6:
        deep = node[key]
        for _ in range(rng.choice([1, 3, 30, 80, 400])):
            deep = [deep] if rng.random() < 0.5 else {"a": deep}
        node[key] = deep
    elif isinstance(node[key], str) and node[key]:
        node[key] = mutate_text(node[key], rng)
    else:
        node[key] = copy.deepcopy(rng.choice(STRANGE))


def mutate_text(text, rng):
    at, to = sorted(rng.randrange(len(text) + 1) for _ in range(2))
    to = min(to, at + 20)
    piece = rng.choice(["", text[at:to] * 3, "\\", '"', "9" * 20, "-", "\n", "=", ",", "\u202e"])
    return text[:at] + piece + text[to:]


def mutated(documents, raws, rng):
    """Bytes of one mutated document."""
    which = rng.randrange(2)
    if rng.random() < 0.25:
        raw = bytearray(raws[which])
        for _ in range(rng.choice([1, 1, 3, 40])):
            at = rng.randrange(len(raw))
            raw[at : at + rng.choice([0, 1, 1, 8])] = rng.randbytes(rng.choice([0, 1, 1, 4]))
        return bytes(raw[: rng.randrange(len(raw))] if rng.random() < 0.1 else raw)
    document = copy.deepcopy(documents[which])
    for _ in range(rng.choice([1, 1, 2, 5])):
        try:
            mutate_value(document, rng)
        except (KeyError, IndexError, RecursionError):  # of the mutator's own copies
            continue
    try:
        return json.dumps(document).encode()
    except RecursionError:  # the encoder's limit, not the reader's
        return b'{"a":' * 5000


def answer(raw, rng):
    """The whole path a document takes; returns a verdict in words."""
    try:
        found = examine(raw, CAN)
    except ConfigError as err:
        return str(err)
    lines = [*found.resolution.messages(), *(f.message for f in found.findings)]
    assert all(isinstance(line.verdict, Verdict) for line in found.resolution.lines)
    their_fit(found.resolution.settings)
    assert server_config_host(found) in (None, "127.0.0.1")
    if rng.random() < 0.05:
        emit(dict(found.recipe.raw))
        try:
            devices = recipe_devices(found.recipe, found.resolution.settings)
            plan(plan_request(found.recipe, found.resolution, devices))
        except (ConfigError, CheckpointError) as err:
            lines.append(str(err))
    assert found.findings and all("\n" not in line and len(line) < 2000 for line in lines)
    assert not found.is_sound or found.resolution.can_start
    return "sound" if found.is_sound else "unsound"


def server_config_host(found):
    if not found.resolution.can_start:
        return None
    drafter = "d" if found.resolution.settings.draft_method == "dflash2" else None
    try:
        engine_config(found.resolution, "m", drafter_dir=drafter)
        return server_config(found.resolution).host
    except ConfigError as err:
        assert "\n" not in str(err)
        return None


@pytest.mark.parametrize("seed", range(4))
def test_mutations(e_bytes, v_bytes, seed):
    rng = random.Random(20261130 + seed)
    raws = (e_bytes, v_bytes)
    documents = tuple(json.loads(raw) for raw in raws)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    slowest, verdicts = 0.0, {"sound": 0, "unsound": 0, "refused": 0}
    for number in range(TOTAL // 4):
        raw = mutated(documents, raws, rng)
        began = time.process_time()
        try:
            verdict = answer(raw, rng)
        except Exception as err:
            raise AssertionError(f"seed {seed}, mutation {number}: {raw[:300]!r}") from err
        slowest = max(slowest, time.process_time() - began)
        assert verdict and "\n" not in verdict
        verdicts[verdict if verdict in verdicts else "refused"] += 1
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert slowest < 2 and grown < 200 * MIB
    # The mutator reaches all three kinds of answer, so it tests more than the JSON parser.
    assert min(verdicts.values()) > 100, verdicts


HOSTILE = {
    "ten megabytes": b'{"slug": "' + b"a" * (10 * MIB) + b'"}',
    "two megabytes of text": b'{"title": "' + b"a" * (2 * MIB - 100) + b'"}',
    "many lists": b'{"perf_points": [' + b"[]," * 600_000 + b"[]]}",
    "many objects": b'{"artifacts": [' + b"{}," * 600_000 + b"{}]}",
    "many keys": b"{" + b",".join(b'"k%d":0' % i for i in range(150_000)) + b"}",
    "deep": b'{"config":' * 200_000,
    "long number": b'{"a":' + b"1" * 1_500_000 + b"}",
    "wide launch": b'{"engine_source":{"base_engine":"vllm"},"config":{"launch":['
    + b'"--a",' * 300_000
    + b'"--a"]}}',
    "long launch": b'{"engine_source":{"base_engine":"exllamav3"},"config":{"launch":["'
    + b"x" * 1_000_000
    + b'"]}}',
    "many launch lines": b'{"engine_source":{"base_engine":"exllamav3"},"config":{"launch":['
    + b",".join([b'"' + b"A=1 " * 4000 + b'"'] * 100)
    + b"]}}",
    "long prose": b'{"engine_source":{"base_engine":"vllm"},"config":{"launch":["vllm","-x"],'
    b'"runtime":{"env":"' + b"AAA(" * 60_000 + b'"}}}',
    "many cards": b'{"hardware":['
    + b",".join([b'{"vram_gb":1,"device_count":4096}'] * 9_000)
    + b"]}",
    "many notes": b'{"revision":{"notes":"' + b"a " * 700_000 + b'"}}',
    "hex notes": b'{"revision":{"notes":"' + b"a" * 1_400_000 + b'"}}',
    "deep metrics": b'{"performance":[{"claimed_by":"x","metrics":"' + b"[" * 900_000 + b'"}]}',
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_documents(name):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    began = time.process_time()
    answer(HOSTILE[name], random.Random(0))
    assert time.process_time() - began < 2
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < 200 * MIB
