"""Text to token ids and back, structure markers kept apart from text (spec/chat_format.md 1, 5).

Two tokenizers are built from one `tokenizer.json`: the full one recognises added tokens (raw
prompts only); the plain one has none, so the letters `<|user|>` inside a message can never become
the role marker. That second one is the injection barrier. Ids are looked up by text at load.

Only byte-level BPE files are accepted: every ordinary token is then a known string of bytes, and
output can be decoded byte by byte without ever printing half a character.
"""

import codecs
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from twining.errors import CheckpointError, RequestError

MAX_TOKENIZER_BYTES = 256 << 20  # the real file is about 20 MB; more is damage or an attack

MAX_VOCAB = 1 << 22

# Attribute name -> marker text. All of these are structure of the text path and must exist.
REQUIRED_MARKERS = {
    "endoftext": "<|endoftext|>",
    "gmask": "[gMASK]",
    "sop": "<sop>",
    "system": "<|system|>",
    "user": "<|user|>",
    "assistant": "<|assistant|>",
    "observation": "<|observation|>",
    "think_open": "<think>",
    "think_close": "</think>",
    "tool_call_open": "<tool_call>",
    "tool_call_close": "</tool_call>",
    "tool_response_open": "<tool_response>",
    "tool_response_close": "</tool_response>",
    "arg_key_open": "<arg_key>",
    "arg_key_close": "</arg_key>",
    "arg_value_open": "<arg_value>",
    "arg_value_close": "</arg_value>",
}
# Media markers may be absent: a request that needs one is then refused.
OPTIONAL_MARKERS = {
    "image_open": "<|begin_of_image|>",
    "image_close": "<|end_of_image|>",
    "image": "<|image|>",
    "video_open": "<|begin_of_video|>",
    "video_close": "<|end_of_video|>",
    "video": "<|video|>",
}
# Added but not flagged special, and still never shown (spec 8.2).
HIDDEN_TEXTS = ("<|begin_of_box|>", "<|end_of_box|>")


class Segment(NamedTuple):
    """One piece of a prompt. kind "S": exactly one marker; "T": text, never searched for any."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Markers:
    """Token ids of the structure markers by role; media ids are None when the file lacks them."""

    endoftext: int
    gmask: int
    sop: int
    system: int
    user: int
    assistant: int
    observation: int
    think_open: int
    think_close: int
    tool_call_open: int
    tool_call_close: int
    tool_response_open: int
    tool_response_close: int
    arg_key_open: int
    arg_key_close: int
    arg_value_open: int
    arg_value_close: int
    image_open: int | None = None
    image_close: int | None = None
    image: int | None = None
    video_open: int | None = None
    video_close: int | None = None
    video: int | None = None

    @property
    def stop_ids(self) -> tuple[int, int, int]:
        """All three tokens that end a turn (spec 1)."""
        return (self.endoftext, self.user, self.observation)

    @property
    def structure_ids(self) -> tuple[int, ...]:
        """The eight markers that the output parser reads, in the order of spec 8.2."""
        return (
            self.think_open,
            self.think_close,
            self.tool_call_open,
            self.tool_call_close,
            self.arg_key_open,
            self.arg_key_close,
            self.arg_value_open,
            self.arg_value_close,
        )


class Tokenizer:
    """Immutable after load; safe to share between threads."""

    def __init__(self, description: dict[str, Any], source: str = "tokenizer.json") -> None:
        """description: parsed tokenizer.json. Raises CheckpointError for what is not understood."""
        self._source = source
        added = _added_tokens(description, source)
        _check_kind(description, source)
        self._full = _build(description, source)
        self._plain = _build(_without_added(description, added), source)
        self._added_ids = {text: self._full_id(text) for text in added}
        self.markers = self._find_markers()
        hidden = {i for text, i in self._added_ids.items() if added[text] or text in HIDDEN_TEXTS}
        self.hidden_ids: frozenset[int] = frozenset(hidden)  # dropped from visible text
        self._bytes = self._byte_table()

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read `folder/tokenizer.json`; CheckpointError if absent, damaged or unsuitable."""
        path = folder / "tokenizer.json"
        try:
            if path.stat().st_size > MAX_TOKENIZER_BYTES:
                raise CheckpointError(
                    f"{path}: larger than {MAX_TOKENIZER_BYTES >> 20} MiB; damaged?"
                )
            description = json.loads(path.read_bytes())
        except OSError as err:
            raise CheckpointError(
                f"{path}: {err.strerror or err}; the model folder needs tokenizer.json"
            ) from err
        except (ValueError, RecursionError) as err:
            raise CheckpointError(f"{path}: not valid JSON; download the file again") from err
        if not isinstance(description, dict):
            raise CheckpointError(f"{path}: not a JSON object; download the file again")
        return cls(description, str(path))

    @property
    def vocab_size(self) -> int:
        """Highest token id + 1. The model's own vocabulary may be padded beyond it."""
        return len(self._bytes)

    @property
    def stop_ids(self) -> tuple[int, int, int]:
        return self.markers.stop_ids

    def id_of(self, text: str) -> int | None:
        """Id of the one token spelled exactly `text` (markers included), or None."""
        token_id: int | None = self._full.token_to_id(text)
        return token_id

    def encode_text(self, text: str) -> list[int]:
        """Ids of ordinary text; nothing in it is ever a marker. Lone surrogates become U+FFFD."""
        if not text:
            return []
        ids: list[int] = self._plain.encode(_valid_text(text), add_special_tokens=False).ids
        return ids

    def encode_with_markers(self, text: str) -> list[int]:
        """Ids of a raw prompt in which markers are recognised (spec 5.4). Nothing is added."""
        if not text:
            return []
        ids: list[int] = self._full.encode(_valid_text(text), add_special_tokens=False).ids
        return ids

    def encode_segments(self, segments: Iterable[Segment]) -> list[int]:
        """Ids of a rendered prompt: "S" pieces by look-up, "T" pieces by `encode_text`.

        Raises RequestError (unsupported_content) for a media marker this tokenizer does not have.
        """
        ids: list[int] = []
        for kind, text in segments:
            if kind == "T":
                ids.extend(self.encode_text(text))
                continue
            marker = self._added_ids.get(text)
            if marker is None:
                raise RequestError(
                    f"the model has no marker {text}; send text only",
                    code="unsupported_content",
                    param="messages",
                )
            ids.append(marker)
        return ids

    def token_bytes(self, token_id: int) -> bytes:
        """Bytes of one token; a marker gives its own text. Ids without a token give b""."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Text of ids. skip_special drops hidden tokens (special ones and the box markers).

        Bytes of an unfinished last character are dropped; other invalid bytes become U+FFFD.
        """
        hidden = self.hidden_ids if skip_special else frozenset()
        data = b"".join(self.token_bytes(i) for i in ids if i not in hidden)
        return IncrementalDecoder().feed(data)

    def _full_id(self, text: str) -> int:
        token_id: int | None = self._full.token_to_id(text)
        if token_id is None:
            raise CheckpointError(f"{self._source}: added token {text!r} has no id")
        return token_id

    def _find_markers(self) -> Markers:
        ids: dict[str, int] = {}
        for name, text in (REQUIRED_MARKERS | OPTIONAL_MARKERS).items():
            if text not in self._added_ids:
                if name in OPTIONAL_MARKERS:
                    continue
                raise CheckpointError(
                    f"{self._source}: marker {text} is missing; use the vendor's tokenizer.json"
                )
            found = self.encode_with_markers(text)
            if found != [self._added_ids[text]]:
                raise CheckpointError(
                    f"{self._source}: marker {text} is {len(found)} tokens instead of one;"
                    " use the vendor's tokenizer.json"
                )
            ids[name] = found[0]
        return Markers(**ids)

    def _byte_table(self) -> list[bytes]:
        vocab: dict[str, int] = self._full.get_vocab(with_added_tokens=True)
        size = max(vocab.values()) + 1
        if size > MAX_VOCAB or len(set(vocab.values())) != len(vocab):
            raise CheckpointError(
                f"{self._source}: token ids repeat or exceed {MAX_VOCAB}; the file is damaged"
            )
        table = [b""] * size
        alphabet = _byte_alphabet()
        for text, token_id in vocab.items():
            if text in self._added_ids or not all(c in alphabet for c in text):
                table[token_id] = text.encode()
            else:
                table[token_id] = bytes(alphabet[c] for c in text)
        return table


class IncrementalDecoder:
    """Bytes of tokens in, whole UTF-8 characters out (spec 5.5), whatever the cuts."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def feed(self, data: bytes) -> str:
        """Characters completed by data; an unfinished one waits. Invalid bytes become U+FFFD."""
        return self._decoder.decode(data)

    def reset(self) -> None:
        """Forget an unfinished character: a marker follows, or the output has ended."""
        self._decoder.reset()

    @property
    def has_pending(self) -> bool:
        """True while bytes of an unfinished character wait."""
        return bool(self._decoder.getstate()[0])


def _added_tokens(description: dict[str, Any], source: str) -> dict[str, bool]:
    """Added token text -> flagged special."""
    entries = description.get("added_tokens")
    if not isinstance(entries, list):
        raise CheckpointError(f"{source}: added_tokens is not a list; download the file again")
    added: dict[str, bool] = {}
    for entry in entries:
        text = entry.get("content") if isinstance(entry, dict) else None
        if not isinstance(text, str) or not text:
            raise CheckpointError(
                f"{source}: an added token has no content; download the file again"
            )
        added[text] = entry.get("special") is True
    return added


def _check_kind(description: dict[str, Any], source: str) -> None:
    model = description.get("model")
    if not isinstance(model, dict) or model.get("type", "BPE") != "BPE":
        raise CheckpointError(f"{source}: the model is not BPE; only byte-level BPE is supported")
    if not isinstance(model.get("vocab"), dict) or not model["vocab"]:
        raise CheckpointError(f"{source}: model.vocab is missing; download the file again")
    if model.get("dropout"):
        raise CheckpointError(
            f"{source}: BPE dropout={model['dropout']} makes ids random; set it to null"
        )
    if not _mentions_byte_level(description.get("pre_tokenizer")):
        raise CheckpointError(
            f"{source}: the pre_tokenizer is not ByteLevel; only byte-level BPE is supported"
        )


def _mentions_byte_level(node: object) -> bool:
    if not isinstance(node, dict):
        return False
    parts = node.get("pretokenizers")
    inner: Sequence[object] = parts if isinstance(parts, list) else ()
    return node.get("type") == "ByteLevel" or any(_mentions_byte_level(part) for part in inner)


def _without_added(description: dict[str, Any], added: dict[str, bool]) -> dict[str, Any]:
    """The same tokenizer with no added token, not even as an entry of the BPE vocabulary.

    Files written by trainers keep markers in model.vocab too; with `ignore_merges` a whole word
    found there is taken as it is, which would let text spell a marker.
    """
    model = dict(description["model"])
    model["vocab"] = {text: i for text, i in model["vocab"].items() if text not in added}
    return {**description, "model": model, "added_tokens": []}


def _build(description: dict[str, Any], source: str) -> tokenizers.Tokenizer:
    # Post-processors add tokens; truncation and padding change lengths. A prompt wants none.
    clean = {**description, "post_processor": None, "truncation": None, "padding": None}
    try:
        return tokenizers.Tokenizer.from_str(json.dumps(clean, ensure_ascii=True))
    except Exception as err:  # the library raises bare Exception for any damage
        reason = str(err).splitlines()[0][:200] if str(err) else type(err).__name__
        raise CheckpointError(
            f"{source}: unreadable tokenizer ({reason}); download it again"
        ) from err


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 is itself, the rest from U+0100."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in set(shown)]
    return {chr(b): b for b in shown} | {chr(256 + n): b for n, b in enumerate(others)}


def _valid_text(text: str) -> str:
    """text with lone surrogates (legal in JSON, impossible in UTF-8) replaced by U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text
