"""Grammar states: a function of the prefix, whatever was drafted; and they end when they are
complete.
"""

import json
import random

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher

from tests.serving import tiny_tokenizer
from twining.engine.grammar import GrammarVocab, check_source, compile_grammar
from twining.engine.request import GrammarSpec, Request, SamplingParams
from twining.engine.sampler import LogitsError, TokenHistory
from twining.engine.verify import accept
from twining.errors import RequestError
from twining.serving.tokenizer import Tokenizer

VOCAB = 400  # more rows of logits than the tokenizer has tokens, as in padded models
SCHEMAS = [
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3, "maximum": 5000}}},
    {
        "type": "object",
        "properties": {"b": {"type": "string", "maxLength": 6}, "c": {"enum": [1, None, "x y"]}},
        "required": ["c"],
        "additionalProperties": False,
    },
    {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    {"type": ["number", "null"], "multipleOf": 5, "minimum": -100, "maximum": 100},
    {"anyOf": [{"const": "Zoë 你好"}, {"type": "array", "items": {"const": 7}, "maxItems": 3}]},
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tiny_tokenizer.description())


@pytest.fixture(scope="module")
def vocab(tokenizer) -> GrammarVocab:
    text = json.dumps(tiny_tokenizer.description())
    return GrammarVocab.from_json(text, vocab_size=VOCAB, end_ids=tokenizer.stop_ids)


def json_source(schema) -> str:
    return LLMatcher.grammar_from_json_schema(
        schema, overrides={"whitespace_pattern": r"\x20|\n\x20{0,8}"}
    )


def logits_of(prefix) -> np.ndarray:
    rng = np.random.default_rng([len(prefix), *prefix])
    return (2.0 * rng.standard_normal(VOCAB)).astype(np.float32)


def make_request(spec: GrammarSpec, stop_ids, **fields) -> Request:
    sampling = SamplingParams(**fields.pop("sampling", {}))
    fields = {"max_tokens": 200, "prompt_ids": [1, 2]} | fields
    return Request(id="r", sampling=sampling, stop_ids=stop_ids, grammar=spec, **fields)


def decode(vocab, request: Request, draft=lambda generated: []):
    """(ids, reason, stop id) with drafts by `draft`, rows computed as a verify step does."""
    state = compile_grammar(vocab, request)
    history = TokenHistory(request.prompt_ids)
    while True:
        drafts = draft(history.generated)
        rows = [
            logits_of((*request.prompt_ids, *history.generated, *drafts[:i]))
            for i in range(len(drafts) + 1)
        ]
        out = accept(torch.from_numpy(np.stack(rows)), drafts, request, history, state)
        history.extend(out.token_ids)
        if out.finish_reason is not None:
            return history.generated, out.finish_reason, out.stop_id


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: json.dumps(s)[:40])
def test_output_is_valid_and_drafts_do_not_show(vocab, tokenizer, schema, seed):
    rng = random.Random(seed)
    request = make_request(
        GrammarSpec(source=json_source(schema)),
        tokenizer.stop_ids,
        sampling={
            "seed": seed,
            "temperature": (0.0, 1.0, 1.5)[seed],
            "frequency_penalty": 0.3,
            # closing marks are likely, so that replies end
            "logit_bias": {i: 6.0 for text in '}]",' for i in tokenizer.encode_text(text)},
        },
    )
    plain = decode(vocab, request)
    ids, reason, stop_id = plain
    if reason == "stop":
        assert stop_id == ids[-1] in tokenizer.stop_ids
        jsonschema.validate(json.loads(tokenizer.decode(ids[:-1])), schema)
    assert reason == "stop" or schema["type"] == "object"  # free members may go on and on

    def guess(generated):
        right = ids[len(generated) : len(generated) + rng.randint(0, 5)]
        if right and rng.random() < 0.5:
            right[rng.randrange(len(right))] = rng.randrange(VOCAB)  # also illegal ones
        return right

    for _ in range(3):
        assert decode(vocab, request, guess) == plain


def test_a_wrong_draft_leaves_the_state_where_it_was(vocab, tokenizer):
    """After each rejection the mask is that of a fresh state on the same prefix."""
    spec = GrammarSpec(source=json_source(SCHEMAS[1]))
    request = make_request(spec, tokenizer.stop_ids, sampling={"seed": 4})
    ids, _, _ = decode(vocab, request)
    state = compile_grammar(vocab, request)
    for n in range(len(ids)):
        fresh = compile_grammar(vocab, request)
        got, want = state.allowed(ids[:n], VOCAB), fresh.allowed(ids[:n], VOCAB)
        assert (got == want).all() and got[ids[n]]
    # Backwards and sideways too: the state belongs to the prefix, not to the calls.
    assert (state.allowed([], VOCAB) == compile_grammar(vocab, request).allowed([], VOCAB)).all()


def test_starts_after_the_thought(vocab, tokenizer):
    markers = tokenizer.markers
    spec = GrammarSpec(
        source=json_source({"const": 7}),
        start_id=markers.think_close,
        banned_before=(markers.tool_call_open,),
    )
    state = compile_grammar(vocab, make_request(spec, tokenizer.stop_ids))
    before = state.allowed([5, 6], VOCAB)
    assert np.flatnonzero(~before).tolist() == [markers.tool_call_open]
    assert not state.is_complete([5, 6])
    after = state.allowed([5, 6, markers.think_close], VOCAB)
    seven = tokenizer.encode_text("7")
    assert np.flatnonzero(after).tolist() == seven
    done = [5, 6, markers.think_close, *seven]
    assert state.is_complete(done)
    assert set(np.flatnonzero(state.allowed(done, VOCAB))) == set(tokenizer.stop_ids)


def test_trigger_binds_one_match_and_frees_again(vocab, tokenizer):
    markers = tokenizer.markers
    opening, closing = markers.tool_call_open, markers.tool_call_close
    lark = f'start: ("f" | "go") <[{closing}]>'
    spec = GrammarSpec(source=LLMatcher.grammar_from_lark(lark), trigger_id=opening)
    state = compile_grammar(vocab, make_request(spec, tokenizer.stop_ids))
    f = tokenizer.encode_text("f")
    assert state.allowed([9], VOCAB) is None
    inside = state.allowed([9, opening], VOCAB)
    assert inside[f].all() and not inside[9] and not inside[list(tokenizer.stop_ids)].any()
    assert np.flatnonzero(state.allowed([9, opening, *f], VOCAB)).tolist() == [closing]
    call = [opening, *f, closing]
    assert state.allowed([9, *call], VOCAB) is None and not state.is_complete([9, *call])
    assert state.allowed([9, *call, 8, opening], VOCAB)[f].all()


def test_markers_are_never_text(vocab, tokenizer):
    """A grammar of any text allows the letters of a marker and not the marker."""
    spec = GrammarSpec(source=LLMatcher.grammar_from_regex(r"(.|\n)*"))
    state = compile_grammar(vocab, make_request(spec, tokenizer.stop_ids))
    mask = state.allowed(tokenizer.encode_text("</think"), VOCAB)
    assert mask[tokenizer.encode_text(">")[0]]
    assert not mask[list(tokenizer.markers.structure_ids)].any()
    assert set(np.flatnonzero(mask)) & set(tokenizer.hidden_ids) == set(tokenizer.stop_ids)


def test_stop_tokens_only_where_the_grammar_may_end(vocab, tokenizer):
    spec = GrammarSpec(source=LLMatcher.grammar_from_regex("ab+"))
    own = tokenizer.encode_text("?")[0]  # a stop token of the client's that is ordinary text
    state = compile_grammar(vocab, make_request(spec, (own,)))
    a, b = tokenizer.encode_text("a")[0], tokenizer.encode_text("b")[0]
    assert not state.allowed([a], VOCAB)[own]
    mask = state.allowed([a, b], VOCAB)
    assert mask[own] and mask[b] and not mask[list(tokenizer.stop_ids)].any()


def test_ends_without_stop_tokens_and_before_min_tokens(vocab, tokenizer):
    spec = GrammarSpec(source=LLMatcher.grammar_from_regex("ab"))
    ids, reason, stop_id = decode(vocab, make_request(spec, ()))
    assert (tokenizer.decode(ids), reason, stop_id) == ("ab", "stop", -1)
    ids, reason, stop_id = decode(vocab, make_request(spec, tokenizer.stop_ids, min_tokens=50))
    assert (tokenizer.decode(ids[:-1]), reason, stop_id) == ("ab", "stop", ids[-1])


def test_min_tokens_binds_while_the_grammar_can_go_on(vocab, tokenizer):
    spec = GrammarSpec(source=LLMatcher.grammar_from_regex("[ab]+"))
    bias = {i: 50.0 for i in tokenizer.stop_ids}
    request = make_request(
        spec, tokenizer.stop_ids, min_tokens=5, sampling={"logit_bias": bias, "seed": 2}
    )
    ids, reason, _ = decode(vocab, request)
    assert (len(ids), reason) == (6, "stop")


def test_everything_banned_fails_this_request(vocab, tokenizer):
    spec = GrammarSpec(source=LLMatcher.grammar_from_regex("7"))
    seven = tuple(tokenizer.encode_text("7"))
    with pytest.raises(LogitsError, match="banned"):
        decode(vocab, make_request(spec, tokenizer.stop_ids, sampling={"banned_ids": seven}))


def test_refusals(vocab, tokenizer, tmp_path):
    bad = GrammarSpec(source=LLMatcher.grammar_from_lark("start: nothing"))
    for target in (vocab, None):
        with pytest.raises(RequestError) as caught:
            compile_grammar(target, make_request(bad, tokenizer.stop_ids))
        assert caught.value.code == "grammar_error" and "\n" not in str(caught.value)
    assert check_source(bad.source) and not check_source(json_source({}))
    assert GrammarVocab.load(tmp_path, vocab_size=VOCAB, end_ids=(0,)) is None
    for text in ("{", "[]", '{"added_tokens": []}', '{"added_tokens": [{"id": 0}], "model": {}}'):
        (tmp_path / "tokenizer.json").write_text(text)
        assert GrammarVocab.load(tmp_path, vocab_size=VOCAB, end_ids=(0,)) is None


def test_end_tokens_outside_the_file(tmp_path, tokenizer):
    """A padded model may name an end token that its tokenizer lacks."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(tiny_tokenizer.description()))
    vocab = GrammarVocab.load(tmp_path, vocab_size=VOCAB, end_ids=(VOCAB - 1,))
    spec = GrammarSpec(source=LLMatcher.grammar_from_regex("a"))
    state = compile_grammar(vocab, make_request(spec, (VOCAB - 1,)))
    done = tokenizer.encode_text("a")
    assert np.flatnonzero(state.allowed([], VOCAB)).tolist() == done
    assert np.flatnonzero(state.allowed(done, VOCAB)).tolist() == [VOCAB - 1]
