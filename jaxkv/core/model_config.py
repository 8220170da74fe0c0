"""What a Llama-architecture checkpoint says of itself, with every field that changes the numbers."""

import dataclasses
from typing import Literal

RopeType = Literal["default", "linear", "dynamic", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding parameters, named as in Hugging Face's `rope_scaling`; unused ones keep their defaults."""

    theta: float = 10_000.0
    type: RopeType = "default"
    factor: float = 1.0
    # Length the model was trained on before scaling; llama3, yarn and dynamic need it.
    original_max_position_embeddings: int | None = None
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Architecture of one decoder-only model of the Llama family.

    Attributes:
      architecture: the Hugging Face class name the checkpoint names, e.g. `LlamaForCausalLM`.
      window_sizes: one entry a layer: sliding window in tokens (a query sees itself and the `window - 1` tokens before
        it), or None for full attention.
      qk_norm: RMSNorm over head_dim on queries and keys before RoPE (Qwen3).
      qkv_bias / o_bias / mlp_bias: which projections carry a bias.
      dtype: the checkpoint's own dtype ("float32", "bfloat16", "float16").
      eos_token_ids: ids that end a generation, from generation_config.json or config.json.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope: RopeConfig
    window_sizes: tuple[int | None, ...]
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    dtype: str = "float32"
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None

    @property
    def num_query_groups(self) -> int:
        """G: query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads

    def windows_within(self, most: int | None) -> tuple[int | None, ...]:
        """`window_sizes` where no layer may see more than `most` tokens back; None: as they are."""
        if most is None:
            return self.window_sizes
        return tuple([most if window is None else min(window, most) for window in self.window_sizes])

    def num_parameters(self) -> int:
        """Scalars stored for this architecture (a tied head is counted once)."""
        e, f, d = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_heads * d, self.num_kv_heads * d
        layer = e * q + 2 * e * kv + q * e + 3 * e * f + 2 * e
        layer += (q + 2 * kv) * self.qkv_bias + e * self.o_bias + (2 * f + e) * self.mlp_bias + 2 * d * self.qk_norm
        head = 0 if self.tie_word_embeddings else self.vocab_size * e
        return self.vocab_size * e + self.num_layers * layer + e + head
