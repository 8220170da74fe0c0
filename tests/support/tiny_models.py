"""Small random models whose logits depend strongly on the whole history, so that a wrong cache shows in the tokens."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import safetensors.numpy
from flax import nnx

from jaxkv.core.model_config import ModelConfig
from jaxkv.execution.programs import abstract_model
from jaxkv.loading.model_config import parse_hf_config
from jaxkv.loading.weights import hf_name
from jaxkv.models.llama import KVStorage, Llama

TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}


def tiny_config(**fields: Any) -> dict[str, Any]:
    """A Hugging Face config.json, TINY with `fields` changed or added."""
    return TINY | fields


def parse(hf_config: dict[str, Any]) -> ModelConfig:
    return parse_hf_config(hf_config, "tiny model", None)


def random_tensors(config: ModelConfig, seed: int = 0) -> dict[str, np.ndarray]:
    """float32 weights under their Hugging Face names.

    Queries and keys are large, so that attention picks few tokens; so is the head, so that logits spread (std about 3).
    """
    rng = np.random.default_rng(seed)
    model = abstract_model(config, dtype="float32", max_model_len=config.max_position_embeddings)
    shapes = {hf_name(path): v.get_value().shape for path, v in nnx.to_flat_state(nnx.state(model))}
    tensors = {}
    for name in sorted(shapes):
        values = rng.standard_normal(shapes[name], np.float32)
        if name.endswith("norm.weight"):
            values = 1 + 0.2 * values
        elif name.endswith(".bias"):
            values = 0.3 * values
        elif "embed_tokens" not in name:
            gain = 2.0 if ("q_proj" in name or "k_proj" in name) else 3.0 if "lm_head" in name else 1.0
            values = gain * values / np.sqrt(shapes[name][-1])
        elif config.tie_word_embeddings:
            values = 0.4 * values
        tensors[name] = values.astype(np.float32)
    return tensors


def model_of(
    config: ModelConfig,
    tensors: dict[str, np.ndarray],
    *,
    max_model_len: int | None = None,
    storage: KVStorage = KVStorage(),
) -> Llama:
    """The float32 model with these weights."""
    limit = max_model_len or config.max_position_embeddings
    graph, state = nnx.split(abstract_model(config, dtype="float32", max_model_len=limit, storage=storage))
    flat = {path: v.replace(jnp.asarray(tensors[hf_name(path)])) for path, v in nnx.to_flat_state(state)}
    return nnx.merge(graph, nnx.from_flat_state(flat))


def write_folder(folder: Path, hf_config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """A Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(hf_config))
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


def random_tokens(count: int, vocab_size: int = TINY["vocab_size"], seed: int = 0) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, vocab_size, count).tolist())
