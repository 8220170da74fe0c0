"""Small checkpoints written by the safetensors and gguf libraries, so that our readers meet another's writer."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import safetensors.numpy

from jaxkv.core.model_config import ModelConfig
from jaxkv.loading.resolve import ModelSource, resolve_model

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}


@pytest.fixture(scope="session")
def demo_source() -> ModelSource:
    return resolve_model("demo")


@pytest.fixture
def tiny_config() -> dict[str, Any]:
    return dict(TINY)


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Hugging Face's tensor names and shapes, written out here independently of the model."""
    e, f, d = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_heads * d, config.num_kv_heads * d
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, e),
        "model.norm.weight": (e,),
    }
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, e)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}."
        shapes[layer + "input_layernorm.weight"] = shapes[layer + "post_attention_layernorm.weight"] = (e,)
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q, e, config.qkv_bias),
            ("self_attn.k_proj", kv, e, config.qkv_bias),
            ("self_attn.v_proj", kv, e, config.qkv_bias),
            ("self_attn.o_proj", e, q, config.o_bias),
            ("mlp.gate_proj", f, e, config.mlp_bias),
            ("mlp.up_proj", f, e, config.mlp_bias),
            ("mlp.down_proj", e, f, config.mlp_bias),
        ):
            shapes[f"{layer}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}{name}.bias"] = (rows,)
        if config.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = shapes[layer + "self_attn.k_norm.weight"] = (d,)
    return shapes


@pytest.fixture
def random_tensors() -> Callable[..., dict[str, np.ndarray]]:
    def make(config: ModelConfig, dtype: Any = np.float32) -> dict[str, np.ndarray]:
        rng = np.random.default_rng(0)
        return {n: rng.standard_normal(s, dtype=np.float32).astype(dtype) for n, s in tensor_shapes(config).items()}

    return make


@pytest.fixture
def write_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a Hugging Face folder of `num_shards` files; one shard is model.safetensors without an index."""

    def write(config: dict[str, Any], tensors: dict[str, np.ndarray], num_shards: int = 1, name: str = "model") -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        names = list(tensors)
        if num_shards == 1:
            safetensors.numpy.save_file(tensors, folder / "model.safetensors")
            return folder
        weight_map = {}
        for shard in range(num_shards):
            file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
            part = names[shard::num_shards]
            safetensors.numpy.save_file({n: tensors[n] for n in part}, folder / file)
            weight_map |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        return folder

    return write


GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip


def gguf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        return f"blk.{layer}.{GGUF_NAMES[part]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


@pytest.fixture
def write_gguf(tmp_path: Path) -> Callable[..., Path]:
    """Writes a GGUF file of Hugging Face tensors: metadata from `config`, with `extra` keys added or (None) removed.

    `types` gives the quantisation of single tensors by Hugging Face name; q and k rows are interleaved for architecture
    llama as llama.cpp's converter does it.
    """

    def write(
        config: ModelConfig,
        tensors: dict[str, np.ndarray],
        *,
        architecture: str = "llama",
        extra: dict[str, Any] | None = None,
        types: dict[str, gguf.GGMLQuantizationType] | None = None,
        extra_tensors: dict[str, np.ndarray] | None = None,
        name: str = "model.gguf",
    ) -> Path:
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        fields: dict[str, Any] = {
            "block_count": config.num_layers,
            "context_length": config.max_position_embeddings,
            "embedding_length": config.hidden_size,
            "feed_forward_length": config.intermediate_size,
            "attention.head_count": config.num_heads,
            "attention.head_count_kv": config.num_kv_heads,
            "attention.key_length": config.head_dim,
            "attention.value_length": config.head_dim,
            "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
            "rope.freq_base": config.rope.theta,
        }
        for key, value in (fields | (extra or {})).items():
            if value is None:
                continue
            key = key if key.startswith(("tokenizer.", "split.")) else f"{architecture}.{key}"
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            else:
                writer.add_array(key, value)
        for name_, tensor in tensors.items():
            heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
            part = name_.split(".")[-2]
            if architecture == "llama" and part in heads:
                halves = tensor.reshape(heads[part], 2, -1, *tensor.shape[1:])
                tensor = np.ascontiguousarray(halves.swapaxes(1, 2).reshape(tensor.shape))
            kind = (types or {}).get(name_)
            data = tensor if kind is None else gguf.quants.quantize(tensor, kind)
            writer.add_tensor(gguf_name(name_), data, raw_dtype=kind)
        for name_, tensor in (extra_tensors or {}).items():
            writer.add_tensor(name_, tensor)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write
