"""A second, independent forward pass: numpy in float64, whole sequence at once, no cache, no blocks."""

import numpy as np

from jaxkv.core.model_config import ModelConfig
from jaxkv.models.llama import KVStorage


def _rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


class DenseModel:
    """Logits of plain token sequences; default RoPE only."""

    def __init__(self, config: ModelConfig, tensors: dict[str, np.ndarray], storage: KVStorage = KVStorage()):
        """`storage`: a window, in which the sinks are seen as from the first place behind them and a full window."""
        assert config.rope.type == "default", "the dense model knows unscaled RoPE only"
        self.config, self._storage = config, storage
        self._tensors = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def logits(self, token_ids: tuple[int, ...], positions: np.ndarray | None = None) -> np.ndarray:
        """float64 [n, V]: row i is the distribution of the token after token_ids[: i + 1].

        `positions`: rising ones, when tokens are left out that no row sees.
        """
        config = self.config
        positions = np.arange(len(token_ids)) if positions is None else positions
        x = self._tensors["model.embed_tokens.weight"][list(token_ids)]
        for layer in range(config.num_layers):
            prefix = f"model.layers.{layer}."
            normed = _rms_norm(x, self._tensors[prefix + "input_layernorm.weight"], config.rms_norm_eps)
            x = x + self._attention(normed, prefix + "self_attn.", layer, positions)
            normed = _rms_norm(x, self._tensors[prefix + "post_attention_layernorm.weight"], config.rms_norm_eps)
            gate = self._linear(normed, prefix + "mlp.gate_proj")
            gate = gate / (1 + np.exp(-gate))
            x = x + self._linear(gate * self._linear(normed, prefix + "mlp.up_proj"), prefix + "mlp.down_proj")
        x = _rms_norm(x, self._tensors["model.norm.weight"], config.rms_norm_eps)
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        return x @ self._tensors[head].T

    def generate(self, prompt: tuple[int, ...], count: int) -> list[int]:
        """Greedy tokens, everything recomputed for each."""
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logits(tuple(tokens))[-1].argmax()))
        return tokens[len(prompt) :]

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = x @ self._tensors[name + ".weight"].T
        bias = self._tensors.get(name + ".bias")
        return y if bias is None else y + bias

    def _attention(self, x: np.ndarray, prefix: str, layer: int, positions: np.ndarray) -> np.ndarray:
        config, n = self.config, len(x)
        window = config.windows_within(self._storage.window)[layer]
        num_sinks = self._storage.num_sinks if window != config.window_sizes[layer] else 0
        heads = {"q": config.num_heads, "k": config.num_kv_heads, "v": config.num_kv_heads}
        q, k, v = (self._linear(x, f"{prefix}{name}_proj").reshape(n, count, -1) for name, count in heads.items())
        if config.qk_norm:
            q = _rms_norm(q, self._tensors[prefix + "q_norm.weight"], config.rms_norm_eps)
            k = _rms_norm(k, self._tensors[prefix + "k_norm.weight"], config.rms_norm_eps)
        seen_from = positions if window is None else np.minimum(positions, window + num_sinks - 1)
        far, q, k = self._rotate(q, seen_from), self._rotate(q, positions), self._rotate(k, positions)
        distance = positions[:, None] - positions
        is_far = (distance >= window if window else distance < 0) & (positions < num_sinks)
        hidden = (distance < 0) | ((distance >= window) & ~is_far if window else False)
        out = np.empty_like(q)
        for head in range(config.num_heads):
            kv_head = head // config.num_query_groups
            scores = np.where(is_far, far[:, head] @ k[:, kv_head].T, q[:, head] @ k[:, kv_head].T)
            scores /= np.sqrt(config.head_dim)
            scores[hidden] = -np.inf
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[:, head] = weights / weights.sum(-1, keepdims=True) @ v[:, kv_head]
        return self._linear(out.reshape(n, -1), prefix + "o_proj")

    def _rotate(self, x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        """Rotation of the complex numbers x[i] + 1j * x[i + D/2]."""
        half = x.shape[-1] // 2
        turns = positions[:, None] * self.config.rope.theta ** (-np.arange(half) / half)
        turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * turns)[:, None]
        return np.concatenate([turned.real, turned.imag], axis=-1)
