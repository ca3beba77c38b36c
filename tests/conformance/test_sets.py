"""Discovery of fixture sets: by format, anywhere below the folder, several of a kind."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.conformance.sets import (
    CHAT_FORMAT,
    TOOL_FORMAT,
    every_set,
    files,
    folders,
    layers_with,
    models_of,
    vector_files,
)
from tests.conftest import DEFAULT_GOLDEN


def test_there_are_sets(request: pytest.FixtureRequest) -> None:
    """A folder without any set is an error, unless it is the default one and absent."""
    root: Path = request.config.getoption("--golden")
    if root == DEFAULT_GOLDEN and not root.is_dir():
        pytest.skip(f"no fixtures at {root}; pass --golden DIR")
    assert every_set(root.resolve()), f"no fixture set of any known format under {root.resolve()}"


def touch(path: Path, **tensors: torch.Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors or {"x": torch.zeros(1)}, path)


def test_sets_are_found_by_their_files(tmp_path: Path) -> None:
    for name in ("a/deep/one", "two"):
        touch(tmp_path / name / "lin_mcg_K3.safetensors")
        touch(tmp_path / name / "extra.safetensors")
    touch(tmp_path / "m/text.safetensors", **{"layer5.topk": torch.zeros(2), "s": torch.ones(1)})
    touch(tmp_path / "m/units.safetensors")
    touch(tmp_path / "d/weights.safetensors")
    touch(tmp_path / "d/block.safetensors")
    (tmp_path / "d/config.json").write_text(json.dumps({"architectures": ["DFlash2DraftModel"]}))
    touch(tmp_path / "only/verify.safetensors")
    for model, kind in (("m/first", "glm5_next"), ("m/second", "glm5_next"), ("m/other", "llama")):
        touch(tmp_path / model / "model.safetensors")
        (tmp_path / model / "config.json").write_text(json.dumps({"model_type": kind}))
    for i, name in enumerate((CHAT_FORMAT, TOOL_FORMAT, "another/1")):
        (tmp_path / f"file{i}.json").write_text(json.dumps({"format": name, "vectors": []}))
    (tmp_path / "text.json").write_text(json.dumps({"note": CHAT_FORMAT}))

    def names(paths) -> list[str]:
        return [str(path.relative_to(tmp_path)) for path in paths]

    assert names(folders(tmp_path, "exl3")) == ["a/deep/one", "two"]
    assert names(files(tmp_path, "exl3", "lin_*")) == [
        "a/deep/one/lin_mcg_K3.safetensors",
        "two/lin_mcg_K3.safetensors",
    ]
    assert names(folders(tmp_path, "glm5_next")) == ["m"]
    assert names(folders(tmp_path, "dflash2")) == ["d", "only"]
    assert names(models_of(tmp_path / "m")) == ["m/first", "m/second"]
    assert layers_with(tmp_path / "m/text.safetensors", "topk") == [5]
    assert names(vector_files(tmp_path, CHAT_FORMAT)) == ["file0.json"]
    assert names(vector_files(tmp_path, TOOL_FORMAT)) == ["file1.json"]
    assert len(every_set(tmp_path)) == 7
    assert every_set(tmp_path / "m/other") == []


def test_a_second_set_of_the_same_kind_runs_too(golden: Path, tmp_path: Path, pytester_run) -> None:
    """The command of the README over a folder with two copies under other names, and over none."""
    source = next(iter(files(golden.resolve(), "exl3", "hadamard.safetensors")), None)
    if source is None:
        pytest.skip(f"no EXL3 set under {golden}")
    for name in ("first/x", "second"):
        (tmp_path / name).mkdir(parents=True)
        shutil.copy(source, tmp_path / name)
    code, text = pytester_run(tmp_path, "test_exl3.py")
    assert code == 0 and "2 passed" in text, text
    (tmp_path / "empty").mkdir()
    code, text = pytester_run(tmp_path / "empty", "test_sets.py::test_there_are_sets")
    assert code == 1 and str(tmp_path / "empty") in text


@pytest.fixture
def pytester_run():
    """Run one conformance file in a process of its own over another folder."""
    import subprocess
    import sys

    def run(folder: Path, what: str) -> tuple[int, str]:
        here = Path(__file__).parent
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist"]
        done = subprocess.run(
            [*command, str(here / what), "--golden", str(folder)],
            cwd=here.parents[1], capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    return run
