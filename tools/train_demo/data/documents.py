"""Documents of the training stream: each is a token list with a loss weight per token.

Every kind has a source that makes small batches of documents from a counter, so the stream is a
pure function of (seed, worker, index). Conversations are encoded many at a time; long texts are put
together from encoded pieces.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random

import numpy as np

from tools.train_demo.data.corpus import Corpus
from tools.train_demo.data.render import Loss, Piece, marker, plain, segments
from tools.train_demo.data.text import TextEncoder
from twining.demo.tasks import MAKERS, Example, Split, lists, pick_effort, retrieval
from twining.demo.tasks.base import Message

PROMPT_WEIGHT = 0.1
_WEIGHTS = np.asarray([0.0, PROMPT_WEIGHT, 1.0], dtype=np.float32)
_BATCH = 48  # conversations per encoder call
_CLOSED_SHARE = 0.04  # conversations whose prompt closes the thinking block itself
_MULTI_KINDS = (
    "arithmetic",
    "strings",
    "json_extraction",
    "python_functions",
    "chat",
    "lists",
    "stories",
)


@dataclass(frozen=True, slots=True)
class Document:
    """ids int32 [T], weight float32 [T]."""

    kind: str
    ids: np.ndarray
    weight: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)


class Assembler:
    """Turns pieces into documents."""

    def __init__(self, encoder: TextEncoder) -> None:
        self.encoder = encoder
        self._digits = np.zeros(encoder.vocab_size, dtype=bool)
        self._digits[encoder.digit_ids] = True

    def document(self, kind: str, parts: Sequence[tuple[Sequence[int], Loss]]) -> Document:
        """Parts are token lists with their loss class."""
        ids = np.fromiter((i for part, _ in parts for i in part), dtype=np.int32)
        loss = np.repeat([int(c) for _, c in parts], [len(part) for part, _ in parts])
        weight = _WEIGHTS[loss]
        # Digits of a prompt are mostly random: nothing to learn from predicting them.
        weight[(loss == int(Loss.PROMPT)) & self._digits[ids]] = 0.0
        return Document(kind, ids, weight)

    def documents(self, kind: str, pieces: list[list[Piece]]) -> list[Document]:
        """Encode many conversations at once."""
        texts = [p.text for doc in pieces for p in doc if not p.is_marker]
        encoded = iter(self.encoder.encode_many(texts))
        ids = self.encoder.markers
        return [
            self.document(
                kind, [([ids[p.text]] if p.is_marker else next(encoded), p.loss) for p in doc]
            )
            for doc in pieces
        ]


def _maybe_closed(rng: Random, example: Example) -> Example:
    """A thinking conversation whose prompt closed the block; its reply has no reasoning."""
    if example.effort == "low" or rng.random() >= _CLOSED_SHARE:
        return example
    messages: list[Message] = [
        {**m, "reasoning_content": ""} if m["role"] == "assistant" else m for m in example.messages
    ]
    return replace(example, messages=tuple(messages), think_closed=True)


def make_multi_turn(rng: Random) -> Example:
    """Two to four exchanges of mixed kinds in one conversation."""
    effort = pick_effort(rng)
    messages: list[Message] = []
    for _ in range(rng.randint(2, 4)):
        example = MAKERS[rng.choice(_MULTI_KINDS)](rng, Split.TRAIN, effort)
        # A system message stays only at the start.
        messages += [m for m in example.messages if m["role"] != "system" or not messages]
        if example.messages[0]["role"] == "system" and messages[0] is not example.messages[0]:
            messages[-2] = {
                **messages[-2],
                "content": example.messages[0]["content"] + "\n" + messages[-2]["content"],
            }
    return Example("multi_turn", tuple(messages), effort)


class Conversations:
    """Documents of one task kind."""

    def __init__(self, kind: str, assembler: Assembler) -> None:
        self.kind = kind
        self._assembler = assembler

    def _example(self, rng: Random) -> Example:
        if self.kind == "multi_turn":
            return make_multi_turn(rng)
        return MAKERS[self.kind](rng, Split.TRAIN, pick_effort(rng))

    def make(self, rng: Random) -> list[Document]:
        """One batch."""
        examples = [_maybe_closed(rng, self._example(rng)) for _ in range(_BATCH)]
        return self._assembler.documents(self.kind, [segments(e) for e in examples])


class RawStructured:
    """Completion-style documents without roles: sequences, JSON arrays, tables, code, stories."""

    def __init__(self, assembler: Assembler) -> None:
        self._assembler = assembler

    def make(self, rng: Random) -> list[Document]:
        """One batch."""
        pieces = []
        for _ in range(_BATCH):
            u = rng.random()
            if u < 0.3:
                example = lists.make_sequence(rng, Split.TRAIN, "low")
            elif u < 0.5:
                example = lists.make_table(rng, Split.TRAIN, "low")
            else:
                kind = "json_records" if u < 0.7 else "stories" if u < 0.85 else "python_functions"
                example = MAKERS[kind](rng, Split.TRAIN, "low")
            text = example.reply["content"].removeprefix("```python\n").removesuffix("```")
            pieces.append([plain(text, Loss.TARGET), marker("<|endoftext|>", Loss.TARGET)])
        return self._assembler.documents("raw_structured", pieces)


class RawCorpus:
    """Windows of the corpus; the end of a document is marked by <|endoftext|>."""

    def __init__(self, corpus: Corpus, assembler: Assembler, max_tokens: int) -> None:
        self._corpus = corpus
        self._assembler = assembler
        self._max = max_tokens

    def make(self, rng: Random) -> list[Document]:
        """One batch."""
        made = []
        end = [self._assembler.encoder.markers["<|endoftext|>"]]
        for _ in range(8):
            length = min(self._max - 1, rng.choice((128, 256, 512, 1024, 2048)))
            ids, is_end = self._corpus.window(rng.random(), length)
            # The first token of a cut text cannot be predicted from anything.
            parts = [(ids[:1], Loss.NONE), (ids[1:], Loss.TARGET)]
            made.append(
                self._assembler.document(
                    "corpus", [*parts, (end, Loss.TARGET)] if is_end else parts
                )
            )
        return made


class Haystacks:
    """Retrieval documents: a long text, then one to six questions about its facts."""

    _POOL = 1500  # encoded filler paragraphs kept ready
    _CORPUS_SHARE = 0.15  # filler taken from the corpus

    def __init__(
        self, corpus: Corpus, assembler: Assembler, lengths: tuple[int, int], rng: Random
    ) -> None:
        self._corpus = corpus
        self._assembler = assembler
        self._lengths = lengths
        self._pool = self._fillers(rng, self._POOL)

    def _fillers(self, rng: Random, count: int) -> list[list[int]]:
        texts = []
        for _ in range(count):
            if rng.random() < self._CORPUS_SHARE:
                ids, _ = self._corpus.window(rng.random(), rng.randint(30, 120))
                text = self._assembler.encoder.decode(ids.tolist()).replace("\ufffd", "").strip()
                texts.append("\n" + (text or "..."))
            else:
                texts.append("\n" + retrieval.filler(rng))
        return self._assembler.encoder.encode_many(texts)

    def _refresh(self, rng: Random) -> None:
        fresh = self._fillers(rng, 24)
        for ids in fresh:
            self._pool[rng.randrange(len(self._pool))] = ids

    def make(self, rng: Random) -> list[Document]:
        """One batch of eight documents."""
        self._refresh(rng)
        return [self._one(rng) for _ in range(8)]

    def _length(self, rng: Random) -> int:
        """Log-uniform: short texts (more questions per token) are as common as long ones."""
        low, high = self._lengths
        return int(low * (high / low) ** rng.random())

    def _one(self, rng: Random) -> Document:
        effort = pick_effort(rng)
        tokens = self._length(rng)
        num_asked = rng.randint(1, 6)
        density = rng.choice((40, 60, 100, 100, 160))
        facts = retrieval.draw_facts(rng, Split.TRAIN, max(2, num_asked, tokens // density))
        encoded = self._assembler.encoder.encode_many([" " + f.sentence for f in facts])
        # A question with its answer takes about 36 tokens, with reasoning 62; the head takes 20.
        per_turn = 36 if effort == "low" else 62
        left = tokens - sum(map(len, encoded)) - per_turn * num_asked - 20
        fillers: list[list[int]] = []
        while left > 0:
            piece = rng.choice(self._pool)
            left -= len(piece)
            if left > 0:
                fillers.append(piece)
        gaps: list[list[int]] = [[] for _ in range(len(fillers) + 1)]
        for ids in encoded:
            rng.choice(gaps).extend(ids)
        body = list(gaps[0])
        for piece, gap in zip(fillers, gaps[1:], strict=True):
            body += piece
            body += gap
        return self._conversation(rng, effort, body, rng.sample(facts, num_asked))

    def _conversation(
        self, rng: Random, effort: str, body: list[int], asked: list[retrieval.Fact]
    ) -> Document:
        head, first = retrieval.head(rng), retrieval.ask(rng, asked[0])
        messages: list[Message] = []
        for i, fact in enumerate(asked):
            question = retrieval.ask(rng, fact) if i else first
            messages += [{"role": "user", "content": question}, retrieval.answer(fact, effort)]
        pieces = segments(Example("retrieval", tuple(messages), effort))
        # Four pieces of system head, then <|user|>; the text goes between it and the question.
        at = 5
        pieces[at] = plain("\n" + first)
        texts = [head] + [p.text for p in pieces if not p.is_marker]
        encoded = iter(self._assembler.encoder.encode_many(texts))
        head_ids = next(encoded)
        ids = self._assembler.encoder.markers
        parts = [([ids[p.text]] if p.is_marker else next(encoded), p.loss) for p in pieces]
        parts[at:at] = [(head_ids, Loss.PROMPT), (body, Loss.PROMPT)]
        return self._assembler.document("retrieval", parts)


Source = Callable[[Random], list[Document]]


def make_sources(
    kinds: Sequence[str], encoder: TextEncoder, corpus: Corpus, seq_len: int,
    lengths: tuple[int, int], rng: Random,
) -> dict[str, Source]:  # fmt: skip
    """kind -> function that makes a batch of documents."""
    assembler = Assembler(encoder)
    sources: dict[str, Source] = {}
    for kind in kinds:
        if kind == "corpus":
            sources[kind] = RawCorpus(corpus, assembler, seq_len).make
        elif kind == "raw_structured":
            sources[kind] = RawStructured(assembler).make
        elif kind == "retrieval":
            sources[kind] = Haystacks(corpus, assembler, lengths, rng).make
        else:
            sources[kind] = Conversations(kind, assembler).make
    return sources
