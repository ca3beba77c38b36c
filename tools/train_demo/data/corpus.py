"""Raw text for language modelling: freely licensed documents found on the machine, tokenised into
one file.

Sources: the Python standard library sources and its help topics (PSF licence), and the
documentation that comes with a Rust toolchain (MIT or Apache-2.0). A source that is not installed
is left out; the licences of those used are written beside the corpus for the model card. Listing
order is sorted, so one machine always gives one file.

Files: PATH (uint16 token ids), PATH.idx.npy (int64 document starts and the end), PATH.json (counts
and licences).
"""

import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tools.train_demo.data.text import TextEncoder

MAX_BYTES = 16 * 2**20
_SKIP_PARTS = frozenset(
    (
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "encodings",
        "__pycache__",
        "lib2to3",
        "turtledemo",
    )
)
_RUST_BOOKS = (
    "book", "rust-by-example", "reference", "nomicon", "edition-guide", "embedded-book", "cargo",
    "rustc", "rustdoc",
    "error_codes",
)  # fmt: skip


class Document(NamedTuple):
    """One text with where it is from and under which licence."""

    name: str
    text: str
    licence: str


class _PageText(HTMLParser):
    """The main text of a documentation page: paragraphs, list items, headings, code."""

    _BLOCKS = frozenset(["p", "li", "h1", "h2", "h3", "h4", "pre", "td", "th", "dt", "dd"])
    _HIDDEN = frozenset(["script", "style", "nav", "button", "svg", "template"])

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._main = 0
        self._hidden = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._main += tag == "main"
        self._hidden += tag in self._HIDDEN
        if tag in self._BLOCKS and self._main:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._main -= tag == "main"
        self._hidden -= tag in self._HIDDEN
        if tag in self._BLOCKS and self._main:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._main and not self._hidden:
            self.parts.append(data)


def page_text(html: str) -> str:
    """Plain text of the page's <main>; runs of blank lines become one."""
    parser = _PageText()
    parser.feed(html)
    lines = [line.rstrip() for line in "".join(parser.parts).split("\n")]
    kept = [line for i, line in enumerate(lines) if line or (i and lines[i - 1])]
    return "\n".join(kept).strip()


def _is_plain(text: str) -> bool:
    """Readable text: mostly ASCII, no very long lines, not tiny."""
    if len(text) < 200 or max(map(len, text.split("\n"))) > 2000:
        return False
    return sum(c.isascii() for c in text) > 0.97 * len(text)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


def iter_documents() -> Iterator[Document]:
    """Every document of every source, sorted by path within a source."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    for path in sorted(stdlib.rglob("*.py")):
        if not _SKIP_PARTS.intersection(path.relative_to(stdlib).parts) and _is_plain(
            text := _read(path)
        ):
            yield Document(f"python/{path.relative_to(stdlib)}", text, "PSF-2.0")
    topics = _read(stdlib / "pydoc_data" / "topics.py")
    if topics:
        scope: dict[str, dict[str, str]] = {}
        exec(topics, scope)  # the standard library's own data module
        for name, text in sorted(scope["topics"].items()):
            yield Document(f"python-topics/{name}", text.strip(), "PSF-2.0")
    for toolchain in sorted(Path.home().glob(".rustup/toolchains/stable-*"))[:1]:
        root = toolchain / "share/doc/rust/html"
        for book in _RUST_BOOKS:
            for path in sorted((root / book).rglob("*.html")):
                if path.name not in ("print.html", "toc.html") and _is_plain(
                    text := page_text(_read(path))
                ):
                    yield Document(f"rust/{path.relative_to(root)}", text, "MIT OR Apache-2.0")


def build_corpus(path: Path) -> dict[str, object]:
    """Tokenise all documents into `path`; returns (and writes) the summary."""
    encoder = TextEncoder()
    chunks: list[np.ndarray] = []
    starts = [0]
    licences: Counter[str] = Counter()
    for doc in iter_documents():
        ids = np.asarray(encoder.encode_many([doc.text])[0], dtype=np.uint16)
        if 2 * (starts[-1] + len(ids)) > MAX_BYTES:
            break
        chunks.append(ids)
        starts.append(starts[-1] + len(ids))
        licences[f"{doc.name.split('/')[0]} ({doc.licence})"] += len(ids)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.concatenate(chunks).tofile(path)
    np.save(path.with_suffix(path.suffix + ".idx.npy"), np.asarray(starts, dtype=np.int64))
    summary: dict[str, object] = {
        "documents": len(chunks), "tokens": starts[-1], "tokens_by_source": dict(licences),
    }  # fmt: skip
    path.with_suffix(path.suffix + ".json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


class Corpus:
    """The tokenised corpus, read as a memory map."""

    def __init__(self, path: Path) -> None:
        self.ids = np.memmap(path, dtype=np.uint16, mode="r")
        self.starts = np.load(path.with_suffix(path.suffix + ".idx.npy"))

    def window(self, where: float, num_tokens: int) -> tuple[np.ndarray, bool]:
        """Up to `num_tokens` tokens of one document from the relative position `where` in [0, 1).

        Returns (ids, whether the document ends there).
        """
        at = int(where * int(self.starts[-1]))
        doc = int(np.searchsorted(self.starts, at, side="right")) - 1
        end = int(self.starts[doc + 1])
        # A window near the end of a document moves back rather than being cut short.
        at = max(int(self.starts[doc]), min(at, end - num_tokens))
        stop = min(end, at + num_tokens)
        return np.asarray(self.ids[at:stop], dtype=np.int32), stop == end
