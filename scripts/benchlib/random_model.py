"""A small Llama with random weights in a Hugging Face folder: for what needs a model, but not a trained one."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers

_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "torch_dtype": "float32",
    "bos_token_id": None,
    "eos_token_id": None,
}


def write_random_model(folder: Path, **fields: Any) -> Path:
    """config.json with `fields` changed, model.safetensors and a tokenizer of single bytes; returns `folder`."""
    config = _CONFIG | fields
    rng = np.random.default_rng(0)
    tensors = {name: _weights(rng, shape) for name, shape in _shapes(config).items()}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


def byte_tokenizer() -> tokenizers.Tokenizer:
    """A token a byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE({text: i for i, text in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer


def _shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    e, f, d = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q, kv = config["num_attention_heads"] * d, config["num_key_value_heads"] * d
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], e), "model.norm.weight": (e,)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        shapes |= {
            f"{layer}input_layernorm.weight": (e,),
            f"{layer}post_attention_layernorm.weight": (e,),
            f"{layer}self_attn.q_proj.weight": (q, e),
            f"{layer}self_attn.k_proj.weight": (kv, e),
            f"{layer}self_attn.v_proj.weight": (kv, e),
            f"{layer}self_attn.o_proj.weight": (e, q),
            f"{layer}mlp.gate_proj.weight": (f, e),
            f"{layer}mlp.up_proj.weight": (f, e),
            f"{layer}mlp.down_proj.weight": (e, f),
        }
    return shapes


def _weights(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Norms of 1; matrices that keep an activation's size."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return rng.standard_normal(shape, np.float32) / np.float32(np.sqrt(shape[-1]))
