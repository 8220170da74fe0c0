"""GGUF metadata to ModelConfig. Imports no jax.

As with config.json, a key that would change the numbers and is not honoured is refused by name.
"""

from typing import Any

import numpy as np

from jaxkv.core.errors import CheckpointError
from jaxkv.core.model_config import ModelConfig, RopeConfig
from jaxkv.loading.gguf_file import GGUFFile

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

# Keys below "<architecture>." that this module reads.
_HONOURED = frozenset({
    "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
    "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "attention.layer_norm_rms_epsilon", "attention.sliding_window",
    "rope.dimension_count", "rope.freq_base", "rope.scale_linear", "rope.scaling.type", "rope.scaling.factor",
    "rope.scaling.original_context_length", "rope.scaling.yarn_beta_fast", "rope.scaling.yarn_beta_slow",
    "rope.scaling.finetuned",  # says only how the model was trained
})  # fmt: skip
# Keys that may only have the value they have when absent.
_FIXED = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.causal": True,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "use_parallel_residual": False,
    "tensor_data_layout": "Meta AI original pth",  # the row order of q and k that gguf_source undoes
}

# Llama 3.1 to 3.3 all have these; the file stores only the resulting divisors (rope_freqs.weight).
_LLAMA3_LOW, _LLAMA3_HIGH = 1.0, 4.0
_LLAMA3_ORIGINAL_LENGTHS = (8192, 4096, 2048, 16_384, 32_768)


def parse_gguf_config(gguf: GGUFFile, rope_freqs: np.ndarray | None = None) -> ModelConfig:
    """ModelConfig of a GGUF header.

    Args:
      gguf: the header.
      rope_freqs: f32[head_dim / 2], the tensor `rope_freqs.weight` where the file has one: divisors of the RoPE
        frequencies, from which the llama3 scaling is derived.

    Raises CheckpointError naming file, key and value for whatever is missing, unknown or not honoured.
    """
    if gguf.architecture not in ARCHITECTURES:
        raise CheckpointError(
            f"{gguf.path}: general.architecture is {gguf.architecture!r}, which is not supported; "
            f"supported: {', '.join(ARCHITECTURES)}."
        )
    if gguf.metadata.get("split.count", 1) > 1:
        raise CheckpointError(f"{gguf.path}: a GGUF split over {gguf.metadata['split.count']} files; merge it first.")
    keys = _Keys(gguf)
    keys.refuse_unhonoured()
    hidden_size, num_layers = keys.positive("embedding_length"), keys.positive("block_count")
    num_heads = keys.positive("attention.head_count")
    num_kv_heads = keys.positive("attention.head_count_kv", num_heads)
    if num_heads % num_kv_heads:
        raise keys.error("attention.head_count_kv", f"is {num_kv_heads}, which does not divide {num_heads} heads.")
    head_dim = keys.positive("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.positive(key, head_dim) != head_dim:
            raise keys.error(key, f"is {keys.get(key)}, but only heads of one size, {head_dim}, are supported.")
    context_length = keys.positive("context_length")
    window = _window(keys)
    embedding = gguf.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{gguf.path}: tensor token_embd.weight [vocabulary, {hidden_size}] is missing.")
    tokens = gguf.metadata.get("tokenizer.ggml.tokens")
    if tokens is not None and len(tokens) > embedding.shape[0]:
        raise CheckpointError(
            f"{gguf.path}: {len(tokens)} tokens in the vocabulary, but token_embd.weight has {embedding.shape[0]} rows."
        )
    return ModelConfig(
        architecture=ARCHITECTURES[gguf.architecture],
        vocab_size=embedding.shape[0],
        hidden_size=hidden_size,
        intermediate_size=keys.positive("feed_forward_length"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_shortest(keys.number("attention.layer_norm_rms_epsilon")),
        max_position_embeddings=context_length,
        rope=_rope(keys, context_length, head_dim, rope_freqs),
        window_sizes=(window,) * num_layers,
        tie_word_embeddings="output.weight" not in gguf.tensors,
        qkv_bias=gguf.architecture == "qwen2" or "blk.0.attn_q.bias" in gguf.tensors,
        o_bias="blk.0.attn_output.bias" in gguf.tensors,
        mlp_bias="blk.0.ffn_gate.bias" in gguf.tensors,
        qk_norm=gguf.architecture == "qwen3",
        dtype={"F16": "float16", "BF16": "bfloat16"}.get(embedding.type_name, "float32"),
        bos_token_id=gguf.metadata.get("tokenizer.ggml.bos_token_id"),
        eos_token_ids=_eos_token_ids(gguf),
        pad_token_id=gguf.metadata.get("tokenizer.ggml.padding_token_id"),
    )


def llama3_divisors(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """f64[head_dim / 2]: what llama3 scaling divides each RoPE frequency by."""
    assert rope.original_max_position_embeddings is not None
    wavelength = 2 * np.pi * rope.theta ** (np.arange(0, head_dim, 2) / head_dim)
    rotations = rope.original_max_position_embeddings / wavelength
    blend = (rotations - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blend = np.clip(blend, 0.0, 1.0)
    return 1.0 / ((1.0 - blend) / rope.factor + blend)


class _Keys:
    """Typed access to the keys below the architecture's prefix."""

    def __init__(self, gguf: GGUFFile):
        self._gguf, self._prefix = gguf, gguf.architecture + "."

    def get(self, name: str) -> Any:
        return self._gguf.metadata.get(self._prefix + name)

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._gguf.path}: {self._prefix}{name} {problem}")

    def refuse_unhonoured(self) -> None:
        for key, value in self._gguf.metadata.items():
            name = key.removeprefix(self._prefix)
            if name == key or name in _HONOURED:
                continue
            if name not in _FIXED or value != _FIXED[name]:
                expected = f", only {_FIXED[name]!r}" if name in _FIXED else ""
                raise self.error(name, f"= {value!r} is not supported{expected}.")

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, list):  # one entry a layer
            if len(set(value)) != 1:
                raise self.error(name, f"differs between layers ({sorted(set(value))}), which is not supported.")
            value = value[0]
        if value is None:
            raise self.error(name, "is missing from the metadata.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"is {value!r}, expected a positive integer.")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(name, "is missing from the metadata.")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.error(name, f"is {value!r}, expected a number.")
        return float(value)


def _shortest(value: float) -> float:
    """The decimal that a float32 was written for: 9.99999974e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _window(keys: _Keys) -> int | None:
    """Mistral files have architecture llama; their window holds for every layer, as in MistralForCausalLM."""
    window = keys.get("attention.sliding_window")
    if not window:
        return None
    return keys.positive("attention.sliding_window")


def _rope(keys: _Keys, context_length: int, head_dim: int, rope_freqs: np.ndarray | None) -> RopeConfig:
    theta = _shortest(keys.number("rope.freq_base", 10_000.0))
    kind = keys.get("rope.scaling.type")
    if kind is None:
        kind = "none" if keys.get("rope.scale_linear") is None else "linear"
    if rope_freqs is not None:
        if kind != "none":
            raise keys.error("rope.scaling.type", f"is {kind!r} beside rope_freqs.weight; only one may scale RoPE.")
        return _rope_from_divisors(keys, theta, head_dim, rope_freqs)
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind not in ("linear", "yarn"):
        raise keys.error("rope.scaling.type", f"is {kind!r}; supported: none, linear, yarn.")
    factor = _shortest(keys.number("rope.scaling.factor", keys.get("rope.scale_linear")))
    if kind == "linear":
        return RopeConfig(theta=theta, type="linear", factor=factor)
    return RopeConfig(
        theta=theta,
        type="yarn",
        factor=factor,
        original_max_position_embeddings=keys.positive("rope.scaling.original_context_length", context_length),
        beta_fast=_shortest(keys.number("rope.scaling.yarn_beta_fast", 32.0)),
        beta_slow=_shortest(keys.number("rope.scaling.yarn_beta_slow", 1.0)),
    )


def _rope_from_divisors(keys: _Keys, theta: float, head_dim: int, rope_freqs: np.ndarray) -> RopeConfig:
    if rope_freqs.shape != (head_dim // 2,):
        raise keys.error("rope.dimension_count", f"= {head_dim} does not fit rope_freqs.weight {rope_freqs.shape}.")
    if np.all(rope_freqs == 1.0):
        return RopeConfig(theta=theta)
    factor = _shortest(float(rope_freqs.max()))
    for length in _LLAMA3_ORIGINAL_LENGTHS:
        rope = RopeConfig(theta, "llama3", factor, length, _LLAMA3_LOW, _LLAMA3_HIGH)
        if np.allclose(llama3_divisors(rope, head_dim), rope_freqs, rtol=1e-5, atol=0):
            return rope
    raise keys.error(
        "rope.freq_base",
        f"= {theta} with tensor rope_freqs.weight = {rope_freqs[:3]}...{rope_freqs[-1:]} is no llama3 scaling with "
        f"low_freq_factor 1, high_freq_factor 4 and an original length of {_LLAMA3_ORIGINAL_LENGTHS}; not supported.",
    )


def _eos_token_ids(gguf: GGUFFile) -> tuple[int, ...]:
    """End of sequence, of turn and of message: each ends a generation."""
    names = ("eos_token_id", "eot_token_id", "eom_token_id")
    found = [gguf.metadata.get(f"tokenizer.ggml.{name}") for name in names]
    return tuple(dict.fromkeys(token for token in found if token is not None))
