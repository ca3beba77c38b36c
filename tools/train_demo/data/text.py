"""Tokenizer access for training: plain text to ids in batches, markers by name.

Ordinary text is encoded by a tokenizer without the markers, so marker spellings inside text stay
text.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

MODEL_DIR = Path(__file__).resolve().parents[3] / "twining" / "demo" / "model"
_MAX_CACHED = 20_000  # short pieces that recur, such as effort lines and answers of one word
_MAX_CACHED_CHARS = 80


class TextEncoder:
    """Encodes text pieces; short ones are remembered."""

    def __init__(self, folder: Path = MODEL_DIR) -> None:
        spec = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        self.markers: dict[str, int] = {t["content"]: t["id"] for t in spec["added_tokens"]}
        spec["added_tokens"] = []
        self._plain = Tokenizer.from_str(json.dumps(spec))
        self.vocab_size = self._plain.get_vocab_size() + len(self.markers)
        self.digit_ids = [self._plain.token_to_id(d) for d in "0123456789"]
        self._cache: dict[str, list[int]] = {}

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids per text, same order."""
        cache = self._cache
        missing = list({t: None for t in texts if t not in cache})
        fresh = dict(zip(missing, self._encode(missing), strict=True))
        found = [cache[t] if t in cache else fresh[t] for t in texts]
        for text, ids in fresh.items():
            if len(text) <= _MAX_CACHED_CHARS and len(cache) < _MAX_CACHED:
                cache[text] = ids
        return found

    def _encode(self, texts: list[str]) -> list[list[int]]:
        return [e.ids for e in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def count(self, text: str) -> int:
        """Number of tokens of a text."""
        return len(self.encode_many([text])[0])

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ordinary ids; markers print as themselves."""
        names = {i: t for t, i in self.markers.items()}
        parts: list[str] = []
        run: list[int] = []
        for i in [*ids, -1]:
            if i in names or i == -1:
                parts.append(self._plain.decode(run))
                parts.append(names.get(i, ""))
                run = []
            else:
                run.append(int(i))
        return "".join(parts)
