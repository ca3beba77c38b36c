"""Stop strings, token spans and cuts, under any bursts (twining.serving.stops, output)."""

import random

import pytest
import tiny_tokenizer
from serving_fakes import logprob_of

from twining.engine.request import Delta
from twining.serving.output import ChoiceOutput, OutputOptions
from twining.serving.stops import StopMatcher, TokenSpans
from twining.serving.tokenizer import Tokenizer

STOPS = [["ab"], ["abcd", "bc"], ["aa", "aab"], ["bab", "abb", "ca"], ["\n\n"], ["a"]]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(tiny_tokenizer.description())


def reference(text, stops):
    """(text before the match, match) found by looking at ever longer prefixes."""
    for end in range(len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            longest = max(found, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize("seed", range(300))
def test_matcher_equals_a_prefix_search_for_any_cut(seed):
    rng = random.Random(seed)
    stops = rng.choice(STOPS)
    text = "".join(rng.choice("abcd\n") for _ in range(rng.randrange(0, 24)))
    matcher = StopMatcher(stops)
    sent, match, at = "", None, 0
    while at < len(text) and match is None:
        size = rng.randrange(1, 6)
        certain, match = matcher.feed(text[at : at + size])
        sent += certain
        at += size
        assert reference(text, stops)[0].startswith(sent), "text was released too early"
    if match is None:
        sent += matcher.flush()
    want, stop = reference(text, stops)
    assert (sent, match and match.text) == (want, stop)
    if match is not None:
        assert text[match.start : match.end] == match.text


def test_spans_follow_bytes_and_skip_what_was_dropped():
    spans = TokenSpans()
    data = [b"  ", b"<m>", "h\u00e9".encode()[:2], "h\u00e9".encode()[2:], b"llo ", b"x"]
    for index, piece in enumerate(data):
        spans.token(index, piece)
    found = spans.text("h\u00e9llo", 0)
    assert [(s.token_index, s.start, s.end) for s in found] == [(2, 0, 2), (3, 2, 3), (4, 3, 6)]
    rest = spans.text(" x", 6)
    assert [s.token_index for s in rest] == [4, 5]


def push_all(output, ids, stop_id, bursts):
    """Feed ids in the given bursts; returns all pieces."""
    pieces, at = [], 0
    for size in bursts:
        part = ids[at : at + size]
        at += len(part)
        if part and not output.done:
            pieces += output.push(
                Delta(
                    request_id="r",
                    kind="tokens",
                    token_ids=part,
                    logprobs=[logprob_of(i) for i in part],
                )
            )
    if not output.done:
        pieces += output.push(
            Delta(request_id="r", kind="finished", finish_reason="stop", stop_id=stop_id)
        )
    return pieces


def snapshot(output):
    calls = [(c.name, c.arguments, c.is_complete) for c in output.tool_calls]
    return (
        output.ids,
        output.reasoning,
        output.content,
        calls,
        output.finish_reason,
        output.stop_reason,
        output.reasoning_tokens,
        [(e.data, e.logprob) for e in output.content_entries],
        [(e.data, e.logprob) for e in output.reasoning_entries],
    )


WORDS = [
    "the",
    " sum",
    "\n\n",
    "  ",
    "STOP",
    "ST",
    "OP",
    "\u20ac",
    "你好",
    "</think>",
    "<think>",
    "a",
]
CALL = "<tool_call>f<arg_key>k</arg_key><arg_value>STOP v</arg_value></tool_call>"
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.mark.parametrize("seed", range(200))
def test_result_does_not_depend_on_bursts(tokenizer, seed):
    rng = random.Random(seed)
    text = "".join(rng.choice([*WORDS, CALL]) for _ in range(rng.randrange(1, 20)))
    ids = tokenizer.encode_with_markers(text)
    stop = tokenizer.markers.user
    options = OutputOptions(
        stops=("STOP", "好\n", "\n\n"),
        include_stop=rng.random() < 0.3,
        min_tokens=rng.choice([0, 0, 5]),
        stop_ids=frozenset(tokenizer.stop_ids),
        logprobs=1,
    )
    results = []
    for size in (1, 2, 3, 7, 100):
        output = ChoiceOutput.for_chat(
            tokenizer, options, start="reasoning", tools=TOOLS, parallel_tool_calls=True
        )
        pieces = push_all(output, [*ids, stop], stop, [size] * (len(ids) + 1))
        for kind, whole in (("reasoning", output.reasoning), ("content", output.content)):
            assert "".join(p.text for p in pieces if p.kind == kind) == whole
        entries = [e for p in pieces if p.kind == "content" for e in p.entries]
        assert entries == output.content_entries
        results.append(snapshot(output))
    assert all(result == results[0] for result in results)
    if not output.tool_calls and "STOP" not in output.reasoning:
        joined = b"".join(e.data for e in output.content_entries)
        assert joined.decode(errors="replace").strip() == output.content.strip()


def test_white_space_stop_cuts_at_its_own_token(tokenizer):
    """The parser holds white space back; ids are cut where the stop string was complete."""
    text = "r</think>one\n\n" + "two"
    ids = tokenizer.encode_with_markers(text)
    options = OutputOptions(stops=("\n\n",), stop_ids=frozenset(tokenizer.stop_ids), logprobs=0)
    output = ChoiceOutput.for_chat(
        tokenizer, options, start="reasoning", tools=[], parallel_tool_calls=True
    )
    push_all(output, ids, tokenizer.markers.user, [1] * len(ids))
    assert output.content == "one"
    assert tokenizer.decode(output.ids).endswith("\n\n")
    assert output.stop_reason == "\n\n"


def test_stop_token_is_counted_once(tokenizer):
    stop = tokenizer.markers.user
    ids = tokenizer.encode_with_markers("r</think>x")
    options = OutputOptions(stop_ids=frozenset(tokenizer.stop_ids))
    for in_tokens in (True, False):
        output = ChoiceOutput.for_chat(
            tokenizer, options, start="reasoning", tools=[], parallel_tool_calls=True
        )
        push_all(output, [*ids, stop] if in_tokens else ids, stop, [2] * 10)
        assert output.ids == [*ids, stop]
        assert (output.content, output.reasoning) == ("x", "r")


def test_stop_string_inside_a_token_cuts_its_entry(tokenizer):
    ids = tokenizer.encode_with_markers("r</think>The sum")
    assert tokenizer.token_bytes(ids[-1]).endswith(b"um") and len(ids) < 8, "one token holds it"
    options = OutputOptions(stops=("m",), stop_ids=frozenset(tokenizer.stop_ids), logprobs=0)
    output = ChoiceOutput.for_chat(
        tokenizer, options, start="reasoning", tools=[], parallel_tool_calls=True
    )
    pieces = push_all(output, ids, tokenizer.markers.user, [1] * len(ids))
    assert output.content == "The su"
    assert b"".join(e.data for e in output.content_entries) == b"The su"
    assert [e for p in pieces if p.kind == "content" for e in p.entries] == output.content_entries
    assert output.ids == ids
