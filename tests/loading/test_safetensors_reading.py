"""Safetensors folders as the safetensors library writes them, and damaged ones."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jaxkv.core.errors import CheckpointError
from jaxkv.loading.safetensors_source import SafetensorsSource

TENSORS = {"a": np.arange(600, dtype=np.float32).reshape(20, 30) / 7, "b": np.linspace(-3, 3, 50, dtype=np.float32)}


@pytest.mark.parametrize("stored", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("wanted", [None, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("chunk_bytes", [4 * 2**20, 100])
def test_reads_and_converts(write_folder, monkeypatch, stored, wanted, chunk_bytes):
    monkeypatch.setattr("jaxkv.loading.safetensors_source.CHUNK_BYTES", chunk_bytes)
    tensors = {name: tensor.astype(stored) for name, tensor in TENSORS.items()}
    source = SafetensorsSource(write_folder({}, tensors))
    assert set(source.names()) == {"a", "b"} and source.shape("a") == (20, 30) and source.stored_dtype("a") == stored
    for name, tensor in tensors.items():
        found = source.read(name, None if wanted is None else np.dtype(wanted))
        assert found.dtype == (wanted or stored) and found.flags.c_contiguous
        np.testing.assert_array_equal(found, tensor if wanted is None else tensor.astype(wanted))


def test_shards_are_one_source(write_folder):
    folder = write_folder({}, TENSORS, num_shards=2)
    source = SafetensorsSource(folder)
    assert source.names() == ["a", "b"]
    np.testing.assert_array_equal(source.read("b"), TENSORS["b"])
    assert source.location("b") == f"{folder}/model-00002-of-00002.safetensors: b"


def message(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        SafetensorsSource(folder)
    return str(caught.value)


def test_damaged_shards_say_what_is_wrong(write_folder):
    folder = write_folder({}, TENSORS, num_shards=2)
    index, second = folder / "model.safetensors.index.json", folder / "model-00002-of-00002.safetensors"
    weight_map = json.loads(index.read_text())["weight_map"]
    index.write_text(json.dumps({"weight_map": weight_map | {"c": second.name}}))
    assert f"{second}: tensor c is missing" in message(folder)
    index.write_text(json.dumps({"weight_map": weight_map}))
    second.rename(folder / "elsewhere")
    assert f"{second}: missing" in message(folder)
    index.write_text("{}")
    assert f"{index}: expected JSON with an object weight_map" in message(folder)
    index.unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in message(folder)


def test_damaged_files_say_what_is_wrong(write_folder):
    folder = write_folder({}, TENSORS)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = struct.unpack("<Q", data[:8])[0]

    def with_content(content: bytes) -> str:
        path.write_bytes(content)
        found = message(folder)
        assert str(path) in found
        return found

    cut = with_content(data[:-8])
    assert f"tensor b ends at byte {len(data)}, the file has {len(data) - 8}" in cut
    assert "a header of" in with_content(data[:20]) and "only 0 bytes" in with_content(b"")
    assert "git lfs pull" in with_content(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    assert "its header is no JSON" in with_content(data[:8] + b"?" * length + data[8 + length :])
    header = json.loads(data[8 : 8 + length])
    header["a"]["shape"] = [20, 31]
    text = json.dumps(header).encode()
    assert "tensor a F32 [20, 31] takes 2480 bytes, its entry has 2400" in with_content(
        struct.pack("<Q", len(text)) + text + data[8 + length :]
    )


def test_a_dtype_it_does_not_know_is_refused_by_name(tmp_path):
    safetensors.numpy.save_file({"a": np.zeros(3, np.int32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="model.safetensors: a: dtype I32 is not supported, only F32, F16, BF16"):
        SafetensorsSource(tmp_path).read("a")


def test_a_file_that_shrinks_after_opening_is_an_error(write_folder):
    folder = write_folder({}, TENSORS)
    source = SafetensorsSource(folder)
    (folder / "model.safetensors").write_bytes(bytes(100))
    with pytest.raises(CheckpointError, match="tensor b needs 200 bytes at offset .* only 0 are there"):
        source.read("b")
