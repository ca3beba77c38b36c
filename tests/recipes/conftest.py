"""The two public documents, read from the recipes folder beside the fixtures."""

from pathlib import Path

import pytest

from twining.recipes.document import parse_document
from twining.recipes.schema import Recipe, view

E_SLUG = "glm-5-3-flash-exl3-3-05bpw-on-2x-cmp-170hx-dflash2-k7-q8-kv-384k"
V_SLUG = "glm-5-3-flash-exl3-2-60bpw-pp2-on-2x-cmp-170hx-dflash2-k3"


@pytest.fixture(scope="session")
def recipes_folder(golden: Path) -> Path:
    folder = golden.parent / "recipes"
    if not folder.is_dir():
        pytest.skip(f"no recipe documents at {folder}")
    return folder


def _bytes(folder: Path, slug: str) -> bytes:
    return (folder / f"{slug}.json").read_bytes()


@pytest.fixture(scope="session")
def e_bytes(recipes_folder: Path) -> bytes:
    return _bytes(recipes_folder, E_SLUG)


@pytest.fixture(scope="session")
def v_bytes(recipes_folder: Path) -> bytes:
    return _bytes(recipes_folder, V_SLUG)


@pytest.fixture
def recipe_e(e_bytes: bytes) -> Recipe:
    return view(parse_document(e_bytes))


@pytest.fixture
def recipe_v(v_bytes: bytes) -> Recipe:
    return view(parse_document(v_bytes))
