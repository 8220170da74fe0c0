"""Tensors of a Hugging Face folder: one model.safetensors, or shards listed by model.safetensors.index.json.

Layout of a file: u64 length of the header, a JSON header {name: {dtype, shape, data_offsets}}, then the data. It is read
with plain reads into the final array: the safetensors library maps the file, and its pages then count as resident.
"""

import dataclasses
import json
import struct
from pathlib import Path

import ml_dtypes
import numpy as np

from jaxkv.core.errors import CheckpointError
from jaxkv.loading.tensor_source import CHUNK_BYTES, convert_into, read_exactly

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DTYPES = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
_LARGEST_HEADER = 100_000_000  # the format's own limit


@dataclasses.dataclass(frozen=True)
class _Entry:
    path: Path
    dtype_name: str
    shape: tuple[int, ...]
    offset: int
    num_bytes: int


class SafetensorsSource:
    """All tensors of a folder; headers are read and checked against file sizes at once, data on demand."""

    def __init__(self, folder: str | Path):
        folder = Path(folder)
        self._entries: dict[str, _Entry] = {}
        if (folder / _SINGLE).is_file():
            self._entries = _read_header(folder / _SINGLE)
        elif (folder / _INDEX).is_file():
            self._entries = _read_shards(folder)
        else:
            found = sorted(p.name for p in folder.glob("*") if p.suffix in (".safetensors", ".bin", ".pth", ".gguf"))
            raise CheckpointError(
                f"{folder}: neither {_SINGLE} nor {_INDEX} (weights found: {', '.join(found) or 'none'}). Only "
                "safetensors are read from a folder; convert others, or name a .gguf file itself."
            )

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def stored_dtype(self, name: str) -> np.dtype:
        entry = self._entries[name]
        if entry.dtype_name not in _DTYPES:
            raise CheckpointError(
                f"{self.location(name)}: dtype {entry.dtype_name} is not supported, only {', '.join(_DTYPES)}."
            )
        return _DTYPES[entry.dtype_name]

    def location(self, name: str) -> str:
        return f"{self._entries[name].path}: {name}"

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        entry, stored = self._entries[name], self.stored_dtype(name)
        out = np.empty(entry.shape, dtype or stored)
        flat = out.reshape(-1)
        with entry.path.open("rb", buffering=0) as file:
            if out.dtype == stored:
                read_exactly(file, entry.offset, memoryview(flat.view(np.uint8)), entry.path, name)
                return out
            step = CHUNK_BYTES // stored.itemsize
            for start in range(0, flat.size, step):
                piece = np.empty(min(step, flat.size - start), stored)
                offset = entry.offset + start * stored.itemsize
                read_exactly(file, offset, memoryview(piece.view(np.uint8)), entry.path, name)
                convert_into(flat[start : start + piece.size], piece, self.location(name))
        return out


def _read_shards(folder: Path) -> dict[str, _Entry]:
    index = folder / _INDEX
    try:
        weight_map = json.loads(index.read_text())["weight_map"]
        files = dict.fromkeys(weight_map.values())
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index}: expected JSON with an object weight_map: {error!r}.") from error
    entries: dict[str, _Entry] = {}
    for file in files:
        if not (folder / file).is_file():
            raise CheckpointError(f"{folder / file}: missing, though {_INDEX} lists it; download it again.")
        entries |= _read_header(folder / file)
    for name, file in weight_map.items():
        if name not in entries or entries[name].path != folder / file:
            raise CheckpointError(f"{folder / file}: tensor {name} is missing, though {_INDEX} says it is there.")
    return entries


def _read_header(path: Path) -> dict[str, _Entry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
            found = f"a header of {length} bytes in a file of {size} bytes" if length >= 0 else f"only {size} bytes"
            raise CheckpointError(
                f"{path}: truncated or no safetensors file: {found}. "
                "If it begins with 'version https://git-lfs', fetch the real file with git lfs pull."
            )
        try:
            header = json.loads(file.read(length))
        except ValueError as error:
            raise CheckpointError(f"{path}: damaged: its header is no JSON ({error}).") from error
    entries = {}
    for name, info in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape, (start, end) = info["dtype"], tuple(info["shape"]), info["data_offsets"]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path}: damaged: header entry of tensor {name} is {info!r}.") from error
        entry = _Entry(path, dtype, shape, 8 + length + start, end - start)
        if dtype in _DTYPES and entry.num_bytes != (expected := int(np.prod(shape)) * _DTYPES[dtype].itemsize):
            raise CheckpointError(
                f"{path}: damaged: tensor {name} {dtype} {list(shape)} takes {expected} bytes, its entry has "
                f"{entry.num_bytes}."
            )
        if entry.offset + entry.num_bytes > size:
            raise CheckpointError(
                f"{path}: truncated: tensor {name} ends at byte {entry.offset + entry.num_bytes}, the file has {size}. "
                "Download it again."
            )
        entries[name] = entry
    return entries
