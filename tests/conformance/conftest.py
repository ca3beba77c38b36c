"""Tests name the fixtures they need as arguments; each runs once per set that has them.

An argument of the tables below stands for one item of one set. Where nothing is found the test is
skipped with the folder's name; test_sets.py fails for a folder without any set.
"""

from pathlib import Path

import pytest

from tests.conformance.sets import (
    CHAT_FORMAT,
    DFLASH_FILES,
    TOOL_FORMAT,
    files,
    glm_sets,
    layers_with,
    shapes_of,
    vector_files,
)


def _single_files(root: Path) -> dict[str, list[Path]]:
    """Arguments that are one file."""
    return {
        "codebooks_file": files(root, "exl3", "codebooks.safetensors"),
        "hadamard_file": files(root, "exl3", "hadamard.safetensors"),
        "linear_file": files(root, "exl3", "lin_*.safetensors"),
        "product_file": files(root, "exl3", "y_*.safetensors"),
        "quant_file": files(root, "exl3", "quant_*.safetensors"),
        "units_file": files(root, "glm5_next", "units.safetensors"),
        "preprocess_file": files(root, "glm5_next", "preprocess.json"),
        "verify_file": files(root, "dflash2", "verify.safetensors"),
        "chat_file": list(vector_files(root, CHAT_FORMAT)),
        "tool_file": list(vector_files(root, TOOL_FORMAT)),
        # Conversion takes a while: the models of the text fixtures are enough.
        "glm_packable": sorted({s.model for s in glm_sets(root, "text")}),
    } | {
        f"dflash2_{name}": [
            path.parent
            for path in files(root, "dflash2", f"{name}.safetensors")
            if (path.parent / "weights.safetensors").is_file()
        ]
        for name in DFLASH_FILES
    }


def _cases(root: Path, name: str) -> list[tuple[str, object]] | None:
    """(id, value) of every item an argument stands for; None when it is no argument of ours."""
    single = _single_files(root)
    if name in single:
        return [(_name(root, path), path) for path in single[name]]
    if name == "cache_case":
        found = [(p, int(k[1:])) for p in files(root, "exl3", "cache.safetensors")
                 for k in shapes_of(p) if k[0] == "q" and k[1:].isdigit()]  # fmt: skip
        return [(f"{_name(root, path)}-{bits}", (path, bits)) for path, bits in sorted(found)]
    if name == "search_case":
        return [(f"{_name(root, path)}-{key}", (path, key.removesuffix(".states")))
                for path in files(root, "exl3", "viterbi.safetensors")
                for key in sorted(shapes_of(path)) if key.endswith(".states")]  # fmt: skip
    if name == "kda_case":
        return [(f"{_name(root, path)}-{key}", (path, *key.rsplit(".", 1)))
                for path in files(root, "glm5_next", "units.safetensors")
                for key in sorted(shapes_of(path))
                if key.startswith("kda") and "_out" in key]  # fmt: skip
    if name == "mhc_case":
        return [(f"{_name(root, path)}-{key}", (path, key.split(".")[0]))
                for path in files(root, "glm5_next", "units.safetensors")
                for key in sorted(shapes_of(path))
                if key.startswith("mhc") and key.endswith(".params")]  # fmt: skip
    return _glm_cases(root, name)


def _glm_cases(root: Path, name: str) -> list[tuple[str, object]] | None:
    kind, _, part = name.partition("_")
    if kind not in ("text", "mtp", "shared", "vision") or part == "":
        return None
    found = glm_sets(root, "shared_indexer" if kind == "shared" else kind)
    named = [(f"{_name(root, s.path)}-{s.model.name}", s) for s in found]
    if part == "set":
        return list(named)
    if part == "indexer":
        return [(f"{i}-layer{n}", (s, n)) for i, s in named for n in layers_with(s.path, "topk")]
    if part == "scores":
        return [(f"{i}-layer{n}", (s, n)) for i, s in named
                for n in layers_with(s.path, "index_scores")]  # fmt: skip
    suffix = {"chunks": ".bounds", "media": ".grid_thw", "image": ".image_u8", "prompt": ".logits"}
    if part not in suffix:
        return None
    return [(f"{i}-{key.removesuffix(suffix[part])}", (s, key.removesuffix(suffix[part])))
            for i, s in named for key in sorted(shapes_of(s.path))
            if key.endswith(suffix[part])]  # fmt: skip


def _name(root: Path, path: Path) -> str:
    """Path relative to the root without the suffix."""
    relative = path.relative_to(root)
    return str(relative.with_suffix("") if path.is_file() else relative)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    root: Path = metafunc.config.getoption("--golden").resolve()
    for name in metafunc.fixturenames:
        cases = _cases(root, name)
        if cases is None:
            continue
        params = [pytest.param(value, id=key) for key, value in cases]
        if not params:
            reason = f"no fixtures for {name} under {root}; pass --golden DIR"
            params = [pytest.param(None, marks=pytest.mark.skip(reason=reason))]
        metafunc.parametrize(name, params)
