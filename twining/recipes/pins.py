"""What a recipe pins, what lies in a local folder, and what exactly would have to be fetched.

Source: spec/recipes.md rules 5 and 6, R13. A pin is evidence: it is compared with what a folder
says about itself, and never followed on its own. Fetching happens only when the user asks for it.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from twining.checkpoint.hf_config import load_config
from twining.errors import ConfigError
from twining.recipes.checks import commit_of
from twining.recipes.document import plain
from twining.recipes.schema import Finding, Recipe

_REPO = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}")
_HUB: Final = "https://huggingface.co/"
_REVISION = re.compile(r"[0-9a-f]{40}")
_MAX_METADATA_FILES: Final = 2000

Kind = Literal["model_weights", "drafter"]


@dataclass(frozen=True, slots=True)
class Pin:
    """A repository and the commit that the document names, None where none stands."""

    kind: Kind
    repo: str
    revision: str | None

    def command(self, folder: Path) -> str:
        """What a person would run to fetch it."""
        revision = f" --revision {self.revision}" if self.revision else ""
        return f"hf download {self.repo}{revision} --local-dir {folder}"


def pin_of(recipe: Recipe, kind: Kind) -> Pin | None:
    """The first artifact of a kind that points to a model repository."""
    for artifact in recipe.artifacts:
        pointer = artifact.pointer or ""
        if artifact.kind != kind or not pointer.startswith(_HUB):
            continue
        repo = pointer[len(_HUB) :].strip("/")
        if _REPO.fullmatch(repo):
            return Pin(kind, repo, commit_of(artifact.pin))
    return None


def checkpoint_bits(folder: Path) -> float | None:
    """Bits that a folder's config declares: 16 without quantisation, None when it does not say.

    Raises CheckpointError when there is no readable config.
    """
    config = load_config(folder)
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    quant = config.get("quantization_config") or inner
    if quant is None:
        return 16.0
    bits = quant.get("bits") if isinstance(quant, dict) else None
    is_number = isinstance(bits, int | float) and not isinstance(bits, bool)
    return float(bits) if is_number else None  # type: ignore[arg-type]


def local_revision(folder: Path) -> str | None:
    """The commit that the downloader noted beside its files; None for none or several."""
    notes = folder / ".cache" / "huggingface" / "download"
    if not notes.is_dir():
        return None
    found: set[str] = set()
    for path in sorted(notes.rglob("*.metadata"))[:_MAX_METADATA_FILES]:
        with path.open("rb") as file:
            first = file.read(64).split(b"\n", 1)[0].decode("ascii", "replace").strip()
        if _REVISION.fullmatch(first):
            found.add(first)
    return found.pop() if len(found) == 1 else None


def check_folder(recipe: Recipe, kind: Kind, folder: Path) -> Finding:
    """Compare a local folder's revision with the document's pin."""
    pin = pin_of(recipe, kind)
    if pin is None or pin.revision is None:
        return Finding("pin", "note", True, f"{kind}: the document pins no commit")
    local = local_revision(folder)
    if local is None:
        return Finding(
            "pin",
            "note",
            True,
            f"{kind}: pinned to {pin.revision[:12]}; the folder names no commit",
        )
    is_same = local.startswith(pin.revision)
    said = f"{kind}: folder is at {local[:12]}, the document pins {pin.revision[:12]}"
    return Finding(
        "pin", "should", is_same, said if not is_same else f"{kind}: {local[:12]} as pinned"
    )


def fetch(pin: Pin, folder: Path) -> None:
    """Download a pinned revision into a folder, with progress. Only on the user's word.

    Raises ConfigError when the client is absent, no full commit is pinned, or the transfer fails.
    """
    if pin.revision is None or not _REVISION.fullmatch(pin.revision):
        raise ConfigError(f"{pin.repo}: no full commit is pinned; fetch it yourself and check it")
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"huggingface-hub is not installed; install it or run: {pin.command(folder)}"
        ) from None
    try:
        snapshot_download(repo_id=pin.repo, revision=pin.revision, local_dir=str(folder))
    except Exception as err:  # the client's errors have no common base
        raise ConfigError(
            f"{pin.repo} could not be fetched ({plain(type(err).__name__, 60)}); check the network,"
            f" or run: {pin.command(folder)}"
        ) from err
