"""Reads equal what the library reads; writes are read back by the library, bit for bit."""

import json
import time

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from twining.checkpoint.headers import INDEX_NAME
from twining.checkpoint.reader import TORCH_DTYPES, Checkpoint
from twining.checkpoint.writer import ShardWriter, write_safetensors
from twining.errors import CheckpointError


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    """One tensor of every dtype, odd sizes."""
    gen = torch.Generator().manual_seed(seed)
    tensors = {}
    for i, (name, dtype) in enumerate(TORCH_DTYPES.items()):
        raw = torch.randint(0, 256, (3 * (i + 1) * 8,), generator=gen, dtype=torch.uint8)
        tensors[f"t.{name}"] = (raw > 127) if dtype == torch.bool else raw.view(dtype)
    tensors["scalar"] = torch.tensor(-2082680531, dtype=torch.int32)
    tensors["empty"] = torch.empty(3, 0, 5)
    tensors["matrix"] = torch.randn(7, 5, generator=gen).T  # not contiguous
    return tensors


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    flat = [x.contiguous().reshape(-1).view(torch.uint8) for x in (a, b)]
    return torch.equal(*flat)


def open_folder(folder) -> Checkpoint:
    (folder / "config.json").write_text("{}")
    return Checkpoint.open(folder)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("limit", [1 << 30, 300, 1])
def test_write_then_read(tmp_path, seed, limit):
    tensors = random_tensors(seed)
    write_safetensors(tmp_path, tensors, max_shard_bytes=limit, metadata={"made_by": "test"})
    ckpt = open_folder(tmp_path)
    assert set(ckpt.tensors) == set(tensors)
    for name, tensor in tensors.items():
        assert same(ckpt.read(name), tensor), name
    assert ckpt.unused() == []
    files = sorted(tmp_path.glob("*.safetensors"))
    assert (tmp_path / INDEX_NAME).exists() == (len(files) > 1)
    for file in files:
        if limit == 300:
            assert file.stat().st_size < 300 + 8 * 24 * 20
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt", "made_by": "test"}
            for name in opened.keys():  # noqa: SIM118
                assert same(opened.get_tensor(name), tensors[name]), name


def test_reads_what_the_library_wrote(tmp_path):
    tensors = {n: t.contiguous() for n, t in random_tensors(3).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    ckpt = open_folder(tmp_path)
    for name, tensor in load_file(tmp_path / "model.safetensors").items():
        assert same(ckpt.read(name), tensor), name
    converted = ckpt.read("t.BF16", torch.float32)
    assert torch.equal(converted, tensors["t.BF16"].float().nan_to_num()) or converted.isnan().any()
    assert converted.dtype == torch.float32


def test_a_read_is_a_copy(tmp_path):
    write_safetensors(tmp_path, {"a": torch.ones(4)})
    ckpt = open_folder(tmp_path)
    ckpt.read("a").zero_()
    assert torch.equal(ckpt.read("a"), torch.ones(4))


def test_bool_bytes_other_than_one_read_as_true(tmp_path):
    write_safetensors(tmp_path, {"a": torch.tensor([0, 1, 2, 255], dtype=torch.uint8)})
    path = tmp_path / "model.safetensors"
    raw = path.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].replace(b'"U8"', b'"BOOL"')
    path.write_bytes(len(header).to_bytes(8, "little") + header + raw[8 + length :])
    assert open_folder(tmp_path).read("a").tolist() == [False, True, True, True]


def test_require_unused_and_ignore(tmp_path):
    write_safetensors(tmp_path, {n: torch.ones(1) for n in ("a.x", "a.y", "b.x", "b.y")})
    ckpt = open_folder(tmp_path)
    ckpt.require(["a.x", "b.y"])
    with pytest.raises(CheckpointError, match=r"6 tensors are missing: m0, m1, m2, m3, \.\.\.;"):
        ckpt.require([f"m{i}" for i in range(6)] * 2 + ["a.x"])
    with pytest.raises(CheckpointError, match="1 tensors are missing: nope;"):
        ckpt.read("nope")
    with pytest.raises(CheckpointError, match="nope"):
        ckpt.shape("nope")
    ckpt.read("a.x")
    ckpt.ignore(["a.y"])
    assert sorted(ckpt.unused()) == ["b.x", "b.y"]
    assert ckpt.unused(("b.",)) == []


def test_a_file_cut_after_opening_is_an_error(tmp_path):
    write_safetensors(tmp_path, {"a": torch.ones(1000)})
    ckpt = open_folder(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CheckpointError, match="a ends after 3992 of 4000 bytes"):
        ckpt.read("a")
    path.unlink()
    with pytest.raises(CheckpointError, match="check the disk"):
        ckpt.read("a")


def test_writer_refusals(tmp_path):
    with (
        pytest.raises(CheckpointError, match="added twice"),
        ShardWriter(tmp_path, max_shard_bytes=1) as writer,
    ):
        writer.add("a", torch.ones(1))
        writer.add("b", torch.ones(1))
        writer.add("a", torch.ones(1))
    assert list(tmp_path.iterdir()) == []  # nothing half-written stays behind
    with pytest.raises(CheckpointError, match="cannot be stored"):
        write_safetensors(tmp_path, {"a": torch.ones(1, dtype=torch.complex64)})
    with pytest.raises(CheckpointError, match="at least 1"):
        write_safetensors(tmp_path, {}, max_shard_bytes=0)
    write_safetensors(tmp_path, {"a": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"already holds model\.safetensors"):
        write_safetensors(tmp_path, {"a": torch.ones(1)})


def test_a_large_read_is_fast(tmp_path):
    """24 MB in one tensor: far below a second even on a busy machine."""
    big = torch.arange(6_000_000, dtype=torch.int32)
    write_safetensors(tmp_path, {"a": big})
    ckpt = open_folder(tmp_path)
    start = time.process_time()
    assert torch.equal(ckpt.read("a"), big)
    assert time.process_time() - start < 2.0


@pytest.mark.parametrize(
    ("text", "words"),
    [("{", "not valid JSON"), ("[1]", "not an object"), ("[" * 99999, "not valid JSON")],
)
def test_damaged_config(tmp_path, text, words):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=words):
        Checkpoint.open(tmp_path)


def test_missing_config(tmp_path):
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        Checkpoint.open(tmp_path)
    with pytest.raises(CheckpointError):
        Checkpoint.open(tmp_path / "nowhere")


def test_index_total_size(tmp_path):
    write_safetensors(tmp_path, {"a": torch.ones(4), "b": torch.ones(3)}, max_shard_bytes=16)
    index = json.loads((tmp_path / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == 28
    assert index["weight_map"] == {
        "a": "model-00001-of-00002.safetensors",
        "b": "model-00002-of-00002.safetensors",
    }


def test_every_tensor_starts_at_a_multiple_of_its_element(tmp_path):
    """Readers that map the file need aligned data; odd counts of narrow types come first here."""
    tensors = {"u8": torch.ones(3, dtype=torch.uint8), "f64": torch.ones(3, dtype=torch.float64)}
    tensors |= {"f16": torch.ones(5, dtype=torch.float16), "f32": torch.ones(1)}
    write_safetensors(tmp_path, tensors)
    for name, info in open_folder(tmp_path).tensors.items():
        assert info.start % tensors[name].element_size() == 0, name
