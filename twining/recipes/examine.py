"""Everything there is to say about a document's bytes, in one call: the entry for untrusted input.

Source: spec/recipes.md rule 5. Pure; bounded in time and memory by the limits of document.py and
schema.py. No torch.
"""

from dataclasses import dataclass

from twining.recipes.checks import check
from twining.recipes.document import parse_document
from twining.recipes.points import Measurement, measurements
from twining.recipes.resolve import Resolution, resolve
from twining.recipes.schema import Finding, Recipe, view
from twining.recipes.settings import Capabilities


@dataclass(frozen=True, slots=True)
class Examination:
    """is_sound: no "must" is broken; the findings say which."""

    recipe: Recipe
    resolution: Resolution
    findings: tuple[Finding, ...]
    measurements: tuple[Measurement, ...]

    @property
    def is_sound(self) -> bool:
        return all(f.is_ok for f in self.findings if f.level == "must")


def examine(
    raw: bytes | str, can: Capabilities, *, what: str = "recipe", file_stem: str | None = None
) -> Examination:
    """Read, resolve and check. Raises ConfigError when the bytes are no document at all."""
    recipe = view(parse_document(raw, what))
    resolution = resolve(recipe, can)
    limit = recipe.config.max_context_len if recipe.config else None
    return Examination(
        recipe,
        resolution,
        tuple(check(recipe, resolution, file_stem=file_stem)),
        measurements(recipe.points, limits=[limit]),
    )
