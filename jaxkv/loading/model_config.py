"""A Hugging Face config.json to ModelConfig: every field is honoured, known to be harmless, or refused by name.

Imports no jax. Defaults of absent fields are those of transformers 5.24's config classes, except for the sizes that
shape the weights, which must be given: a guessed hidden_size is never right.
"""

import dataclasses
from typing import Any

from jaxkv.core.errors import CheckpointError
from jaxkv.core.model_config import ModelConfig
from jaxkv.loading.rope_config import ROPE_FIELDS, parse_rope


@dataclasses.dataclass(frozen=True)
class _Family:
    """What sets one architecture apart, as its transformers class has it.

    Attributes:
      num_key_value_heads: default when the field is absent; None means as many as query heads.
      head_dim: default when absent; None means hidden_size / num_attention_heads.
      attention_bias: "config" reads the field for q, k, v and o; "qkv" is fixed to q, k, v; "none" has no bias.
      mlp_bias: reads the `mlp_bias` field; others have none.
      window: "none"; "all" layers use sliding_window; "layers" chooses by layer_types or max_window_layers.
    """

    max_position_embeddings: int
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    attention_bias: str = "none"
    mlp_bias: bool = False
    qk_norm: bool = False
    window: str = "none"
    bos_token_id: int | None = None
    eos_token_id: int | None = None


FAMILIES: dict[str, _Family] = {
    "LlamaForCausalLM": _Family(2048, attention_bias="config", mlp_bias=True, bos_token_id=1, eos_token_id=2),
    "MistralForCausalLM": _Family(131_072, num_key_value_heads=8, window="all", bos_token_id=1, eos_token_id=2),
    "Qwen2ForCausalLM": _Family(32_768, num_key_value_heads=32, attention_bias="qkv", window="layers"),
    "Qwen3ForCausalLM": _Family(
        32_768, num_key_value_heads=32, head_dim=128, attention_bias="config", qk_norm=True, window="layers"
    ),
}

_HONOURED = ROPE_FIELDS | {
    "architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings", "tie_word_embeddings",
    "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id",
    "attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types",
}  # fmt: skip

# Fields that may only have the values this code computes with; anything else would change the numbers.
_FIXED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),  # two names of one function
    "hidden_activation": ("silu", "swish"),
    "pretraining_tp": (0, 1),  # above 1 transformers sums partial matmuls in another order
    "rope_interleaved": (False,),
    "use_mrope": (False,),
    "add_cross_attention": (False,),
    "is_encoder_decoder": (False,),
    "pruned_heads": ({},),
}

_REFUSED = {
    "quantization_config": "quantised safetensors are not supported; take the unquantised model or a GGUF file of it",
    "per_layer_config": "every layer must have the same architecture",
}

# Fields that change no logits at inference, by reason.
_HARMLESS = frozenset(
    # Names, versions and marks of the tool that wrote the file.
    ["model_type", "_name_or_path", "name_or_path", "transformers_version", "transformers.js_config", "_commit_hash"]
    + [
        "unsloth_fixed",
        "unsloth_version",
        "is_llama_config",
        "tokenizer_class",
        "finetuning_task",
        "task_specific_params",
    ]
    # Custom code: transformers too runs its own class for these architectures unless told to trust remote code.
    + ["auto_map"]
    # Training only: initialisation, dropout, noise.
    + ["initializer_range", "attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "neftune_noise_alpha"]
    # How transformers runs or returns things.
    + ["use_cache", "return_dict", "return_dict_in_generate", "output_hidden_states", "output_attentions"]
    + ["output_scores", "torchscript", "use_bfloat16", "tf_legacy_loss", "chunk_size_feed_forward"]
    + ["_attn_implementation_autoset", "_attn_implementation", "attn_implementation", "_flash_attn_2_enabled"]
    + ["tie_last_hidden_states", "is_decoder", "cross_attention_hidden_size", "tie_encoder_decoder"]
    # Heads of other tasks.
    + ["id2label", "label2id", "num_labels", "problem_type"]
    # Generation settings of old files; requests bring their own.
    + ["max_length", "max_new_tokens", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"]
    + ["diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"]
    + ["no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences"]
    + ["forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "exponential_decay_length_penalty"]
    + ["suppress_tokens", "begin_suppress_tokens", "decoder_start_token_id", "sep_token_id", "prefix"]
)

_DTYPES = ("float32", "bfloat16", "float16")


def parse_hf_config(
    config: dict[str, Any], source: str, generation_config: dict[str, Any] | None = None
) -> ModelConfig:
    """ModelConfig of a parsed config.json.

    Args:
      config: the JSON object.
      source: its path, for messages.
      generation_config: the parsed generation_config.json, whose token ids win over config.json's.

    Raises CheckpointError naming source, field, value and what is supported: for an architecture or rope type that is
    not known, a missing or impossible value, and any field whose value would change the numbers unnoticed.
    """
    architecture, family = _family(config, source)
    _refuse_unhonoured(config, source)
    fields = _Fields(config, source)
    hidden_size = fields.positive("hidden_size")
    num_heads = fields.positive("num_attention_heads")
    num_kv_heads = _num_kv_heads(fields, family, num_heads)
    head_dim = _head_dim(fields, family, hidden_size, num_heads)
    num_layers = fields.positive("num_hidden_layers")
    max_position_embeddings = fields.positive("max_position_embeddings", family.max_position_embeddings)
    qkv_bias, o_bias = _attention_bias(fields, family, architecture)
    mlp_bias = fields.boolean("mlp_bias", False)
    if mlp_bias and not family.mlp_bias:
        raise fields.error("mlp_bias", f"is true, but {architecture} has no MLP biases.")
    tokens = _token_ids(config, generation_config or {}, family)
    eos = tokens["eos_token_id"]
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.positive("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.positive("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        max_position_embeddings=max_position_embeddings,
        rope=parse_rope(config, max_position_embeddings, source),
        window_sizes=_window_sizes(fields, family, architecture, num_layers),
        tie_word_embeddings=fields.boolean("tie_word_embeddings", False),
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        qk_norm=family.qk_norm,
        dtype=_dtype(fields),
        bos_token_id=tokens["bos_token_id"],
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
        pad_token_id=tokens["pad_token_id"],
    )


class _Fields:
    """Typed access to the config; an explicit null counts as absent."""

    def __init__(self, config: dict[str, Any], source: str):
        self._config, self._source = config, source

    def get(self, name: str) -> Any:
        return self._config.get(name)

    def __contains__(self, name: str) -> bool:
        return name in self._config

    def error(self, name: str, problem: str) -> CheckpointError:
        return CheckpointError(f"{self._source}: {name} {problem}")

    def positive(self, name: str, default: int | None = None) -> int:
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            raise self.error(name, "is missing; it is needed to know the weights' shapes.")
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(name, f"is {value!r}, expected a positive integer.")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            raise self.error(name, f"is {value!r}, expected a number, at least 0.")
        return float(value)

    def boolean(self, name: str, default: bool) -> bool:
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise self.error(name, f"is {value!r}, expected true or false.")
        return value


def _family(config: dict[str, Any], source: str) -> tuple[str, _Family]:
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in FAMILIES:
        raise CheckpointError(
            f"{source}: architectures is {names!r} (model_type {config.get('model_type')!r}), which is not supported; "
            f"supported: {', '.join(FAMILIES)}."
        )
    return names[0], FAMILIES[names[0]]


def _refuse_unhonoured(config: dict[str, Any], source: str) -> None:
    for name, value in config.items():
        if value is None or name in _HONOURED or name in _HARMLESS:
            continue
        if name in _FIXED:
            if value not in _FIXED[name]:
                allowed = " or ".join(repr(v) for v in _FIXED[name])
                raise CheckpointError(f"{source}: {name} = {value!r} is not supported, only {allowed}.")
            continue
        if name in _REFUSED:
            raise CheckpointError(f"{source}: {name} is present: {_REFUSED[name]}.")
        # false, {} and [] switch nothing on, whatever the field means.
        if value is not False and value not in ({}, []):
            raise CheckpointError(
                f"{source}: field {name} = {value!r} is not known, so it might change what the model computes. Remove it "
                "if you know that it does not."
            )


def _num_kv_heads(fields: _Fields, family: _Family, num_heads: int) -> int:
    absent = family.num_key_value_heads if "num_key_value_heads" not in fields else None
    num_kv_heads = fields.positive("num_key_value_heads", absent or num_heads)
    if num_heads % num_kv_heads:
        raise fields.error("num_key_value_heads", f"is {num_kv_heads}, which does not divide {num_heads} query heads.")
    return num_kv_heads


def _head_dim(fields: _Fields, family: _Family, hidden_size: int, num_heads: int) -> int:
    if fields.get("head_dim") is None and family.head_dim is None and hidden_size % num_heads:
        raise fields.error(
            "hidden_size", f"is {hidden_size}, no multiple of {num_heads} heads, and head_dim is absent."
        )
    head_dim = fields.positive("head_dim", family.head_dim or hidden_size // num_heads)
    if head_dim % 2:
        raise fields.error("head_dim", f"is {head_dim}; RoPE needs an even one.")
    return head_dim


def _attention_bias(fields: _Fields, family: _Family, architecture: str) -> tuple[bool, bool]:
    """(q, k and v have a bias, o has one)."""
    if family.attention_bias == "config":
        bias = fields.boolean("attention_bias", False)
        return bias, bias
    fixed = family.attention_bias == "qkv"
    if fields.boolean("attention_bias", fixed) != fixed:
        has = "always has q, k and v biases" if fixed else "has no attention biases"
        raise fields.error("attention_bias", f"is {fields.get('attention_bias')}, but {architecture} {has}.")
    return fixed, False


def _window_sizes(fields: _Fields, family: _Family, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    window = None
    if fields.get("sliding_window") is not None or ("sliding_window" not in fields and family.window != "none"):
        window = fields.positive("sliding_window", 4096)
    if family.window == "none":
        if window is not None or fields.boolean("use_sliding_window", False):
            raise fields.error("sliding_window", f"= {window} is not honoured: {architecture} has full attention only.")
        sizes: tuple[int | None, ...] = (None,) * num_layers
    elif family.window == "all":
        if window is not None and not fields.boolean("use_sliding_window", True):
            raise fields.error("use_sliding_window", f"is false, but sliding_window is {window}; set that to null.")
        sizes = (window,) * num_layers
    else:
        window = window if fields.boolean("use_sliding_window", False) else None
        first = fields.get("max_window_layers")
        first = 28 if first is None else first  # the default of Qwen2Config and Qwen3Config
        sizes = tuple(window if i >= first else None for i in range(num_layers))
    layer_types = fields.get("layer_types")
    if layer_types is None:
        return sizes
    if len(layer_types) != num_layers:
        raise fields.error("layer_types", f"has {len(layer_types)} entries for num_hidden_layers = {num_layers}.")
    for i, kind in enumerate(layer_types):
        if kind not in ("full_attention", "sliding_attention"):
            raise fields.error(f"layer_types[{i}]", f"is {kind!r}; supported: full_attention, sliding_attention.")
        if kind == "sliding_attention" and window is None:
            raise fields.error(f"layer_types[{i}]", "is sliding_attention, but no sliding_window is in force.")
    named = tuple(window if kind == "sliding_attention" else None for kind in layer_types)
    if family.window != "layers" and named != sizes:
        raise fields.error("layer_types", f"mixes windows, but {architecture} has the same attention in every layer.")
    return named


def _dtype(fields: _Fields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    value = fields.get(name)
    if value is None:
        return "float32"
    if value not in _DTYPES:
        raise fields.error(name, f"is {value!r}; supported: {', '.join(_DTYPES)}.")
    return value


def _token_ids(config: dict[str, Any], generation_config: dict[str, Any], family: _Family) -> dict[str, Any]:
    """generation_config.json first, then config.json (where a null stands), then the class's default."""
    defaults = {"bos_token_id": family.bos_token_id, "eos_token_id": family.eos_token_id, "pad_token_id": None}
    tokens = {name: config.get(name, default) for name, default in defaults.items()}
    return tokens | {name: generation_config[name] for name in tokens if generation_config.get(name) is not None}
