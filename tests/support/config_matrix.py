"""Configurations that together use every field which changes the numbers, and their fixed prompt."""

from typing import Any

from tests.support.tiny_models import random_tokens, tiny_config

# Longer than every window and than the original length of every scaled RoPE here.
PROMPT = random_tokens(100, seed=7)
# What `dynamic` scaling takes its one fixed base from.
MAX_MODEL_LEN = 128

_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
_MISTRAL = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
_QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
_QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}

MATRIX: dict[str, dict[str, Any]] = {
    "llama": tiny_config(),
    "llama_mha_bias_tied": tiny_config(
        num_key_value_heads=4, attention_bias=True, mlp_bias=True, tie_word_embeddings=True
    ),
    "llama_mqa_eps": tiny_config(num_key_value_heads=1, head_dim=16, rms_norm_eps=0.05, rope_theta=500.0),
    "llama_linear": tiny_config(rope_scaling={"type": "linear", "factor": 4.0}),
    "llama_dynamic": tiny_config(rope_scaling={"rope_type": "dynamic", "factor": 3.0}, max_position_embeddings=64),
    "llama_llama3": tiny_config(rope_scaling=_LLAMA3 | {"original_max_position_embeddings": 64}, rope_theta=500_000.0),
    "llama_llama3_other": tiny_config(
        rope_scaling=_LLAMA3 | {"factor": 32.0, "high_freq_factor": 16.0, "original_max_position_embeddings": 256}
    ),
    "llama_yarn": tiny_config(
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    ),
    "llama_yarn_factors": tiny_config(
        rope_scaling={
            "type": "yarn", "factor": 16.0, "original_max_position_embeddings": 40, "attention_factor": 1.3,
            "beta_fast": 16.0, "beta_slow": 2.0, "truncate": False,
        }
    ),
    "llama_yarn_mscale": tiny_config(
        rope_scaling={
            "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.5,
            "mscale_all_dim": 0.7,
        }
    ),
    "mistral_window": tiny_config(**_MISTRAL, sliding_window=24),
    "mistral_no_window": tiny_config(**_MISTRAL, sliding_window=None, rope_theta=1_000_000.0),
    "qwen2": tiny_config(**_QWEN2, head_dim=16, tie_word_embeddings=True),
    "qwen2_window": tiny_config(
        **_QWEN2, head_dim=16, use_sliding_window=True, sliding_window=17, max_window_layers=1, num_hidden_layers=3
    ),
    "qwen3": tiny_config(**_QWEN3),
    "qwen3_bias_window": tiny_config(
        **_QWEN3, attention_bias=True, use_sliding_window=True, sliding_window=33, max_window_layers=0
    ),
}  # fmt: skip
for _name, _config in MATRIX.items():
    if _config["model_type"] in ("mistral", "qwen2"):
        del _config["attention_bias"]  # not a field of theirs
    if _config["model_type"] != "llama":
        del _config["mlp_bias"]

# Those that the torch-free test compares with stored arrays.
GOLDEN = (
    "llama_mha_bias_tied", "llama_mqa_eps", "llama_dynamic", "llama_llama3", "llama_yarn_factors", "qwen2_window",
    "qwen3",
)  # fmt: skip
# Positions whose logits are stored.
GOLDEN_POSITIONS = tuple(range(3, 100, 8))
