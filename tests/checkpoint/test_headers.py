"""Headers of hostile and damaged safetensors files: one clear error each, never a crash."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from twining.checkpoint.headers import DTYPE_BYTES, INDEX_NAME, read_header, scan_folder
from twining.errors import CheckpointError

FUZZ = settings(
    max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def write(path: Path, header: object, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


def entry(dtype: str = "F32", shape: object = (2,), offsets: object = (0, 8)) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


def test_reads_what_the_library_wrote(tmp_path):
    tensors = {
        "a": torch.randn(3, 5),
        "scalar": torch.tensor(-5, dtype=torch.int32),
        "empty": torch.empty(0, 7, dtype=torch.float16),
        "b": torch.randn(9).bfloat16(),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    infos = read_header(tmp_path / "x.safetensors")
    assert set(infos) == set(tensors)
    raw = (tmp_path / "x.safetensors").read_bytes()
    for name, tensor in tensors.items():
        info = infos[name]
        assert info.shape == tuple(tensor.shape)
        assert info.nbytes == tensor.nbytes
        want = tensor.reshape(-1).view(torch.uint8).numpy().tobytes()
        assert raw[info.start : info.end] == want


GOOD = {"x": entry(), "y": entry(offsets=(8, 16))}
BAD = [
    ("lists 'x' twice", b'{"x":{"dtype":"F32","shape":[0],"data_offsets":[0,0]},"x":{}}'),
    ("twice", b'{"x":{"dtype":"F32","dtype":"F32","shape":[0],"data_offsets":[0,0]}}'),
    ("not valid JSON", b'{"x":'),
    ("not valid JSON", b"\xff\xfe{}"),
    ("not valid JSON", b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    ("not valid JSON", b'{"x":{"dtype":"F32","shape":[' + b"9" * 5000 + b"]}}"),
    ("more entries", b"[" * 4_000_000),
    ("not an object", b"[]"),
    ("not a map of strings", {"__metadata__": {"a": 1}}),
    ("not a map of strings", {"__metadata__": []}),
    ("not printable", {"a\nb": entry()}),
    ("not printable", {"": entry()}),
    ("not printable", b'{"\\ud800":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
    ("not an object", {"x": 3}),
    ("has dtype None", {"x": {"shape": [2], "data_offsets": [0, 8]}}),
    ("has dtype 'F7'", {"x": entry("F7")}),
    ("has dtype ['F32']", {"x": {"dtype": ["F32"], "shape": [2], "data_offsets": [0, 8]}}),
    ("has shape", {"x": entry(shape=(-2,))}),
    ("has shape", {"x": entry(shape=(True, 2))}),
    ("has shape", {"x": entry(shape=(2.0,))}),
    ("has shape", {"x": entry(shape=(1,) * 100)}),
    ("has shape", {"x": entry(shape=(0, 1 << 62))}),
    ("has shape", {"x": entry(shape=(1 << 47,) * 3)}),
    ("needs", {"x": entry(shape=(3,))}),
    ("needs", {"x": entry(shape=(1 << 32, 1 << 20))}),
    ("lies at", {"x": entry(offsets=(0, 99))}),
    ("lies at", {"x": entry(offsets=(8, 0))}),
    ("lies at", {"x": entry(offsets=(-8, 0))}),
    ("lies at", {"x": entry(offsets=(0, 8, 16))}),
    ("lies at", {"x": entry(offsets=(0, 8.0))}),
    ("overlap", {"x": entry(), "y": entry(offsets=(4, 12))}),
    ("overlap", {"x": entry(), "y": entry()}),
]


@pytest.mark.parametrize(("words", "header"), BAD, ids=[f"{i}-{b[0]}" for i, b in enumerate(BAD)])
def test_damage_is_one_clear_line(tmp_path, words, header):
    path = write(tmp_path / "x.safetensors", header, bytes(16))
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    message = str(caught.value)
    assert words in message
    assert "\n" not in message
    assert len(message) < 500
    message.encode()  # printable anywhere


def test_gaps_and_trailing_bytes_are_accepted(tmp_path):
    infos = read_header(write(tmp_path / "x", {"x": entry(offsets=(4, 12))}, bytes(32)))
    assert infos["x"].nbytes == 8


@pytest.mark.parametrize("content", [b"", b"\0" * 7, b"\xff" * 8, b"\xff" * 64, b"\x10" + bytes(8)])
def test_wrong_lengths(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="fetch it again"):
        read_header(path)


def test_header_over_the_bound_is_refused_without_reading_it(tmp_path):
    path = tmp_path / "x.safetensors"
    with open(path, "wb") as file:  # sparse: a real 200 MiB would be slow
        file.write((150 << 20).to_bytes(8, "little"))
        file.truncate(200 << 20)
    with pytest.raises(CheckpointError, match="header length"):
        read_header(path)


def test_a_pipe_in_the_folder_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "x.safetensors")
    with pytest.raises(CheckpointError, match="not a regular file"):
        read_header(tmp_path / "x.safetensors")


def test_missing_file_and_folder_in_place_of_a_file(tmp_path):
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path / "none.safetensors")
    (tmp_path / "d.safetensors").mkdir()
    with pytest.raises(CheckpointError):
        read_header(tmp_path / "d.safetensors")


@FUZZ
@given(st.data())
def test_fuzz_bytes(tmp_path, data):
    """Flip, cut and insert bytes anywhere in a valid file."""
    raw = bytearray(write(tmp_path / "good", GOOD, bytes(16)).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        action = data.draw(st.sampled_from(["set", "cut", "insert"]))
        if action == "set":
            raw[at] = data.draw(st.integers(0, 255))
        elif action == "cut":
            del raw[at : at + data.draw(st.integers(1, 9))]
        else:
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=9))
        if not raw:
            break
    path = tmp_path / "x.safetensors"
    path.write_bytes(raw)
    accept_or_refuse(path, len(raw))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(list(DTYPE_BYTES)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(list(DTYPE_BYTES)) | JSON,
        "shape": st.lists(st.integers(0, 9), max_size=3) | JSON,
        "data_offsets": st.lists(st.integers(0, 20), min_size=2, max_size=2) | JSON,
    }
)


@FUZZ
@given(st.dictionaries(st.text(max_size=4), ENTRY | JSON, max_size=3))
def test_fuzz_headers(tmp_path, header):
    path = write(tmp_path / "x.safetensors", header, bytes(16))
    accept_or_refuse(path, path.stat().st_size)


def accept_or_refuse(path: Path, size: int) -> None:
    try:
        infos = read_header(path)
    except CheckpointError as err:
        assert "\n" not in str(err)
        return
    for info in infos.values():
        assert 8 <= info.start <= info.end <= size
        assert info.numel * DTYPE_BYTES[info.dtype] == info.nbytes


def folder_with(tmp_path: Path, files: dict[str, list[str]], weight_map: object = None) -> Path:
    for name, tensors in files.items():
        spans = {t: entry(offsets=(8 * i, 8 * i + 8)) for i, t in enumerate(tensors)}
        write(tmp_path / name, spans, bytes(8 * len(tensors)))
    if weight_map is not None:
        (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


def test_scan_accepts_files_outside_the_index(tmp_path):
    folder = folder_with(
        tmp_path,
        {"model-1.safetensors": ["a", "b"], "mtp.safetensors": ["m"], "._x.safetensors": ["a"]},
        {"a": "model-1.safetensors", "b": "model-1.safetensors"},
    )
    assert set(scan_folder(folder)) == {"a", "b", "m"}


@pytest.mark.parametrize(
    ("files", "weight_map", "words"),
    [
        ({}, None, "no *.safetensors file"),
        ({"1.safetensors": ["a"], "2.safetensors": ["a"]}, None, "both 1.safetensors and 2"),
        (
            {"1.safetensors": ["a"]},
            {"a": "1.safetensors", "b": "2.safetensors"},
            "1 of 2 files that model.safetensors.index.json names are missing",
        ),
        ({"1.safetensors": ["a"]}, {"a": "1.safetensors", "b": "1.safetensors"}, "in no file"),
        ({"1.safetensors": ["a"]}, {"a": "../1.safetensors"}, "weight_map"),
        ({"1.safetensors": ["a"]}, {"a": 3}, "weight_map"),
        ({"1.safetensors": ["a"]}, ["a"], "weight_map"),
    ],
)
def test_scan_refuses(tmp_path, files, weight_map, words):
    with pytest.raises(CheckpointError) as caught:
        scan_folder(folder_with(tmp_path, files, weight_map))
    assert words in str(caught.value)


def test_scan_of_a_missing_folder(tmp_path):
    with pytest.raises(CheckpointError, match="point to a model folder"):
        scan_folder(tmp_path / "none")


def test_headers_and_configs_need_no_torch():
    code = (
        "import sys, twining.checkpoint.headers, twining.checkpoint.hf_config,"
        " twining.checkpoint.naming; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0
