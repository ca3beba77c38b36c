"""Grammars while sampling: which tokens may follow the tokens generated so far. No torch.

Source: spec/api.md 7.2 to 7.5, spec/chat_format.md 9. The work is done by llguidance (an Earley
parser over a token trie); this module decides when a grammar applies and what ends a reply. The
state is a function of the generated prefix alone: `allowed` is given that prefix and catches up
with it, so a rejected draft never touches it and nothing has to be rolled back.

Letters: V vocabulary.
"""

import json
import logging
from collections.abc import Sequence
from pathlib import Path

import llguidance
import numpy as np
import numpy.typing as npt

from twining.engine.request import GrammarSpec, Request
from twining.engine.sampler import LogitsError
from twining.errors import RequestError

log = logging.getLogger(__name__)

Mask = npt.NDArray[np.bool_]

# Work per step and per grammar is counted, not timed, so a grammar behaves the same under load.
# Errors stay short: the long form quotes the reply into the log.
LIMITS = llguidance.LLParserLimits(verbose_errors=False)
MAX_MESSAGE_CHARS = 240


def check_source(source: str) -> str:
    """Why a grammar (llguidance's JSON form) cannot be used, or "" if it can.

    Compiles it without a vocabulary; token ids in it are not looked at.
    """
    is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(source, limits=LIMITS)
    return _one_line(messages[0]) if is_error else ""


class GrammarVocab:
    """The vocabulary in llguidance's form; shared by all grammars of an engine."""

    def __init__(self, tokenizer: llguidance.LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self.end_ids: tuple[int, ...] = tuple(tokenizer.eos_tokens)

    @classmethod
    def load(
        cls, folder: Path, *, vocab_size: int, end_ids: Sequence[int]
    ) -> "GrammarVocab | None":
        """From `folder/tokenizer.json`; V = vocab_size, the model's own.

        end_ids: tokens that can only end a turn. None, with the reason in the log, when there is no
        file or grammars cannot use it; requests with a grammar are then refused, others served.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            log.info("no tokenizer.json in %s: grammars are off", folder)
            return None
        try:
            return cls.from_json(path.read_bytes(), vocab_size=vocab_size, end_ids=end_ids)
        except (OSError, ValueError, KeyError, TypeError, IndexError) as err:
            log.warning("%s: %s; grammars are off", path, _one_line(str(err)))
            return None

    @classmethod
    def from_json(
        cls, text: str | bytes, *, vocab_size: int, end_ids: Sequence[int]
    ) -> "GrammarVocab":
        """From the text of a tokenizer.json.

        Raises ValueError, KeyError, TypeError or IndexError for one that cannot be used.
        """
        description = json.loads(text)
        # Every added token is a marker here: no text of a grammar can ever spell one.
        added: list[int] = []
        for entry in description["added_tokens"]:
            entry["special"] = True
            added.append(entry["id"])
        # The library wants an end token of its own; the model's may lie outside the file.
        end_ids = [i for i in end_ids if i in added] or added[-1:]
        return cls(
            llguidance.LLTokenizer(json.dumps(description), n_vocab=vocab_size, eos_token=end_ids)
        )

    def compile(self, spec: GrammarSpec, stop_ids: Sequence[int]) -> "GrammarState":
        """The state of a new request. Raises RequestError grammar_error if it does not compile."""
        matcher = llguidance.LLMatcher(self.tokenizer, spec.source, log_level=0, limits=LIMITS)
        if matcher.is_error():
            raise RequestError(
                f"the grammar cannot be used: {_one_line(matcher.get_error())}",
                code="grammar_error",
            )
        return GrammarState(self, spec, tuple(stop_ids), matcher)


def compile_grammar(vocab: GrammarVocab | None, request: Request) -> "GrammarState | None":
    """The grammar of a new request, None if it has none. Raises RequestError grammar_error."""
    if request.grammar is None:
        return None
    if vocab is None:
        if request.grammar.is_optional:
            return None
        raise RequestError(
            "grammars are off: the model's tokenizer.json is missing or unsuitable (see the log)",
            code="grammar_error",
        )
    try:
        return vocab.compile(request.grammar, request.stop_ids)
    except RequestError:
        if request.grammar.is_optional:
            return None
        raise


class GrammarState:
    """Where one sequence is in its grammar.

    Three phases: before `start_id` nothing is constrained; then either one match of the grammar and
    a stop token, or, with a trigger, free text with one match after each trigger token.
    """

    def __init__(
        self,
        vocab: GrammarVocab,
        spec: GrammarSpec,
        stop_ids: tuple[int, ...],
        matcher: llguidance.LLMatcher,
    ) -> None:
        self._vocab = vocab
        self._spec = spec
        self._stop_ids = stop_ids
        self._pristine = matcher
        self._seen: list[int] = []
        self._has_started = False
        self._matcher: llguidance.LLMatcher | None = None
        self._restart()

    def allowed(self, generated: Sequence[int], vocab_size: int) -> Mask | None:
        """Tokens that may follow `generated`, bool [V], or None for all of them.

        Raises LogitsError if the parser gave up (a grammar beyond its limits).
        """
        self._catch_up(generated)
        if self._matcher is None:
            if self._has_started or not self._spec.banned_before:
                return None
            mask = np.ones(vocab_size, dtype=np.bool_)
            mask[_inside(self._spec.banned_before, vocab_size)] = False
            return mask
        mask = np.zeros(vocab_size, dtype=np.bool_)
        if not self._is_stopped():
            bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
            self._check()
            known = np.unpackbits(bits, bitorder="little")[:vocab_size].astype(np.bool_)
            mask[: len(known)] = known
            mask[_inside(self._vocab.end_ids, vocab_size)] = False
            if not self._matcher.is_accepting():
                return mask
        mask[_inside(self._stop_ids, vocab_size)] = True
        return mask

    def is_complete(self, generated: Sequence[int]) -> bool:
        """Nothing but a stop token can follow. Raises LogitsError as `allowed`."""
        self._catch_up(generated)
        return self._matcher is not None and self._is_stopped()

    def _catch_up(self, generated: Sequence[int]) -> None:
        known = len(self._seen)
        if self._seen != generated[:known]:
            self._restart()
            known = 0
        for token in generated[known:]:
            self._seen.append(token)
            self._advance(token)

    def _restart(self) -> None:
        self._seen = []
        self._has_started = False
        self._matcher = None
        if self._spec.start_id < 0:
            self._start()

    def _start(self) -> None:
        self._has_started = True
        if self._spec.trigger_id < 0:
            self._matcher = self._pristine.deep_copy()

    def _advance(self, token: int) -> None:
        if self._matcher is not None:
            if not self._is_stopped():
                self._matcher.consume_token(token)
                self._check()
            if self._spec.trigger_id >= 0 and self._is_stopped():
                self._matcher = None  # the match is over, text is free again
        elif not self._has_started:
            if token == self._spec.start_id:
                self._start()
        elif token == self._spec.trigger_id:
            self._matcher = self._pristine.deep_copy()

    def _is_stopped(self) -> bool:
        assert self._matcher is not None
        self._check()
        return bool(self._matcher.is_stopped())

    def _check(self) -> None:
        assert self._matcher is not None
        if self._matcher.is_error():
            raise LogitsError(f"the grammar failed: {_one_line(self._matcher.get_error())}")


def _inside(ids: Sequence[int], vocab_size: int) -> list[int]:
    return [i for i in ids if 0 <= i < vocab_size]


def _one_line(text: str) -> str:
    return " ".join(text.split())[:MAX_MESSAGE_CHARS]
