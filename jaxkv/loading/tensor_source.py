"""Where weights come from: tensors under their Hugging Face names, read one at a time. Imports no jax."""

from pathlib import Path
from typing import BinaryIO, Protocol

import numpy as np

from jaxkv.core.errors import CheckpointError

CHUNK_BYTES = 4 * 2**20
"""Most bytes of a tensor that exist twice (as stored, and converted) while it is read."""


class TensorSource(Protocol):
    """A checkpoint's tensors. Nothing of the files is mapped, so that their pages never count as resident memory."""

    def names(self) -> list[str]:
        """Hugging Face names, in file order."""
        ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def stored_dtype(self, name: str) -> np.dtype:
        """float32, bfloat16 or float16; float32 for quantised tensors."""
        ...

    def location(self, name: str) -> str:
        """`file: tensor as the file names it`, for messages."""
        ...

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        """The tensor as a new C-contiguous array in `dtype` (None: as stored, or dequantised).

        Beside the result at most a few CHUNK_BYTES are allocated. Raises CheckpointError for a file that ends early, a
        quantisation that is not supported, and values too large for float16.
        """
        ...


def read_exactly(file: BinaryIO, offset: int, out: memoryview, path: Path, tensor: str) -> None:
    """Fill `out` with the bytes at `offset`, or raise CheckpointError naming file, tensor and both byte counts."""
    file.seek(offset)
    done = 0
    while done < len(out):
        count = file.readinto(out[done:])
        if not count:
            raise CheckpointError(
                f"{path}: truncated: tensor {tensor} needs {len(out)} bytes at offset {offset}, only {done} are there. "
                "Download the file again."
            )
        done += count


def convert_into(out: np.ndarray, values: np.ndarray, location: str) -> None:
    """out[...] = values, rounding to nearest; values finite before and infinite after are refused (float16 only)."""
    if out.dtype != np.float16 or values.dtype == np.float16:
        out[...] = values
        return
    with np.errstate(over="ignore"):
        out[...] = values
    if np.isinf(out).any() and not np.isinf(values.astype(np.float32)).any():
        raise CheckpointError(
            f"{location}: holds values up to {np.abs(values.astype(np.float32)).max():.3g}, above float16's largest "
            "(65504); choose --dtype bfloat16 or float32."
        )
