"""Tensors of a GGUF file under their Hugging Face names: dequantised, and q and k rows in Hugging Face's order."""

import re
from pathlib import Path

import ml_dtypes
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize

from jaxkv.core.errors import CheckpointError
from jaxkv.loading.gguf_file import GGUFFile, GGUFTensor, read_gguf_file
from jaxkv.loading.tensor_source import CHUNK_BYTES, convert_into, read_exactly

ROPE_FREQS = "rope_freqs.weight"
"""Divisors of the RoPE frequencies: part of the configuration, not a weight."""

_PLAIN = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
QUANTISED = ("Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS")

_TOP_LEVEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GGUFSource:
    """All tensors of one file but rope_freqs; a tensor without a Hugging Face counterpart keeps its own name."""

    def __init__(self, path: str | Path):
        self.file: GGUFFile = read_gguf_file(path)
        self._tensors = {hf_name(name): t for name, t in self.file.tensors.items() if name != ROPE_FREQS}

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def stored_dtype(self, name: str) -> np.dtype:
        return _PLAIN.get(self._tensors[name].type_name, _PLAIN["F32"])

    def location(self, name: str) -> str:
        return f"{self.file.path}: {self._tensors[name].name}"

    def read(self, name: str, dtype: np.dtype | None = None) -> np.ndarray:
        return self._read(self._tensors[name], dtype or self.stored_dtype(name), self._row_order(name))

    def rope_freqs(self) -> np.ndarray | None:
        """f32[head_dim / 2], or None when the file has none."""
        tensor = self.file.tensors.get(ROPE_FREQS)
        return None if tensor is None else self._read(tensor, _PLAIN["F32"], None)

    def _read(self, tensor: GGUFTensor, dtype: np.dtype, row_order: np.ndarray | None) -> np.ndarray:
        """Row r of the file becomes row row_order[r] of the result."""
        location = f"{self.file.path}: {tensor.name}"
        if tensor.type_name not in _PLAIN and tensor.type_name not in QUANTISED:
            raise CheckpointError(
                f"{location}: type {tensor.type_name} is not supported; supported: {', '.join((*_PLAIN, *QUANTISED))}."
            )
        assert tensor.num_bytes is not None, "every supported type has a size"
        out = np.empty(tensor.shape, dtype)
        num_rows = tensor.shape[0] if len(tensor.shape) > 1 else 1
        by_row = out.reshape(num_rows, -1)
        if row_order is not None and len(tensor.shape) == 1:  # a bias: one value a row
            num_rows, by_row = tensor.shape[0], out.reshape(-1, 1)
        row_bytes = tensor.num_bytes // num_rows
        step = max(1, CHUNK_BYTES // (4 * by_row.shape[1]))  # rows whose float32 form takes CHUNK_BYTES
        with self.file.path.open("rb", buffering=0) as file:
            for start in range(0, num_rows, step):
                count = min(step, num_rows - start)
                raw = np.empty((count, row_bytes), np.uint8)
                read_exactly(
                    file, tensor.offset + start * row_bytes, memoryview(raw).cast("B"), self.file.path, tensor.name
                )
                values = _decode(raw, tensor.type_name)
                if row_order is None:
                    convert_into(by_row[start : start + count], values, location)
                else:
                    rows = np.empty(values.shape, dtype)
                    convert_into(rows, values, location)
                    by_row[row_order[start : start + count]] = rows
        return out

    def _row_order(self, name: str) -> np.ndarray | None:
        """For q and k of architecture llama: the Hugging Face row of each file row.

        llama.cpp rotates neighbouring pairs (2i, 2i + 1) of a head, transformers pairs (i, i + D/2), so the converter
        interleaved the two halves of every head. Other architectures keep transformers' order.
        """
        heads = {"q_proj": "head_count", "k_proj": "head_count_kv"}
        if self.file.architecture != "llama" or not (match := re.search(r"self_attn\.(q_proj|k_proj)\.", name)):
            return None
        metadata = self.file.metadata
        num_heads = metadata.get(f"llama.attention.{heads[match[1]]}", metadata.get("llama.attention.head_count"))
        num_heads = num_heads[0] if isinstance(num_heads, list) else num_heads
        num_rows = self._tensors[name].shape[0]
        if not num_heads or num_rows % (2 * num_heads):
            raise CheckpointError(f"{self.location(name)}: {num_rows} rows do not make {num_heads} heads of even size.")
        rows = np.arange(num_rows).reshape(num_heads, 2, num_rows // num_heads // 2)
        return rows.swapaxes(1, 2).reshape(-1)


def hf_name(name: str) -> str:
    """Hugging Face's name of a GGUF tensor; unknown ones keep theirs."""
    if match := _LAYER_TENSOR.fullmatch(name):
        layer, part, kind = match.groups()
        return f"model.layers.{layer}.{_IN_LAYER[part]}.{kind}" if part in _IN_LAYER else name
    part, _, kind = name.rpartition(".")
    return f"{_TOP_LEVEL[part]}.{kind}" if part in _TOP_LEVEL else name


def _decode(raw: np.ndarray, type_name: str) -> np.ndarray:
    """u8[rows, bytes] to [rows, values], float32 unless the type is a plain float."""
    if type_name in _PLAIN:
        return raw.view(_PLAIN[type_name])
    return dequantize(raw, GGMLQuantizationType[type_name])
