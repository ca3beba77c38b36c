"""Output parser: chunking never matters, options, token attribution, limits."""

import json
import random
import re

import pytest
from tiny_tokenizer import STRUCTURE, description

from twining.serving.parsing import (
    CallOpened,
    ContentText,
    Marker,
    OutputParser,
    ParserOptions,
    ReasoningText,
    TextParser,
    TokenParser,
    start_state,
)
from twining.serving.tokenizer import Tokenizer

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "save",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "text": {"type": "string"},
                    "n": {"type": "integer"},
                    "o": {"type": "object"},
                    "u": {"type": ["string", "null"]},
                },
            },
        },
    },
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "nowhere", "parameters": {"type": "object"}}},
]
TEXTS = [
    *["save", "now", "nowhere", "path", "text", "n", "o", "now path", "save{", '{"path": "x"}'],
    *[" ", "\n", "  \n", "a", "42", "-1.50", "null", "None", '"', "\\", "é", "👩‍💻", "\u2028"],
    *['{"name": "now", "arguments": {}}', '{"a": [1, {"b": 2}]}', "x" * 130, "y" * 260, ">"],
    *["<", "</", "<arg_", "</tool_cal", "no such", "\x00", "\x85", "word word word"],
]
MARKERS = [marker.value for marker in Marker]


def options(**changes):
    return ParserOptions(**({"tools": TOOLS, "make_id": lambda: "id"} | changes))


def result(parser, end):
    parser.finish(end)
    return parser.message()


def by_text(chunks, end, start="reasoning", opts=None):
    parser = TextParser(opts or options(), start=start)
    for chunk in chunks:
        parser.feed(chunk)
    return result(parser, end)


def random_pieces(rng):
    pieces = []
    for _ in range(rng.randrange(1, 25)):
        kind = rng.random()
        if kind < 0.5:
            pieces.append(rng.choice(MARKERS))
        elif kind < 0.6:  # a well-formed call, so that deeper states are reached often
            key = rng.choice(["path", "n", "q"])
            pieces += ["<tool_call>", rng.choice(["save", "now"]), "<arg_key>", key, "</arg_key>"]
            pieces += ["<arg_value>", rng.choice(TEXTS)]
        else:
            pieces.append(rng.choice(TEXTS))
    return pieces


def chunked(text, rng):
    at, chunks = 0, []
    while at < len(text):
        step = rng.randrange(1, 12)
        chunks.append(text[at : at + step])
        at += step
    return chunks


def unique_pairs(pairs):
    assert len({key for key, _ in pairs}) == len(pairs)
    return dict(pairs)


@pytest.mark.parametrize("seed", range(4))
def test_random_mixtures_do_not_depend_on_chunking(seed):
    rng = random.Random(seed)
    for number in range(600):
        pieces = random_pieces(rng)
        text, end = "".join(pieces), rng.choice(["eos", "length"])
        opts = options(
            parallel_tool_calls=rng.random() < 0.8,
            unknown_tools=rng.choice(["pass", "drop"]),
            tool_choice=rng.choice(["auto", "auto", "none"]),
        )
        start = rng.choice(["reasoning", "content"])
        whole = by_text([text], end, start, opts)
        where = (seed, number, pieces, end)
        assert by_text(list(text), end, start, opts) == whole, where
        assert by_text(chunked(text, rng), end, start, opts) == whole, where
        if re.search("|".join(MARKERS), "".join(p for p in pieces if p not in MARKERS)) is None:
            direct = OutputParser(opts, start=start)
            # "<" pieces glued to their neighbours may spell a marker, which ids never do
            for piece in re.split("(" + "|".join(MARKERS) + ")", text):
                if piece in MARKERS:
                    direct.feed_marker(Marker(piece))
                else:
                    direct.feed_text(piece)
            assert result(direct, end) == whole, where
        for call in whole.tool_calls:
            assert call.is_complete or end == "length", where
            if call.is_complete:
                parsed = json.loads(call.arguments, object_pairs_hook=unique_pairs)
                assert isinstance(parsed, dict), where


def test_without_tools_only_think_marks_go():
    rng = random.Random(77)
    for _ in range(200):
        text = "".join(random_pieces(rng))
        message = by_text([text], "eos", "content", ParserOptions())
        want = re.sub("</?think>", "", text)
        if "<think>" not in text:
            assert (message.content or "") == (want if want.strip() else "")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(description())


def encode(tokenizer, pieces):
    ids = []
    for piece in pieces:
        found = tokenizer.id_of(piece) if piece in STRUCTURE else None
        ids += tokenizer.encode_text(piece) if found is None else [found]
    return ids


@pytest.mark.parametrize("seed", [1, 2])
def test_tokens_are_attributed_once_and_exactly(tokenizer, seed):
    """Bytes of the tokens of a channel hold its text; no token is named by two events."""
    rng = random.Random(seed)
    for number in range(300):
        ids = encode(tokenizer, random_pieces(rng))
        parser = TokenParser(tokenizer, options(), start="reasoning")
        events = [event for token_id in ids for event in parser.feed_token(token_id)]
        events += parser.finish("length")
        message, where = parser.message(), (seed, number)
        named = [t for e in events for t in getattr(e, "tokens", ())]
        assert len(set(named)) == len(named), where
        assert len(parser.channels) == len(ids)
        for kind, channel, text in (
            (ReasoningText, "reasoning", message.reasoning_content),
            (ContentText, "content", message.content),
        ):
            assert "".join(e.text for e in events if isinstance(e, kind)) == (text or ""), where
            mine = [i for i, c in enumerate(parser.channels) if c == channel]
            assert mine == sorted({t for e in events if isinstance(e, kind) for t in e.tokens})
            data = b"".join(tokenizer.token_bytes(ids[i]) for i in mine).decode(errors="replace")
            # white space apart: a token's blank tail may have been held and dropped
            assert re.sub(r"\s", "", data) == re.sub(r"\s", "", text or ""), where


def test_token_channels(tokenizer):
    pieces = ["Hm.", "</think>", "Let me look.", "\n\n", "<tool_call>", "now", "</tool_call>", "x"]
    ids = [encode(tokenizer, [piece]) for piece in pieces]
    parser = TokenParser(tokenizer, options(), start="reasoning")
    seen = []
    for group in ids:
        parser.feed(group)
        seen.append(set(parser.channels[-len(group) :]))
    parser.finish("eos")
    assert seen[0] == {"reasoning"} and seen[2] == {"content"} and seen[7] == {"content"}
    blank = sum(map(len, ids[:3]))
    assert parser.channels[blank] == "none"  # the run before a call is dropped
    assert parser.num_reasoning_tokens == len(ids[0]) + 1
    assert parser.message().content == "Let me look.x"


def test_letters_of_a_marker_are_text_and_stop_tokens_are_skipped(tokenizer):
    parser = TokenParser(tokenizer, options(), start="content")
    ids = tokenizer.encode_text("a</think><tool_call>now</tool_call>")
    parser.feed([*ids, tokenizer.markers.observation, tokenizer.id_of("<|begin_of_box|>")])
    parser.finish("eos")
    message = parser.message()
    assert message.content == "a</think><tool_call>now</tool_call>" and not message.tool_calls


def test_unfinished_character_is_dropped_before_a_marker(tokenizer):
    half = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i) == b"\xf0")
    parser = TokenParser(tokenizer, options(), start="reasoning")
    parser.feed([*tokenizer.encode_text("a"), half, tokenizer.markers.think_close])
    parser.feed([*tokenizer.encode_text("b"), half])
    assert parser.finish("length") == []
    message = parser.message()
    assert (message.reasoning_content, message.content) == ("a", "b")
    assert parser.channels == ["reasoning", "none", "none", "content", "none"]


def test_start_state(tokenizer):
    for text, want in [
        ("<|user|>q<|assistant|><think>", "reasoning"),
        ("<|user|>q<|assistant|><think></think>", "content"),
        ("<|assistant|><think>plan</think>Autumn", "content"),
        ("<|assistant|><think>x</think>y<|user|>q<|assistant|><think>First I", "reasoning"),
        ("once upon a time", None),
        ("<think>a</think>b", None),
    ]:
        assert start_state(tokenizer.encode_with_markers(text), tokenizer.markers) == want, text


def test_content_white_space():
    for text, want in [
        ("  \n", None),
        (" a \n", " a \n"),
        ("a\n\n<tool_call>now</tool_call>\n", "a"),
        ("a\n\n<tool_call>bad name</tool_call>\n", "a\n\n<tool_call>bad name</tool_call>\n"),
        ("\x85a\u2003", "\x85a\u2003"),
    ]:
        assert by_text([text], "eos", "content").content == want, text


def test_unclosed_reasoning_option():
    parser = TextParser(options(), start="reasoning")
    parser.feed("four")
    parser.finish("eos")
    assert parser.message().reasoning_only
    moved = parser.message(unclosed_reasoning="content")
    assert (moved.reasoning_content, moved.content, moved.reasoning_only) == (None, "four", False)
    assert not by_text(["four"], "length").reasoning_only
    assert not by_text(["four</think>"], "eos").reasoning_only


def test_unknown_tools_drop():
    text = "Hi<tool_call>ghost<arg_key>k</arg_key><arg_value>v</arg_value></tool_call>"
    kept = by_text([text], "eos", "content")
    assert [call.name for call in kept.tool_calls] == ["ghost"]
    gone = by_text([text + "<tool_call>now"], "eos", "content", options(unknown_tools="drop"))
    assert [call.name for call in gone.tool_calls] == ["now"] and gone.content == "Hi"
    alone = by_text([text], "eos", "content", options(unknown_tools="drop"))
    assert not alone.tool_calls and alone.finish_reason == "stop"


def test_parallel_calls_off_stops_generation():
    parser = TextParser(options(parallel_tool_calls=False), start="content")
    parser.feed("<tool_call>now<tool_call>save")
    assert not parser.stop_generation
    parser.feed("</tool_call>")  # the second name settles that the first was a whole call
    assert parser.stop_generation
    assert parser.feed("tail") == []
    message = result(parser, "length")
    assert [call.name for call in message.tool_calls] == ["now"]
    assert message.finish_reason == "tool_calls"


@pytest.mark.parametrize(
    ("text", "is_recovered"),
    [
        ("<tool_call>now</tool_call>", False),
        ("<tool_call>save<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>", False),
        ("<tool_call>ghost</tool_call>", False),
        ("<tool_call>now", True),
        ("<tool_call>save<arg_key>n</arg_key>1</arg_value></tool_call>", True),
        ("<tool_call>save<arg_key>n<arg_value>1</arg_value></tool_call>", True),
        ("<tool_call>save<arg_key>n</arg_key><arg_value>1</tool_call>", True),
        (
            "<tool_call>save<arg_key>n</arg_key><arg_value>1</arg_value></arg_value></tool_call>",
            True,
        ),
        ("<tool_call>savepath</arg_key><arg_value>1</arg_value></tool_call>", True),
        ("<tool_call>save<tool_call>n</arg_key><arg_value>1</arg_value></tool_call>", True),
        ('<tool_call>save{"n": 1}</tool_call>', True),
    ],
)
def test_repairs_are_counted(text, is_recovered):
    (call,) = by_text([text], "eos", "content").tool_calls
    assert call.is_complete and call.is_recovered == is_recovered


def test_run_together_prefers_a_declared_argument():
    tools = [
        {"function": {"name": "get", "parameters": {"properties": {"allx": {"type": "string"}}}}},
        {"function": {"name": "getall"}},
    ]
    opts = options(tools=tools)
    text = "<tool_call>get{}</arg_key><arg_value>v</arg_value></tool_call>"
    for key, want in [("allx", "get"), ("ally", "getall")]:
        (call,) = by_text([text.replace("{}", key)], "eos", "content", opts).tool_calls
        assert call.name == want


def value_of(text, key="text"):
    """The value of one argument of a call of `save` whose value text is given, then closed."""
    whole = f"<tool_call>save<arg_key>{key}</arg_key><arg_value>{text}"
    (call,) = by_text([whole], "eos", "content").tool_calls
    return json.loads(call.arguments)


@pytest.mark.parametrize(
    ("text", "want"),
    [
        # one quoted opening mark pays for one quoted closing mark, and no more
        ("<tool_call>a</tool_call>b</arg_value></tool_call>", "<tool_call>a</tool_call>b"),
        ("<tool_call></tool_call>b</arg_value><arg_key>n</arg_key><arg_value>1", None),
        ("<tool_call>a</arg_value></tool_call>b", "<tool_call>a</arg_value></tool_call>b"),
        ("a</arg_value> <think>b", "a</arg_value> <think>b"),
        ("a<arg_key>" + "k" * 128, "a<arg_key>" + "k" * 128),
        ("a<arg_key>path</arg_key> b", "a<arg_key>path</arg_key> b"),
        ("a<arg_key>text</arg_key><arg_value>b", "a<arg_key>text</arg_key><arg_value>b"),
        ("a<arg_key>ghost</arg_key><arg_value>b", "a<arg_key>ghost</arg_key><arg_value>b"),
    ],
)
def test_markers_as_data_inside_a_value(text, want):
    got = value_of(text)
    if want is None:
        assert got == {"text": "<tool_call></tool_call>b", "n": 1}
    else:
        assert got == {"text": want}


def test_quoted_closing_mark_lowers_the_depth():
    """After a quoted pair the real closing marks end the call at once, not at the turn's end."""
    text = "<tool_call>save<arg_key>text</arg_key><arg_value><tool_call>a</tool_call>b"
    message = by_text([text + "</arg_value></tool_call>c"], "eos", "content")
    (call,) = message.tool_calls
    assert json.loads(call.arguments) == {"text": "<tool_call>a</tool_call>b"}
    assert message.content == "c"


def test_long_key_guess_becomes_data_at_once():
    parser = TextParser(options(), start="content")
    parser.feed("<tool_call>save<arg_key>text</arg_key><arg_value>a<arg_key>")
    for _ in range(129):
        parser.feed("k")
    (call,) = result(parser, "length").tool_calls
    assert call.arguments == '{"text": "a<arg_key>' + "k" * 129


@pytest.mark.parametrize(
    "name", ["now path more", "y" * 257, "a b", 'a"', "a<", "now>x", "now}", "a\x00", "ghost{"]
)
def test_impossible_names_are_text_at_once(name):
    parser = TextParser(options(), start="content")
    events = parser.feed("<tool_call>" + name + " ")
    sent = "".join(e.text for e in events if isinstance(e, ContentText))
    # a final "<" may still begin a marker
    assert sent == "<tool_call>" + name
    assert parser.feed("</arg_key>") == [ContentText(" </arg_key>")]


def test_second_name_with_inner_blank_is_another_call():
    message = by_text(["<tool_call>now<tool_call>a b</arg_key>"], "eos", "content")
    assert [call.name for call in message.tool_calls] == ["now"]
    assert message.content == "<tool_call>a b</arg_key>"


def test_stray_call_close():
    call = "<tool_call>now</tool_call>"
    for text, want in [
        ("a</tool_call>b", "a</tool_call>b"),
        (call + "</tool_call>b", "b"),
        (call + "<tool_call>a b</tool_call>c</tool_call>d", "<tool_call>a b</tool_call>cd"),
    ]:
        assert by_text([text], "eos", "content").content == want


def test_token_holding_parts_of_two_characters():
    """b"\xc3", b"\xa9\xc3", b"\xa8": the middle token belongs to both characters, named once."""

    class Fake:
        def __init__(self, real):
            self.markers, self.hidden_ids = real.markers, frozenset()

        def token_bytes(self, token_id):
            return [b"\xc3", b"\xa9\xc3", b"\xa8"][token_id]

    parser = TokenParser(Fake(Tokenizer(description())), start="content")
    assert parser.feed_token(0) == []
    assert parser.feed_token(1) == [ContentText("é", (0, 1))]
    assert parser.feed_token(2) == [ContentText("è", (2,))]
    parser = TokenParser(Fake(Tokenizer(description())), start="reasoning")
    parser._machine.feed_marker(Marker.THINK_CLOSE)
    parser.feed([0, 1])
    assert parser.channels == ["content", "content"]


def test_big_integers_keep_their_digits():
    digits = "9" * 5000
    text = f"<tool_call>save<arg_key>n</arg_key><arg_value>{digits}</arg_value></tool_call>"
    (call,) = by_text([text], "eos", "content").tool_calls
    assert call.arguments == '{"n": ' + digits + "}"


def test_hostile_output_stays_linear():
    """Long runs in every state: a quadratic step would take minutes here."""
    for text in ["a" * 300_000, " " * 300_000, "<tool_call>" * 20_000, "</arg_value>" * 20_000]:
        for prefix in [
            "",
            "<tool_call>",
            "<tool_call>now<tool_call>",
            "<tool_call>save<arg_key>",
            "<tool_call>save<arg_key>text</arg_key><arg_value>",
            "<tool_call>save{",
        ]:
            parser = TextParser(options(), start="content")
            whole = prefix + text
            for at in range(0, len(whole), 50):
                parser.feed(whole[at : at + 50])
            parser.finish("length")


def test_ids_are_unique_and_well_formed():
    parser = TextParser(ParserOptions(tools=TOOLS), start="content")
    events = parser.feed("<tool_call>now</tool_call>" * 50)
    ids = [event.id for event in events if isinstance(event, CallOpened)]
    assert len(set(ids)) == 50 and all(re.fullmatch("call_[A-Za-z0-9]{24}", i) for i in ids)
