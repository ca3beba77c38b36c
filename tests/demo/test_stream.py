"""The training stream: exact prompt format, whole documents, losses, shares, determinism."""

import json
from random import Random

import numpy as np
import pytest

from tools.train_demo.data.corpus import Corpus, page_text
from tools.train_demo.data.documents import Assembler, Haystacks, make_multi_turn
from tools.train_demo.data.render import Loss, prompt_text, segments
from tools.train_demo.data.stream import DEFAULT_MIX, PackedStream
from tools.train_demo.data.text import MODEL_DIR, TextEncoder
from tools.train_demo.tokenizer import MARKERS, NUM_BPE
from twining.demo.tasks import MAKERS, Split, pick_effort, retrieval
from twining.serving.chat_format.render import prompt_text as server_text
from twining.serving.chat_format.render import render
from twining.serving.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def encoder():
    return TextEncoder()


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(MODEL_DIR)


@pytest.fixture(scope="module")
def corpus_path(tmp_path_factory, encoder):
    """A small corpus: the modules of this package."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.bin"
    texts = [p.read_text("utf-8") for p in sorted(MODEL_DIR.parent.rglob("*.py"))]
    ids = encoder.encode_many(texts)
    np.concatenate([np.asarray(i, dtype=np.uint16) for i in ids]).tofile(path)
    starts = np.cumsum([0, *map(len, ids)])
    np.save(path.with_suffix(".bin.idx.npy"), starts)
    return path


def test_vocabulary(encoder, tokenizer):
    assert encoder.vocab_size == tokenizer.vocab_size == 8192
    assert [encoder.markers[t] for t, _ in MARKERS] == list(range(NUM_BPE, 8192))
    spec = json.loads((MODEL_DIR / "tokenizer.json").read_text("utf-8"))
    assert [(t["content"], t["special"]) for t in spec["added_tokens"]] == list(MARKERS)
    generation = json.loads((MODEL_DIR / "generation_config.json").read_text("utf-8"))
    assert tuple(generation["eos_token_id"]) == tokenizer.stop_ids


def test_digits_never_merge(encoder):
    for text in ("12345", " 12345", "a12", '{"n":42}', "-77", "x=3.14"):
        tokens = [encoder.decode([i]) for i in encoder.encode_many([text])[0]]
        assert all(t.isdigit() <= (len(t) == 1) for t in tokens)
        assert sum(t.isdigit() for t in tokens) == sum(c.isdigit() for c in text)


def test_text_round_trip(encoder):
    rng = Random(11)
    alphabet = "abc XYZ 019 \n\t{}[]\"'_-.,:;é漢🙂\u00a0"
    for _ in range(200):
        text = "".join(rng.choices(alphabet, k=rng.randint(1, 60)))
        assert encoder.decode(encoder.encode_many([text])[0]) == text


@pytest.mark.parametrize("kind", [*sorted(MAKERS), "multi_turn"])
def test_prompts_equal_the_server_renderer(kind, encoder, tokenizer):
    rng = Random(f"render {kind}")
    for _ in range(60):
        if kind == "multi_turn":
            example = make_multi_turn(rng)
        else:
            example = MAKERS[kind](rng, Split.TRAIN, pick_effort(rng))
        server = render(example.prompt, list(example.tools), reasoning_effort=example.effort)
        assert prompt_text(example) == server_text(server)
        whole = render(
            example.messages,
            list(example.tools),
            reasoning_effort=example.effort,
            add_generation_prompt=False,
        )
        document = Assembler(encoder).documents(kind, [segments(example)])[0]
        # The stream adds one token: the marker that ends the last reply.
        assert document.ids[:-1].tolist() == tokenizer.encode_segments(whole)
        assert document.ids[-1] in tokenizer.stop_ids


def test_full_loss_is_on_what_the_assistant_writes(encoder):
    rng = Random("loss")
    for _ in range(100):
        example = MAKERS["tool_call"](rng, Split.TRAIN, pick_effort(rng))
        got = "".join(p.text for p in segments(example) if p.loss is Loss.TARGET)
        want = ""
        for i, message in enumerate(example.messages):
            if message["role"] != "assistant":
                continue
            want += message["reasoning_content"] + "</think>" + message["content"]
            for call in message.get("tool_calls", ()):
                want += "<tool_call>" + call["function"]["name"]
                for key, value in call["function"]["arguments"].items():
                    shown = value if isinstance(value, str) else json.dumps(value)
                    want += f"<arg_key>{key}</arg_key><arg_value>{shown}</arg_value>"
                want += "</tool_call>"
            following = example.messages[i + 1 : i + 2]
            tool = following[0]["role"] == "tool" if following else bool(message.get("tool_calls"))
            want += "<|observation|>" if tool else "<|user|>"
        assert got == want


def rows(corpus_path, count, **changes):
    options = {
        "seed": 3, "worker": 0, "num_workers": 2, "seq_len": 1024, "mix": DEFAULT_MIX,
        "retrieval_lengths": (200, 900), "corpus_path": corpus_path,
    }  # fmt: skip
    stream = PackedStream(**(options | changes))
    return [next(stream) for _ in range(count)]


def test_stream_is_a_function_of_its_arguments(corpus_path):
    first, again = rows(corpus_path, 5), rows(corpus_path, 5)
    for a, b in zip(first, again, strict=True):
        assert all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))
    for other in ({"seed": 4}, {"worker": 1}):
        assert not np.array_equal(rows(corpus_path, 1, **other)[0][0], first[0][0])


@pytest.mark.parametrize(("seq_len", "longest"), [(1024, 900), (2048, 1900), (8448, 8200)])
def test_rows(corpus_path, encoder, seq_len, longest):
    padding = total = 0
    for ids, weight, doc, position in rows(
        corpus_path, 6, seq_len=seq_len, retrieval_lengths=(200, longest)
    ):
        assert ids.shape == weight.shape == doc.shape == position.shape == (seq_len,)
        assert ids.min() >= 0 and ids.max() < 8192
        assert set(np.unique(weight)) <= {np.float32(0), np.float32(0.1), np.float32(1)}
        assert (
            not weight[doc < 0].any() and (ids[doc < 0] == encoder.markers["<|endoftext|>"]).all()
        )
        for i in range(doc.max() + 1):
            own = np.flatnonzero(doc == i)
            assert np.array_equal(own, np.arange(own[0], own[-1] + 1))
            assert np.array_equal(position[own], np.arange(len(own)))
            if ids[own[0]] == encoder.markers["[gMASK]"]:  # a conversation, whole
                text = encoder.decode(ids[own])
                assert text.startswith("[gMASK]<sop><|system|>Reasoning Effort: ")
                assert text.endswith(("<|user|>", "<|observation|>")) and weight[own[-1]] == 1
        padding += int((doc < 0).sum())
        total += seq_len
    assert padding < 0.04 * total


def test_shares_of_tokens(corpus_path, encoder):
    mix = {"arithmetic": 1.0, "corpus": 1.0}
    raw = total = 0
    for ids, _, doc, _ in rows(corpus_path, 150, mix=mix, buffer_docs=16):
        for i in range(doc.max() + 1):
            own = ids[doc == i]
            raw += len(own) * int(own[0] != encoder.markers["[gMASK]"])
            total += len(own)
    assert abs(raw / total - 0.5) < 0.06


def test_haystacks_are_their_text(corpus_path, encoder, tokenizer):
    """Documents put together from pieces equal the encoding of their whole text."""
    haystacks = Haystacks(Corpus(corpus_path), Assembler(encoder), (200, 1500), Random(2))
    for document in haystacks.make(Random(6)):
        assert len(document) < 1700
        ids = tokenizer.encode_with_markers(encoder.decode(document.ids.tolist()))
        assert ids == document.ids.tolist()
        text = encoder.decode(document.ids.tolist())
        assert text.count(" found: ") in (0, text.count("<|assistant|>"))


def test_scored_haystack_is_counted_right(tokenizer):
    def count(text):
        return len(tokenizer.encode_text(text))

    for tokens in (300, 1000, 2000):
        example = retrieval.make(Random(tokens), Split.HELDOUT, "low", tokens, count)
        assert tokens - 200 < count(example.prompt[-1]["content"]) <= tokens


def test_bad_arguments(corpus_path):
    for changes in ({"mix": {"nothing": 1.0}}, {"mix": {}}, {"retrieval_lengths": (500, 5000)}):
        with pytest.raises(ValueError):
            rows(corpus_path, 1, **changes)


def test_page_text():
    html = "<nav>skip</nav><main><h1>Title</h1><p>One &amp; two</p><script>x()</script></main>after"
    assert page_text(html) == "Title\n\nOne & two"
