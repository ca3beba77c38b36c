"""Under a grammar too, nothing but the request shows in the output: drafters, lengths, company."""

import json
import random

import jsonschema
import pytest
import torch
from llguidance import LLMatcher

from tests.exactness.tools import Bench, ReplayDrafter, assert_equal_runs, run, write_random_drafter
from tests.serving import tiny_tokenizer
from twining.engine.grammar import GrammarVocab
from twining.engine.request import GrammarSpec, Request, SamplingParams
from twining.serving.tokenizer import Tokenizer

VOCAB = 512
SCHEMA = {
    "type": "object",
    "properties": {
        "id": {"type": "integer", "minimum": 0, "maximum": 999},
        "tag": {"enum": ["red", "green", None]},
        "on": {"type": "boolean"},
    },
    "required": ["id", "tag"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Small matrices and a shared machine: more threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer.description())


@pytest.fixture(scope="module")
def bench(golden, tmp_path_factory, one_thread, tokenizer) -> Bench:
    folder = golden / "glm5_next" / "tiny"
    if not folder.is_dir():
        pytest.skip(f"no model at {folder}")
    drafter = write_random_drafter(
        tmp_path_factory.mktemp("drafter"), hidden=128, vocab=VOCAB, num_layers=8
    )
    bench = Bench.load(folder, drafter, 512)
    bench.grammar_vocab = GrammarVocab.from_json(
        json.dumps(tiny_tokenizer.description()), vocab_size=VOCAB, end_ids=tokenizer.stop_ids
    )
    return bench


def make_requests(tokenizer: Tokenizer) -> list[Request]:
    rng = random.Random(3)
    overrides = {"whitespace_pattern": r"\x20|\n\x20{0,8}"}
    source = LLMatcher.grammar_from_json_schema(SCHEMA, overrides=overrides)
    markers = tokenizer.markers
    call = f'start: ("f" | "get") <[{markers.tool_call_close}]>'
    specs = [
        GrammarSpec(source=source),
        GrammarSpec(source=source, start_id=markers.think_close),
        GrammarSpec(source=LLMatcher.grammar_from_lark(call), trigger_id=markers.tool_call_open),
        None,
    ]
    requests = []
    for n in range(10):
        spec = specs[n % 4]
        requests.append(
            Request(
                id=f"g{n}",
                prompt_ids=[rng.randrange(480) for _ in range((3, 64, 70, 130)[n % 4])],
                max_tokens=60 if n % 4 < 2 else 20,
                sampling=SamplingParams(
                    seed=n,
                    temperature=(0.0, 1.0)[n // 4 % 2],
                    repetition_penalty=(1.0, 1.1)[n % 3 == 0],
                    logit_bias={markers.tool_call_open: 20.0} if n % 4 == 2 else {},
                ),
                stop_ids=tokenizer.stop_ids if n % 5 else (),
                force_after=4 if n % 4 == 1 else -1,
                force_id=markers.think_close,
                grammar=spec,
                logprobs=1,
            )
        )
    return requests


@pytest.fixture(scope="module")
def alone(bench, tokenizer):
    return run(bench.engine(), make_requests(tokenizer))


def test_replies_follow_their_grammars(alone, tokenizer):
    ends = set(tokenizer.stop_ids)
    close, opening = tokenizer.markers.think_close, tokenizer.markers.tool_call_open
    for n in range(10):
        ids = [i for i in alone[f"g{n}"].token_ids if i not in ends]
        if n % 4 < 2:
            answer = ids[ids.index(close) + 1 :] if n % 4 == 1 else ids
            assert alone[f"g{n}"].finish_reason == "stop"
            jsonschema.validate(json.loads(tokenizer.decode(answer)), SCHEMA)
        elif n % 4 == 2:
            names = [
                tokenizer.decode(ids[i + 1 : ids.index(tokenizer.markers.tool_call_close, i)])
                for i, token in enumerate(ids)
                if token == opening and tokenizer.markers.tool_call_close in ids[i:]
            ]
            assert names and set(names) <= {"f", "get"}


@pytest.mark.parametrize(
    ("drafter", "num_draft", "max_seqs"),
    [
        ("ngram", 3, 1),
        ("mtp", 1, 3),
        ("mtp", 7, 4),
        ("dflash2", 7, 3),
        ("replay", 5, 1),
        ("replay", 15, 4),
    ],
)
def test_drafters_and_company(bench, alone, tokenizer, drafter, num_draft, max_seqs):
    requests = make_requests(tokenizer)
    if drafter == "replay":
        known = {tuple(r.prompt_ids): alone[r.id].token_ids for r in requests}
        drafter = ReplayDrafter(known, num_draft, seed=num_draft)
    engine = bench.engine(drafter, num_draft, max_seqs=max_seqs)
    got = run(engine, requests)
    assert_equal_runs(alone, got, f"{drafter} {num_draft}, {max_seqs} at a time")
    if isinstance(drafter, ReplayDrafter):
        assert engine.stats().num_accepted > 0


def test_a_bad_grammar_is_refused_alone(bench, tokenizer, alone):
    engine = bench.engine()
    good = make_requests(tokenizer)[0]
    bad = Request(
        id="bad",
        prompt_ids=[1],
        max_tokens=5,
        sampling=SamplingParams(),
        grammar=GrammarSpec(source=LLMatcher.grammar_from_lark("start: nothing")),
    )
    got = run(engine, [bad, good])
    assert got["bad"].code == "grammar_error"
    assert got[good.id].token_ids == alone[good.id].token_ids
