"""Where the bundled demo model lies in the installed package. No torch."""

from pathlib import Path

from twining.errors import ConfigError


def demo_paths() -> tuple[Path, Path | None]:
    """(model folder, drafter folder or None). Raises ConfigError if this install has no weights."""
    root = Path(__file__).resolve().parent
    model, drafter = root / "model", root / "drafter"
    if not (model / "config.json").is_file():
        raise ConfigError(
            "the demo model is not part of this install; reinstall twining or give a model folder"
        )
    return model, drafter if (drafter / "config.json").is_file() else None
