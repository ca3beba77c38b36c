"""A model folder that the commands can run: random weights of the fixtures, a tiny tokenizer."""

import json
import shutil
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "serving"))  # tiny_tokenizer


@pytest.fixture(scope="session")
def tiny_model(golden, tmp_path_factory):
    """config.json and weights of the smallest text model, with a tokenizer of the same size."""
    import tiny_tokenizer

    source = golden / "glm5_next" / "tiny"
    if not source.is_dir():
        pytest.skip(f"no model at {source}")
    folder = tmp_path_factory.mktemp("tiny")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(source / name, folder / name)
    (folder / "tokenizer.json").write_text(json.dumps(tiny_tokenizer.description()))
    return folder
